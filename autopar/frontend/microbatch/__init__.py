"""The step on one microbatch: traced a second time, and made to agree with the whole batch's trace.

1. batch_inputs     which inputs hold rows of the batch; the arguments cut to fewer rows
2. part_trace       the second trace, on the rows of one microbatch
3. alignment        constants of the second trace become the whole batch's; a trace on 2 rows
                    stands for one on 1
4. batch_sources    values that have rows though nothing of the batch is in them (iota, random
                    bits): each microbatch makes its own rows of the whole batch's
5. sliced_rng       those rows, computed without the rest
6. batched_gather   x[arange(n), i] as a read of each row at its own place
7. state_sums       state.at[i].add(rows) as state + a sum over rows
"""
