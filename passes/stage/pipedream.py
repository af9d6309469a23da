"""PipeDream's partition of a chain of layers into stages with replicas.

    N, M     layers of the chain, workers; a cut i = 0..N lies after layer i
    T_l      ms of layer l, forward and backward, of one minibatch on one worker
    C_i      ms of the bytes that cross the cut after layer i, one way
    W_l^m    ms in which m replicas synchronise the weights of layer l
    T(i,j,m) = 1/m max(sum T_l, sum W_l^m), l = i+1..j: a stage on m workers, per minibatch
    A(j,m)   = min(T(0,j,m), min over i<j, m'<m of max(A(i,m-m'), 2 C_i, T(i,j,m')))

A(N,M) is the time between two minibatches of a full pipeline that uses all M workers: not the
latency of one, and not a step of a schedule that flushes. (Harlap et al., "PipeDream: Fast and
Efficient Pipeline Parallel DNN Training", 2018; the form for levels is that of Narayanan et al.,
SOSP 2019.)

Where T falls as i grows, its best i for given j, m and m' is where T crosses the least of
max(A, 2 C) over i..j-1, which rises:

    ms |  T(i,j,m')  \\        __/   least max(A, 2C) over i..j-1
       |               \\___/--
       +-----------------i*-------> i

The crossing is found in blocks of powers of two, so that all takes O(N M^2 log N), and is exact:
nothing but terms of the recurrence is ever compared. Where T need not fall, as on the outer of
several levels, all i are tried: O(N^2 M^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from autopar.errors import InputError
from autopar.ir.profile import Chain
from autopar.ir.text import columns

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Within = Callable[[Ints, Ints], Floats]  # ms of layers i+1..j on one component, for i < j
Sync = Literal["ps", "ring", "sosp19"]
SYNCS: tuple[Sync, ...] = get_args(Sync)


@dataclass(frozen=True)
class Level:
    """Equal components joined by one kind of link: GPUs of a server, or servers of a cluster."""

    count: int
    bytes_per_ms: float

    def verify(self) -> None:
        """Raise InputError unless there is a component, and a link to reach it by."""
        if self.count < 1:
            raise InputError(f"{self.count} workers cannot run anything: give 1 or more")
        if not 0 < self.bytes_per_ms < math.inf:
            raise InputError(
                f"a bandwidth of {self.bytes_per_ms} bytes/ms cannot be used: give a positive one, "
                "such as 1.25e6 for 10 Gbit/s"
            )


@dataclass(frozen=True)
class PipelineStage:
    """Layers first..last of the chain, counted from 1, on `replicas` components of its level.

    Times are ms per minibatch: what the stage computes and synchronises, shared by its replicas,
    and what goes over the cut behind it, there and back. `in_flight` minibatches are begun and
    not ended at once in each replica. `stages` divide the layers within a component, where that
    has workers of its own.
    """

    first: int
    last: int
    replicas: int
    compute_ms: float
    sync_ms: float
    transfer_ms: float
    in_flight: int
    stages: tuple[PipelineStage, ...] = ()

    @property
    def bottleneck_ms(self) -> float:
        """The longest of the three: they overlap."""
        return max(self.compute_ms, self.sync_ms, self.transfer_ms)


@dataclass(frozen=True)
class Partition:
    """A chain in stages on all workers; one minibatch ends every `bottleneck_ms`."""

    workers: int
    sync: Sync
    stages: tuple[PipelineStage, ...]

    @property
    def bottleneck_ms(self) -> float:
        """The longest time of any stage or transfer."""
        return max(stage.bottleneck_ms for stage in self.stages)

    def __str__(self) -> str:
        head = f"partition {self.workers} workers, {self.sync}, {self.bottleneck_ms:.3f} ms {{"
        return "\n".join([head, *columns(_rows(self.stages, ""), "  "), "}"])


def partition(chain: Chain, levels: Sequence[Level], sync: Sync = "ps") -> Partition:
    """The partition of least bottleneck over all workers of the levels, innermost first.

    One level is the recurrence as it stands. With more, a component of a level is a pipeline over
    all components of the level below, whose bottleneck takes the place of sum T_l in T. Of equal
    partitions it is the one of fewest stages; of these the one whose last stage has the fewest
    replicas, then the most layers; and so on to the first stage. Raises InputError for a chain of
    no layers, and for levels or a `sync` that make no sense.
    """
    if not chain.layers:
        raise InputError("the chain has no layers to make stages of")
    if not levels:
        raise InputError("there are no levels: give at least one, as Level(4, 1.25e6)")
    for level in levels:
        level.verify()
    if sync not in SYNCS:
        raise InputError(f"there is no sync {sync!r}; write {', '.join(SYNCS)}")
    times = _times_of_levels(chain, levels, sync)
    counts = [level.count for level in levels]
    stages = _stages(times, counts, 0, len(chain.layers))
    return Partition(math.prod(counts), sync, stages)


# -- the times of each level ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LevelTimes:
    """T(i,j,m) = 1/m max(within(i,j), sync_ms[m] weights(i,j)), ms, of layers start+1 .. start+N.

    `falls` says that `within` falls as i grows, as sums do.
    Under a limit T is 0 where it keeps to it, else infinite.
    """

    layer_count: int
    within: Within
    parameter_bytes: Floats  # [i], of the whole chain's layers 1..i
    sync_ms: Floats  # [m], of one byte on m replicas
    cut_ms: Floats  # [i], 2 C_i of the whole chain
    falls: bool
    start: int = 0
    limit_ms: float | None = None

    def compute_ms(self, first: Ints, last: Ints) -> Floats:
        """ms of layers first+1..last on one component."""
        return self.within(first + self.start, last + self.start)

    def sync_ms_on(self, first: Ints, last: Ints, replicas: Ints) -> Floats:
        """ms in which their weights are synchronised."""
        weights = self.parameter_bytes
        nbytes = weights[last + self.start] - weights[first + self.start]
        return np.asarray(self.sync_ms[replicas] * nbytes)

    def ms(self, first: Ints, last: Ints, replicas: Ints) -> Floats:
        """T."""
        compute = self.compute_ms(first, last)
        found = np.maximum(compute, self.sync_ms_on(first, last, replicas)) / replicas
        return found if self.limit_ms is None else np.where(found <= self.limit_ms, 0.0, np.inf)

    def head(self, table: Floats) -> Floats:
        """The head before a stage: max(A(i,m), 2 C_i), or under a limit 1 + A(i,m)."""
        cuts = self.cut_ms[self.start : self.start + self.layer_count + 1]
        if self.limit_ms is None:
            return np.maximum(table, cuts)
        return np.where(cuts <= self.limit_ms, table + 1, np.inf)

    def of(self, first: int, last: int) -> LevelTimes:
        """Those of layers first+1..last of the whole chain."""
        return replace(self, start=first, layer_count=last - first)


def _times_of_levels(chain: Chain, levels: Sequence[Level], sync: Sync) -> list[LevelTimes]:
    """T of each level: of layers on one worker, then on components of the level below."""
    compute = _sums([layer.compute_ms for layer in chain.layers])
    parameters = _sums([layer.parameter_bytes for layer in chain.layers])
    cuts = np.array([0, *chain.cut_bytes], dtype=np.float64)

    def summed(first: Ints, last: Ints) -> Floats:
        return np.asarray(compute[last] - compute[first])

    within: Within = summed
    found: list[LevelTimes] = []
    for level in levels:
        if found:
            # On an outer level T is the bottleneck of the pipeline within a component.
            within = _looked_up(_all_ranges(found[-1], levels[len(found) - 1].count))
        bandwidth = level.bytes_per_ms
        per_byte = [_sync_ms(sync, m, 1.0, bandwidth) for m in range(1, level.count + 1)]
        times = LevelTimes(
            layer_count=len(chain.layers),
            within=within,
            parameter_bytes=parameters,
            sync_ms=np.array([0.0, *per_byte]),
            cut_ms=2 * cuts / bandwidth,
            falls=not found,
        )
        found.append(times)
    return found


def _sync_ms(sync: Sync, replicas: int, nbytes: float, bytes_per_ms: float) -> float:
    """W of `nbytes` of weights on some replicas, ms.

    "ps": parameter servers spread over the m replicas, each of which sends and receives (m-1)/m of
    the bytes twice. "ring": what one replica sends in a ring all-reduce. "sosp19": the formula of
    that paper, with no 1/m in it.
    """
    share = nbytes * (replicas - 1) / bytes_per_ms
    return {"ps": 4 * share / replicas, "ring": 2 * share / replicas, "sosp19": 2 * share}[sync]


def _looked_up(table: Floats) -> Within:
    def within(first: Ints, last: Ints) -> Floats:
        return np.asarray(table[first, last])

    return within


def _sums(figures: Sequence[float]) -> Floats:
    """[i], the sum of the first i."""
    return np.array([0.0, *accumulate(figures)], dtype=np.float64)


def _all_ranges(times: LevelTimes, workers: int) -> Floats:
    """A of layers i+1..j on all components of a level, as [i, j]."""
    count = times.layer_count
    found = np.full((count + 1, count + 1), np.inf)
    for first in range(count):
        found[first, first:] = _bottlenecks(times.of(first, count), workers)[workers]
    return found


# -- the recurrence ------------------------------------------------------------------------------


def _bottlenecks(times: LevelTimes, workers: int) -> Floats:
    """A(j,m) as [m, j] for m = 0..M; infinite where j or m is 0.

    Under a limit it is the least number of cuts with which no term exceeds it.
    """
    cuts = np.arange(times.layer_count + 1)
    least = np.full((workers + 1, len(cuts)), np.inf)
    heads = _Heads(workers, len(cuts))
    # m workers: all of them in one stage, or m' of them in the last.
    dense = None if times.falls else _matrices(times, workers)
    for m in range(1, workers + 1):
        least[m, 1:] = times.ms(np.zeros_like(cuts[1:]), cuts[1:], np.array(m))
        if m > 1:
            rest = (
                _crossing_minimum(times, heads, m)
                if dense is None
                else _dense_minimum(dense, heads, m)
            )
            np.minimum(least[m], rest, out=least[m])
        heads.put(m, times.head(least[m]))
    return least


class _Heads:
    """max(A(i,m), 2 C_i) by m and i, with the least over every block of a power of two of cuts."""

    def __init__(self, workers: int, cut_count: int) -> None:
        widths = [1 << k for k in range(cut_count.bit_length())]
        # [m, i] covers cuts i .. i + width - 1
        self.blocks = [(w, np.full((workers + 1, cut_count - w + 1), np.inf)) for w in widths]

    def put(self, m: int, head: Floats) -> None:
        """Take in the heads of stages once m workers are in use."""
        row = head
        self.blocks[0][1][m] = row
        for (width, _), (_, wider) in zip(self.blocks, self.blocks[1:], strict=False):
            row = np.minimum(row[:-width], row[width:])
            wider[m] = row


def _crossing_minimum(times: LevelTimes, heads: _Heads, m: int) -> Floats:
    """The least max(head, T) over all i and m' < m, for each j, where T falls as i grows.

    `at` goes left from j as long as the least head over at..j-1 exceeds T(at,j): the best i is
    where that ends, or one before.
    """
    replicas = np.arange(1, m)[:, None]
    last = np.arange(times.layer_count + 1)[None, :]
    at, least = np.repeat(last, m - 1, axis=0), np.full((m - 1, last.size), np.inf)
    # Binary search for the crossing: leap left by halving widths while the head still exceeds T.
    for width, rows in reversed(heads.blocks):
        before = np.maximum(at - width, 0)
        tried = np.minimum(least, rows[m - replicas, before])
        further = (at >= width) & (tried > times.ms(before, last, replicas))
        at, least = np.where(further, before, at), np.where(further, tried, least)
    before = np.maximum(at - 1, 0)
    stages = np.where(at > 0, times.ms(before, last, replicas), np.inf)
    return np.asarray(np.minimum(least, stages).min(axis=0))


def _matrices(times: LevelTimes, workers: int) -> Floats:
    """T as [m, i, j]; infinite where i >= j, and for m = 0."""
    cuts = np.arange(times.layer_count + 1)
    first, last = np.triu_indices(len(cuts), 1)
    found = np.full((workers + 1, len(cuts), len(cuts)), np.inf)
    for m in range(1, workers + 1):
        found[m, first, last] = times.ms(first, last, np.array(m))
    return found


def _dense_minimum(stages: Floats, heads: _Heads, m: int) -> Floats:
    """The least max(head, T) over all i and m' < m, for each j, whatever T does."""
    rows = heads.blocks[0][1]
    each = [np.maximum(rows[m - r][:, None], stages[r]).min(axis=0) for r in range(1, m)]
    return np.asarray(np.min(each, axis=0))


