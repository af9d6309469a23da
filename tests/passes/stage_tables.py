"""Small stage tables, some with a known answer, and the search through all of their stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.cluster.placement import SubmeshShape, links_in_a_row, submesh_shapes
from autopar.cost.stage import StageCost
from autopar.cost.timeline import Seconds
from autopar.ir.sharding import MeshShape
from autopar.ir.stages import Remat
from autopar.passes.stage.dynamic import Interval
from autopar.passes.stage.prices import BatchPrices, Option, StageTable

FLAT = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2")
EVERY = (*FLAT, "interleaved", "zb-v")
PLENTY = 1 << 50
_NONE, _FULL = (Remat.NONE,), (Remat.FULL,)


def layer_cost(
    forward: float,
    input_gradient: float,
    weight_gradient: float,
    once: float = 0.0,
    fixed_bytes: int = 0,
    activation_bytes: int = 0,
    kept_bytes: int = 0,
    working_bytes: int = 0,
) -> StageCost:
    """A layer all of whose seconds are work."""
    return StageCost(
        Seconds(forward), Seconds(input_gradient), Seconds(weight_gradient), Seconds(once),
        fixed_bytes, activation_bytes, kept_bytes, working_bytes,
    )  # fmt: skip


def even_price(seconds: float, *, once: float = 0.0, held: int = 0, kept: int = 0) -> StageCost:
    """A layer whose F, I and W take a third of `seconds` each."""
    third = seconds / 3
    return layer_cost(third, third, third, once, 0, held, kept, 0)


def mesh_of(submesh: SubmeshShape) -> MeshShape:
    return MeshShape(("data",), (submesh.device_count,))


def scaled_table(
    cluster: str,
    weights: Sequence[float],
    microbatches: Sequence[int],
    penalty: float,
    schedules: tuple[str, ...] = ("1f1b",),
) -> StageTable:
    """Layers that take weight / n * (1 + penalty * log2 n) on n devices, and nothing else."""
    whole = Cluster.parse(cluster)
    shapes = submesh_shapes(whole)

    def option(shape: SubmeshShape) -> Option:
        n = shape.device_count
        rate = (1 + penalty * math.log2(n)) / n
        return Option(mesh_of(shape), Remat.NONE, tuple(even_price(w * rate) for w in weights))

    options = tuple((option(shape),) for shape in shapes)
    cuts = (0,) * (len(weights) - 1)
    batches = tuple(BatchPrices(m, cuts, options) for m in microbatches)
    return StageTable(whole, PLENTY, shapes, batches, schedules)


@dataclass(frozen=True)
class Found:
    """A partition and the formula's seconds of it."""

    seconds: float
    parts: tuple[Interval, ...]


def every_partition(table: StageTable, batch: BatchPrices) -> Iterator[tuple[Interval, ...]]:
    """All ways to cut the layers, to give each stage a submesh, and each an option."""
    owners = [u for u, options in enumerate(batch.options) for _ in options]
    devices = [table.submeshes[u].device_count for u in owners]
    boundaries = [b for b in range(table.layer_count - 1) if b not in table.joined]
    for count in range(len(boundaries) + 1):
        for cuts in itertools.combinations(boundaries, count):
            firsts = [0, *(b + 1 for b in cuts)]
            lasts = [*cuts, table.layer_count - 1]
            for options in itertools.product(range(len(owners)), repeat=count + 1):
                if sum(devices[o] for o in options) == table.cluster.device_count:
                    yield tuple(map(Interval, firsts, lasts, options))


def partition_bytes(batch: BatchPrices, parts: Sequence[Interval], flights: Sequence[int]) -> int:
    """The most that a device holds, with `flights[s]` microbatches in flight at stage s."""
    options = [option for options in batch.options for option in options]
    most = 0
    for part, flight in zip(parts, flights, strict=True):
        layers = options[part.option].layers[part.first : part.last + 1]
        held = sum(layer.fixed_bytes + flight * layer.activation_bytes for layer in layers)
        most = max(most, held + max(layer.working_bytes for layer in layers))
    return most


