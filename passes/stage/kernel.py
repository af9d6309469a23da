"""The inner loops of the stage search, compiled to machine code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopar.passes.compiled import compiled

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@compiled
def fill_sums(
    sums: Floats, stages: tuple[Floats, Floats, Ints], cut: Floats, devices: Ints, flights: Ints,
    threshold: float,
) -> None:  # fmt: skip
    """Fill `sums[s, i, d]`: the least sum of seconds of s stages of layers i.. on d devices.

    `stages` are, over [o, i, j], the seconds of layers i..j under option o, the part of them that
    counts, and the microbatches in flight that they bear; `cut[0, o]` counts at both ends. A stage
    is left out where its seconds, or the `cut[1, o]` for which it keeps wires busy, are above the
    threshold, or it does not bear `flights[s]`. Option o has `devices[o]`.
    """
    price, waits, bears = stages
    most, layers, every = sums.shape[0] - 1, sums.shape[1] - 1, sums.shape[2] - 1
    sums[:] = np.inf
    sums[0, layers, 0] = 0.0
    for s in range(1, most + 1):
        for i in range(layers - s, -1, -1):
            for o in range(len(devices)):
                if cut[1, o, i] > threshold:
                    continue
                count = devices[o]
                # The last stage takes all that is left; others leave a layer for each behind.
                first = layers if s == 1 else i + 1
                for after in range(first, layers - s + 2):
                    if bears[o, i, after - 1] < flights[s]:
                        continue
                    if max(price[o, i, after - 1], cut[1, o, after]) > threshold:
                        continue
                    seconds = waits[o, i, after - 1] + cut[0, o, i] + cut[0, o, after]
                    for d in range(count + s - 1, every + 1):
                        total = seconds + sums[s - 1, after, d - count]
                        sums[s, i, d] = min(sums[s, i, d], total)