# -- stages of a best partition ------------------------------------------------------------------


def _fewest_stages(times: LevelTimes, workers: int) -> tuple[tuple[int, int, int], ...]:
    """Stages (first cut, last cut, replicas) of least bottleneck on all workers.

    Of equals those of fewest stages; of these the last stage has the fewest replicas, then the
    earliest first layer, and so on to the first stage.
    """
    last, left = times.layer_count, workers
    # Of partitions no slower than the best, the one of fewest cuts: the same recurrence counts
    # them.
    limited = replace(times, limit_ms=float(_bottlenecks(times, workers)[left, last]))
    cut_count = _bottlenecks(limited, workers)
    stages: list[tuple[int, int, int]] = []
    while last > 0:
        first, replicas = _last_stage(limited, cut_count, last, left)
        stages.append((first, last, replicas))
        last, left = first, left - replicas
    return tuple(reversed(stages))


def _last_stage(limited: LevelTimes, cut_count: Floats, last: int, left: int) -> tuple[int, int]:
    """The first cut and the replicas of the last stage of a best partition."""
    cuts = np.arange(last)
    wanted = cut_count[left, last]
    # Ties go to few replicas in the last stage, then to many layers in it.
    for replicas in range(1, left):
        before = limited.head(cut_count[left - replicas])[:last]
        total = np.maximum(before, limited.ms(cuts, np.array(last), np.array(replicas)))
        found = np.flatnonzero(total == wanted)
        if len(found):
            return int(found[0]), replicas
    return 0, left


