"""The recurrence behind PipeDream's partition, over one level of equal components.

    N, M     layers of the chain, components; a cut i = 0..N lies after layer i
    T(i,j,m) ms of layers i+1..j as a stage of m replicas
    H(i)     ms of the cut after layer i
    A(j,m)   = min(T(0,j,m), min over i<j, m'<m of max(A(i,m-m'), H(i), T(i,j,m')))

Where T falls as i grows, its best i for given j, m and m' is where T crosses the least of
max(A, H) over i..j-1, which rises. The crossing is found in blocks of powers of two, so that all
takes O(N M^2 log N), and is exact: nothing but terms of the recurrence is ever compared. Where T
need not fall, all i are tried: O(N^2 M^2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Within = Callable[[Ints, Ints], Floats]  # ms of layers i+1..j on one component, for i < j


@dataclass(frozen=True, eq=False)
class StageTimes:
    """T(i,j,m) = 1/m max(within(i,j), sync_ms[m] weights(i,j)), ms, of layers start+1 .. start+N.

    `falls` says that `within` falls as i grows, as sums do.
    Under a limit T is 0 where it keeps to it, else infinite.
    """

    layer_count: int
    within: Within
    parameter_bytes: Floats  # [i], of the whole chain's layers 1..i
    sync_ms: Floats  # [m], of one byte on m replicas
    cut_ms: Floats  # [i], H of the whole chain
    falls: bool
    start: int = 0
    limit_ms: float | None = None

    def compute_ms(self, first: Ints, last: Ints) -> Floats:
        """What layers first+1..last take on one component."""
        return self.within(first + self.start, last + self.start)

    def sync_ms_on(self, first: Ints, last: Ints, replicas: Ints) -> Floats:
        """What their weights take to be synchronised."""
        weights = self.parameter_bytes
        nbytes = weights[last + self.start] - weights[first + self.start]
        return np.asarray(self.sync_ms[replicas] * nbytes)

    def ms(self, first: Ints, last: Ints, replicas: Ints) -> Floats:
        """T."""
        compute = self.compute_ms(first, last)
        found = np.maximum(compute, self.sync_ms_on(first, last, replicas)) / replicas
        return found if self.limit_ms is None else np.where(found <= self.limit_ms, 0.0, np.inf)

    def head(self, table: Floats) -> Floats:
        """What may stand before a stage: max(A(i,m), H(i)), or under a limit 1 + A(i,m)."""
        cuts = self.cut_ms[self.start : self.start + self.layer_count + 1]
        if self.limit_ms is None:
            return np.maximum(table, cuts)
        return np.where(cuts <= self.limit_ms, table + 1, np.inf)

    def of(self, first: int, last: int) -> StageTimes:
        """Those of layers first+1..last of the whole chain."""
        return replace(self, start=first, layer_count=last - first)


def bottlenecks(times: StageTimes, workers: int) -> Floats:
    """A(j,m) as [m, j] for m = 0..M; infinite where j or m is 0.

    Under a limit it is the least number of cuts with which no term exceeds it.
    """
    cuts = np.arange(times.layer_count + 1)
    least = np.full((workers + 1, len(cuts)), np.inf)
    heads = _Heads(workers, len(cuts))
    dense = None if times.falls else _matrices(times, workers)
    for m in range(1, workers + 1):
        least[m, 1:] = times.ms(np.zeros_like(cuts[1:]), cuts[1:], np.array(m))
        if m > 1:
            rest = _meeting(times, heads, m) if dense is None else _tried(dense, heads, m)
            np.minimum(least[m], rest, out=least[m])
        heads.put(m, times.head(least[m]))
    return least


def fewest_stages(times: StageTimes, workers: int) -> tuple[tuple[int, int, int], ...]:
    """Stages (first cut, last cut, replicas) of least bottleneck on all workers.

    Of equals those of fewest stages; of these the last stage has the fewest replicas, then the
    earliest first layer, and so on to the first stage.
    """
    last, left = times.layer_count, workers
    limited = replace(times, limit_ms=float(bottlenecks(times, workers)[left, last]))
    cut_count = bottlenecks(limited, workers)
    stages: list[tuple[int, int, int]] = []
    while last > 0:
        first, replicas = _last_stage(limited, cut_count, last, left)
        stages.append((first, last, replicas))
        last, left = first, left - replicas
    return tuple(reversed(stages))


def _last_stage(limited: StageTimes, cut_count: Floats, last: int, left: int) -> tuple[int, int]:
    """The first cut and the replicas of the last stage of a best partition."""
    cuts = np.arange(last)
    wanted = cut_count[left, last]
    for replicas in range(1, left):
        before = limited.head(cut_count[left - replicas])[:last]
        total = np.maximum(before, limited.ms(cuts, np.array(last), np.array(replicas)))
        found = np.flatnonzero(total == wanted)
        if len(found):
            return int(found[0]), replicas
    return 0, left


class _Heads:
    """max(A(i,m), H(i)) by m and i, with the least over every block of a power of two of cuts."""

    def __init__(self, workers: int, cut_count: int) -> None:
        widths = [1 << k for k in range(cut_count.bit_length())]
        # [m, i] covers cuts i .. i + width - 1
        self.blocks = [(w, np.full((workers + 1, cut_count - w + 1), np.inf)) for w in widths]

    def put(self, m: int, head: Floats) -> None:
        """Take in what may stand before a stage once m workers are in use."""
        row = head
        self.blocks[0][1][m] = row
        for (width, _), (_, wider) in zip(self.blocks, self.blocks[1:], strict=False):
            row = np.minimum(row[:-width], row[width:])
            wider[m] = row


def _meeting(times: StageTimes, heads: _Heads, m: int) -> Floats:
    """The least max(head, T) over all i and m' < m, for each j, where T falls as i grows.

    `at` goes left from j as long as the least head over at..j-1 exceeds T(at,j): the best i is
    where that ends, or one before.
    """
    replicas = np.arange(1, m)[:, None]
    last = np.arange(times.layer_count + 1)[None, :]
    at, least = np.repeat(last, m - 1, axis=0), np.full((m - 1, last.size), np.inf)
    for width, rows in reversed(heads.blocks):
        before = np.maximum(at - width, 0)
        tried = np.minimum(least, rows[m - replicas, before])
        further = (at >= width) & (tried > times.ms(before, last, replicas))
        at, least = np.where(further, before, at), np.where(further, tried, least)
    before = np.maximum(at - 1, 0)
    stages = np.where(at > 0, times.ms(before, last, replicas), np.inf)
    return np.asarray(np.minimum(least, stages).min(axis=0))


def _matrices(times: StageTimes, workers: int) -> Floats:
    """T as [m, i, j]; infinite where i >= j, and for m = 0."""
    cuts = np.arange(times.layer_count + 1)
    first, last = np.triu_indices(len(cuts), 1)
    found = np.full((workers + 1, len(cuts), len(cuts)), np.inf)
    for m in range(1, workers + 1):
        found[m, first, last] = times.ms(first, last, np.array(m))
    return found


def _tried(stages: Floats, heads: _Heads, m: int) -> Floats:
    """The least max(head, T) over all i and m' < m, for each j, whatever T does."""
    rows = heads.blocks[0][1]
    each = [np.maximum(rows[m - r][:, None], stages[r]).min(axis=0) for r in range(1, m)]
    return np.asarray(np.min(each, axis=0))