def partition_seconds(
    table: StageTable, batch: BatchPrices, parts: Sequence[Interval], window: int
) -> float:
    """The formula of `dynamic`, added up layer by layer, for schedules without zero bubble."""
    options = [(u, option) for u, options in enumerate(batch.options) for option in options]
    m = batch.microbatches
    cuts = (0, *batch.cut_bytes, 0)
    trip = slowest = 0.0
    for part in parts:
        u, option = options[part.option]
        layers = option.layers[part.first : part.last + 1]
        seconds = sum(layer.each.total for layer in layers) + 2 * table.task_seconds
        once = sum(layer.once.total for layer in layers)
        links = links_in_a_row(table.cluster, table.submeshes[u])
        ends = [nbytes for nbytes in (cuts[part.first], cuts[part.last + 1]) if nbytes]
        for nbytes in ends if links else ():
            trip += sum(link.seconds(nbytes) for link in links) / len(links)
            slowest = max(slowest, *(nbytes / link.bytes_per_second for link in links))
        trip += seconds + (once if m == 1 else 0.0)
        slowest = max(slowest, seconds + (once / (m - 1) if m > 1 else 0.0))
    return trip + (m - 1) * max(slowest, trip / window if window < m else 0.0)


def best_partition(
    table: StageTable, batch: BatchPrices, flights: Callable[[int], Sequence[int]]
) -> Found | None:
    """The least seconds of all partitions that fit, under the flights of so many stages."""
    best: Found | None = None
    for parts in every_partition(table, batch):
        counts = flights(len(parts))
        if partition_bytes(batch, parts, counts) > table.memory_bytes:
            continue
        seconds = partition_seconds(table, batch, parts, counts[0])
        if best is None or seconds < best.seconds:
            best = Found(seconds, parts)
    return best


@st.composite
def layer_prices(draw: st.DrawFn) -> StageCost:
    """A layer of up to 12 s and 200 bytes."""
    forward, input_gradient, weight_gradient = (draw(st.integers(1, 4)) / 1.0 for _ in range(3))
    activation = draw(st.integers(0, 40))
    return layer_cost(
        forward,
        input_gradient,
        weight_gradient,
        once=float(draw(st.integers(0, 6))),
        fixed_bytes=draw(st.integers(0, 60)),
        activation_bytes=activation,
        kept_bytes=draw(st.integers(0, activation)),
        working_bytes=draw(st.integers(0, 20)),
    )


@st.composite
def stage_tables(draw: st.DrawFn, schedules: tuple[str, ...] = ("1f1b",)) -> StageTable:
    """Up to 4 layers on up to 4 devices, memory that often binds, links that often matter."""
    cluster = Cluster.parse(draw(st.sampled_from(["2xcpu", "3xcpu", "4xcpu", "2x2xcpu"])))
    shapes = submesh_shapes(cluster)
    count = draw(st.integers(1, 4))
    kinds = draw(st.lists(layer_prices(), min_size=1, max_size=3))
    pattern = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=count, max_size=count))
    batches: list[BatchPrices] = []
    for m in draw(st.sampled_from([(1,), (2,), (5,), (2, 6)])):
        options: list[tuple[Option, ...]] = []
        for shape in shapes:
            rows: list[Option] = []
            for remat in draw(st.sampled_from([_NONE, (*_NONE, *_FULL), (*_FULL, *_NONE)])):
                share = draw(st.integers(1, 4)) / 4
                layers = [_scaled(kind, share, remat, m) for kind in kinds]
                rows.append(Option(mesh_of(shape), remat, tuple(layers[k] for k in pattern)))
            options.append(tuple(rows))
        gigabytes = draw(
            st.lists(st.sampled_from([0, 1, 4, 30]), min_size=count - 1, max_size=count - 1)
        )
        batches.append(BatchPrices(m, tuple(g * 10**9 for g in gigabytes), tuple(options)))
    joined = draw(st.lists(st.integers(0, count - 2), max_size=1)) if count > 1 else []
    limit = draw(st.sampled_from([100, 200, 300, 400, 1000]))
    tasks = draw(st.sampled_from([0.0, 0.25]))
    return StageTable(cluster, limit, shapes, tuple(batches), schedules, tasks, tuple(joined))


def _scaled(cost: StageCost, share: float, remat: Remat, microbatches: int) -> StageCost:
    """The layer on a share of it, for one of so many microbatches."""
    part, again = share / microbatches, remat is Remat.FULL
    return layer_cost(
        cost.forward.total * part,
        (cost.input_gradient.total + (cost.forward.total if again else 0.0)) * part,
        cost.weight_gradient.total * part,
        cost.once.total * share,
        cost.fixed_bytes,
        cost.activation_bytes // (4 if again else 1),
        cost.kept_bytes // (4 if again else 1),
        cost.working_bytes,
    )