def _stages(
    times: Sequence[LevelTimes], counts: Sequence[int], start: int, stop: int
) -> tuple[PipelineStage, ...]:
    """The stages of layers start+1..stop on all components of the outermost of some levels."""
    here, workers = times[-1], counts[-1]
    left, stages = workers, list[PipelineStage]()
    for first, last, replicas in _fewest_stages(here.of(start, stop), workers):
        ends = np.array(start + first), np.array(start + last)
        sync = here.sync_ms_on(*ends, np.array(replicas))
        stages.append(
            PipelineStage(
                first=start + first + 1,
                last=start + last,
                replicas=replicas,
                compute_ms=float(here.compute_ms(*ends)) / replicas,
                sync_ms=float(sync) / replicas,
                transfer_ms=float(here.cut_ms[start + last]) if start + last < stop else 0.0,
                in_flight=math.ceil(left / replicas),
                stages=_stages(times[:-1], counts[:-1], start + first, start + last)
                if len(times) > 1
                else (),
            )
        )
        left -= replicas
    return tuple(stages)


def _rows(stages: Sequence[PipelineStage], indent: str) -> list[list[str]]:
    rows: list[list[str]] = []
    for stage in stages:
        rows.append(
            [
                f"{indent}{stage.first}..{stage.last}",
                f"x{stage.replicas}",
                f"compute {stage.compute_ms:.3f} ms",
                f"sync {stage.sync_ms:.3f} ms",
                f"transfer {stage.transfer_ms:.3f} ms",
                f"in flight {stage.in_flight}",
            ]
        )
        rows += _rows(stage.stages, indent + "  ")
    return rows
