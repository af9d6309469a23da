"""Cut of a step into parts, one for each stage, pass and loop, and their data.

    1. step_analysis        the loop, home, makers and readers of every op
    2. part_assignment      op -> part
    3. split                part -> graph           (with part_dataflow: who reads whom)
    4. submesh_graph        the parts of a submesh as one graph, to shard; the sharding part by part
    5. register_allocation  value -> registers of a submesh, and where they are freed

A step of two stages on two submeshes, with three microbatches and `1f1b` (F forward, B backward):

    mesh0 | hoist setup F0.0 F0.1  ...   B0.0 F0.2 B0.1  ...  B0.2 update
    mesh1 | setup       ...  F1.0 B1.0  F1.1 B1.1 F1.2 B1.2        update
            once        ---------- the loop: each part m times ---- once, after the sums

A step with two gradient passes has two loops, and an update after each. `docs/explanation/
stage-programs.md` tells which ops go where, and why.
"""
