"""Prices every layer on every submesh and logical mesh: the table that the stage search reads.

A class of layers is sharded on each mesh as a stage of its own, forward, backward and update
together, in the ways that lie on its front of time and memory:

    seconds |
            |                x    under a tight limit: state and gradients cut up by all axes
            |           x         under the limit of an even share of the memory
            |   x                 without a limit: the fastest; gradients combined once a step
            +------------------ bytes

Each way is costed as it is, with a selective remat and with a full one. A way is found for some
sizes of microbatch, and its costs at others lie on the line through two of them. Submeshes come in
the order of their devices, so that those of several hosts are judged by those of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from autopar.cluster import Cluster
from autopar.cluster.placement import SubmeshShape, cut_out, submesh_shapes
from autopar.cost.stage import StageCost
from autopar.errors import InfeasibleError, ScheduleError
from autopar.ir.batching import Batching
from autopar.ir.graph import Graph
from autopar.ir.program import Part, SubmeshGraph
from autopar.ir.sharding import MeshShape
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import Layer, Remat
from autopar.passes.base import NO_LIMIT_BYTES, Setting
from autopar.passes.lower.listing import OpShardings, lower_graph
from autopar.passes.lower.partition.submesh_graph import left_partial, part_plan
from autopar.passes.shard.model.costs import ReshardCosts
from autopar.passes.shard.solver.effort import QUICK
from autopar.passes.stage.prices import BatchPrices, Option, StageTable
from autopar.planner.placed_stages import SubmeshContext, SubmeshContexts
from autopar.planner.request import Request
from autopar.planner.sliced_step import LayerPrograms
from autopar.planner.stage_programs import PartCost, add_parts, cost_part
from autopar.schedule.table import SCHEDULES, check_numbers

_LEAST_WORK = 0.5  # of the time that devices work at least, in stages worth a price
_LIGHT = 0.05  # of the mean work of a layer, up to which one runs with another


def stage_table(
    programs: LayerPrograms,
    counts: Sequence[int],
    request: Request,
    setting: Setting,
    contexts: SubmeshContexts,
) -> StageTable:
    """Prices for some numbers of microbatches, on submeshes in their contexts."""
    shapes = [s for s in submesh_shapes(request.cluster) if _meshes(s, request)]
    devices = request.cluster.device_count
    if request.mesh is None:
        fewest = devices * _least_share(programs.layers)
        shapes = [s for s in shapes if s.device_count >= fewest]
    if request.stages == 1:  # it has all devices, whatever it takes
        shapes = shapes[-1:]
    host = devices // request.cluster.hosts
    if (request.stages or len(programs.layers)) * host < devices:
        host = devices  # too few stages to have one host each: those of several are needed
    rows = {m: programs.batching.batch // m for m in counts}
    bound = _WorkBound(host, request, len(programs.layers), rows)
    priced = [_options(programs, s, counts, request, setting, bound, contexts) for s in shapes]
    able = [m for m in counts if any(found[m] for found in priced)]
    if not able:
        raise InfeasibleError(_unsuited(programs, shapes, counts, request, setting, contexts))
    return StageTable(
        cluster=request.cluster,
        memory_bytes=request.budget_bytes,
        submeshes=tuple(shapes),
        batches=tuple(
            BatchPrices(m, _cut_bytes(programs, m), tuple(found[m] for found in priced))
            for m in able
        ),
        schedules=_allowed(programs.batching.barrier, request),
        task_seconds=request.cluster.chip.launch_seconds,
    )


def _least_share(layers: Sequence[Layer]) -> float:
    """The share of all devices with less of which no layer keeps up, but one with next to no work.

    A layer of work w alone on n of N devices lets all of them work for n W / (w N) of the time at
    most, where W is the work of all layers.
    """
    flops = [layer.flops for layer in layers]
    mean = sum(flops) / len(flops)
    working = [f for f in flops if f > _LIGHT * mean]
    return _LEAST_WORK * min(working, default=0) / max(1, sum(flops))


def _unsuited(
    programs: LayerPrograms,
    shapes: Sequence[SubmeshShape],
    counts: Sequence[int],
    request: Request,
    setting: Setting,
    contexts: SubmeshContexts,
) -> str:
    """The reason why no microbatch can be sharded, on the largest submesh if there is one."""
    batch = programs.batching.batch
    rows = " or ".join(f"{m} microbatches of {batch // m} rows" for m in counts)
    text = f"no stage of {request.cluster.name} can be sharded by {request.method!r} with {rows}"
    # Recipes of several axes tell of rows on a mesh that has several, which come last.
    meshes = [(s, mesh) for s in shapes[-1:] for mesh in reversed(_meshes(s, request))]
    for shape, mesh in meshes:
        profiler = LayerProfiler(programs, contexts.at(shape, mesh), request, setting)
        if why := profiler.refusal(batch // counts[0]):
            return f"{text}: {why}"
    return f"{text}. Use fewer microbatches, another method, or a mesh of a submesh's size."


def _allowed(barrier: bool, request: Request) -> tuple[str, ...]:
    """The schedules under which the step is exact; plain loops only where they are asked for."""
    return tuple(
        s.name
        for s in SCHEDULES.values()
        if s.has_backward
        and (s.allows_barrier or not barrier)
        and (not s.is_plain_loop or s.name == request.schedule)
    )


def _meshes(shape: SubmeshShape, request: Request) -> tuple[MeshShape, ...]:
    """The logical meshes to try on a submesh: the request's own, or those with the pinned axes."""
    if request.mesh is not None:
        return (request.mesh,) if request.mesh.device_count == shape.device_count else ()
    return _near(request.meshes_on(cut_out(request.cluster, shape)), request.cluster)


def _near(meshes: Sequence[MeshShape], cluster: Cluster) -> tuple[MeshShape, ...]:
    """Meshes whose last axis, of those with several, stays within a host: there tensors are cut."""
    most = cluster.device_count // cluster.hosts
    able = tuple(m for m in meshes if len(m.sizes) < 2 or m.sizes[-1] <= most)
    return able or tuple(meshes)


def _host_by_host(meshes: Sequence[MeshShape], cluster: Cluster) -> list[MeshShape]:
    """The meshes, first the one whose last axis is a whole host: it sends least between hosts."""
    host = cluster.device_count // cluster.hosts
    return sorted(meshes, key=lambda m: len(m.sizes) != 2 or m.sizes[-1] != host)


def _options(
    programs: LayerPrograms,
    shape: SubmeshShape,
    counts: Sequence[int],
    request: Request,
    setting: Setting,
    bound: _WorkBound,
    contexts: SubmeshContexts,
) -> Mapping[int, tuple[Option, ...]]:
    """The options of a submesh for each number of microbatches."""
    found: dict[int, list[Option]] = {m: [] for m in counts}
    if not bound.admits(shape):
        return {m: () for m in counts}
    batch = programs.batching.batch
    share = shape.device_count / request.cluster.device_count
    budget = request.budget_bytes / max(1.0, len(programs.layers) * share)
    rows = [batch // m for m in counts]
    sizes = _sizes(rows, request)
    for n, mesh in enumerate(_host_by_host(_meshes(shape, request), request.cluster)):
        if n and not bound.goes_on(shape):
            break
        profiler = LayerProfiler(programs, contexts.at(shape, mesh), request, setting)
        few = _few(rows, mesh)
        for variant in _variants(profiler, shape, sizes, few, budget, bound):
            for m in counts:
                if variant.divides(batch // m):
                    # A row is so many bytes whatever the microbatch, and of each stage there may
                    # be two microbatches in flight.
                    flights = 2 * -(-batch // m // variant.rows[0]) * round(1 / share)
                    binds = variant.most_bytes(Remat.NONE, flights) > budget
                    found[m] += variant.options(mesh, batch // m, binds)
    return {m: tuple(options) for m, options in found.items()}


def _variants(
    profiler: LayerProfiler,
    shape: SubmeshShape,
    sizes: Sequence[int],
    few: Sequence[int],
    budget_bytes: float,
    bound: _WorkBound,
) -> Iterator[ShardingVariant]:
    """The fastest ways for each of `sizes` of microbatch and, where these hold too much, tight
    ways for each of a `few`.
    """
    units: set[int] = set()
    is_tight = is_slow = False

    def promises(most: ShardingVariant) -> bool:
        nonlocal is_tight, is_slow
        is_tight = is_tight or most.most_bytes(Remat.NONE) > budget_bytes
        is_slow = bound.is_slow(shape, most)
        return bound.promises(shape, most, budget_bytes)

    for rows in reversed(sizes):
        variant = profiler.roomy(rows, sizes, promises)
        if variant is not None:
            is_tight = is_tight or variant.most_bytes(Remat.NONE) > budget_bytes
            if variant.unit not in units or rows == 1:
                units.add(variant.unit)
                yield variant
                bound.note(shape, variant, budget_bytes)
        if is_tight:
            break
    if not is_tight or is_slow:
        return
    for rows in few:
        for variant in profiler.tight(
            rows, sizes, budget_bytes, lambda most: bound.promises(shape, most)
        ):
            bound.note(shape, variant, budget_bytes)
            yield variant


class _WorkBound:
    """Least device-seconds of a row in equal stages, by which all other submeshes are judged.

    What p equal stages take beside their work is their bubble:

        m >= p microbatches of work w:   (m + p - 1) / m  w  <  2 w

    So where the fastest way of a submesh, without a limit, takes more device-seconds than equal
    stages of another way take with their bubble, none of its ways can win: what it lacks are not
    bytes, but wires. The bubble is that of the m for which so many microbatches in flight fit;
    where none is known, as much again as the work. A way that holds more than a share of the memory
    runs no more layers than fit, which is as slow. Over several hosts, where the first mesh, which
    sends least between them, has only such ways no other is tried; and where all ways of some hosts
    that fit are so slow, those of more hosts, which have no better wires, are not looked for. The
    layers of which there are most stand for all: no others are sharded where these are slow.
    """

    def __init__(
        self, host_devices: int, request: Request, layers: int, rows: Mapping[int, int]
    ) -> None:
        self._host, self._request = host_devices, request
        self._layers, self._rows, self._least = layers, rows, math.inf
        # True for a submesh over hosts with a way that fits and is not slow.
        self._able: dict[SubmeshShape, bool] = {}
        self._ways: dict[SubmeshShape, list[ShardingVariant]] = {}

    def note(self, shape: SubmeshShape, variant: ShardingVariant, budget_bytes: float) -> None:
        """Take in a way; it bounds others if its layers fit."""
        self._ways.setdefault(shape, []).append(variant)
        if not any(variant.most_bytes(r) <= budget_bytes for r in variant.remats):
            return
        if shape.device_count > self._host:
            self._able[shape] |= not self.is_slow(shape, variant)
        self._least = min([self._least, *self._reached(shape, variant, budget_bytes)])

    def _reached(
        self, shape: SubmeshShape, variant: ShardingVariant, budget_bytes: float
    ) -> Iterator[float]:
        """Device-seconds of a row with the bubble of equal stages on such submeshes."""
        stages, rest = divmod(self._request.cluster.device_count, shape.device_count)
        if rest:
            return
        able = {
            m: rows
            for m, rows in self._rows.items()
            if variant.divides(rows) and self._allows(stages, m)
        }
        uneven = -(-self._layers // stages) * stages / self._layers
        if max(able, default=0) >= stages:
            yield 2 * shape.device_count * variant.work_seconds
        for m, rows in able.items():
            flights = min(stages, m) * -(-rows // variant.rows[0])
            fitting = (r for r in variant.remats if variant.most_bytes(r, flights) <= budget_bytes)
            remat = next(fitting, None)
            if remat is not None:
                work = shape.device_count * variant.row_seconds(rows, remat)
                yield (m + stages - 1) / m * uneven * work

    def _allows(self, stages: int, microbatches: int) -> bool:
        """True if so many equal stages may be made of the layers, as they are asked for."""
        asked = self._request
        schedule = SCHEDULES[asked.schedule or "1f1b"]
        try:
            check_numbers(schedule, stages, microbatches, schedule.usual_chunks)
        except ScheduleError:
            return False
        return stages == (asked.stages or stages) and stages * schedule.usual_chunks <= self._layers

    def admits(self, shape: SubmeshShape) -> bool:
        """Take up a submesh; False if one of fewer hosts has no way that fits and is not slow."""
        if shape.device_count <= self._host:
            return True
        fewer = [able for s, able in self._able.items() if s.device_count < shape.device_count]
        self._able[shape] = False
        return all(fewer) or self._least == math.inf

    def promises(
        self, shape: SubmeshShape, variant: ShardingVariant, budget_bytes: float = math.inf
    ) -> bool:
        """True if a way may win: it is not slow, and no other of the submesh is as good."""
        if self.is_slow(shape, variant, budget_bytes):
            return False
        return not any(known.outdoes(variant) for known in self._ways.get(shape, ()))

    def is_slow(
        self, shape: SubmeshShape, variant: ShardingVariant, budget_bytes: float = math.inf
    ) -> bool:
        """True if a way takes more device-seconds than equal stages, by what fits of it."""
        over = max(1.0, variant.lasting_bytes / budget_bytes)
        work = shape.device_count * variant.work_seconds
        return work * over > self._least

    def goes_on(self, shape: SubmeshShape) -> bool:
        """False if no mesh of a submesh over hosts so far has a way that fits and is not slow."""
        return self._able.get(shape, True) or self._least == math.inf


def _sizes(rows: Sequence[int], request: Request) -> list[int]:
    """The sizes of microbatch that ways are found for: one row, few and many, as far as there are.

    Many are one for every device.
    """
    most = request.cluster.device_count
    several = sorted({n for n in rows if n > 1})
    many = [n for n in several if n >= most][:1] or several[-1:]
    return sorted({*(n for n in rows if n == 1), *several[:1], *many})


def _few(rows: Sequence[int], mesh: MeshShape) -> list[int]:
    """The sizes of microbatch that tight ways are found for: as small as suits a mesh.

    A first axis of several is for rows, so there are as many; on a mesh of one axis the rows are
    whole, or each device has one.
    """
    first = mesh.sizes[0] if mesh.sizes else 1
    enough = sorted(n for n in rows if n >= first)[:1]
    if len(mesh.sizes) > 1:
        return enough
    return sorted({*(n for n in rows if n == 1), *sorted(n for n in rows if n > 1)[:1], *enough})


def _cut_bytes(programs: LayerPrograms, microbatches: int) -> tuple[int, ...]:
    """Bytes that cross between layers, for one microbatch: in proportion to its rows."""
    more = programs.batching.microbatches / microbatches
    return tuple(round(layer.cut_bytes * more) for layer in programs.layers[:-1])


# -- a mesh: every class of layers, on its front of time and memory --------------------------------


_SHARES = (1.0, 0.75)  # of an even share of the memory: the limits of the tight ways
_AS_GOOD = 0.01  # by how much more a way may take or hold and be as good as another

# Of a class, at two sizes of microbatch.
CostOf = Callable[[int, Remat], tuple[StageCost, StageCost]]


@dataclass(frozen=True)
class ShardingVariant:
    """A sharding of every layer class, with costs at two microbatch sizes to interpolate between.

    `cost` is that of a class under a remat, found when it is asked for. Microbatches must be a
    multiple of `unit` rows. Ops on a single row have other factors than those on many, so what is
    sharded for one row is for no other number.
    """

    partial_sums: bool
    unit: int
    rows: tuple[int, int]
    remats: tuple[Remat, ...]
    cost: CostOf
    homes: tuple[int, ...]  # the class of each layer
    common: int  # the class of most layers

    def divides(self, rows: int) -> bool:
        """True if microbatches of so many rows may be sharded so."""
        return rows % self.unit == 0 and (rows == 1) == (self.rows == (1, 1))

    def options(self, mesh: MeshShape, rows: int, binds: bool) -> Iterator[Option]:
        """The options for the search at some number of rows, one for each remat that is asked for.

        Where memory does not bind none is: a remat is no way to be faster here.
        """
        for remat in self.remats:
            if remat is Remat.NONE or binds:
                yield Option(mesh, remat, self.layers(rows, remat), self.partial_sums)

    def layers(self, rows: int, remat: Remat) -> tuple[StageCost, ...]:
        """The cost of each layer at some number of rows, on the line through the two sizes."""
        costs = {c: self._cost_at(c, rows, remat) for c in dict.fromkeys(self.homes)}
        return tuple(costs[c] for c in self.homes)

    def row_seconds(self, rows: int, remat: Remat) -> float:
        """Seconds of a common layer for one row of a microbatch of so many."""
        return self._cost_at(self.common, rows, remat).each.total / rows

    def _cost_at(self, layer: int, rows: int, remat: Remat) -> StageCost:
        low, high = self.rows
        share = (rows - low) / (high - low) if high > low else 0.0
        one, other = self.cost(layer, remat)
        return one.towards(other, share)

    def outdoes(self, other: ShardingVariant) -> bool:
        """True if, by the common layer, it is as good as another wherever that may be used."""
        if other.unit % self.unit or (self.rows == (1, 1)) != (other.rows == (1, 1)):
            return False
        for rows, theirs in zip(other.rows, other.cost(other.common, Remat.NONE), strict=True):
            own = self._cost_at(self.common, rows, Remat.NONE)
            pairs = (
                (own.each.total, theirs.each.total),
                (own.once.total, theirs.once.total),
                (own.fixed_bytes, theirs.fixed_bytes),
                (own.activation_bytes, theirs.activation_bytes),
            )
            if any(a > b * (1 + _AS_GOOD) for a, b in pairs):
                return False
        return True

    @property
    def work_seconds(self) -> float:
        """Seconds of a common layer for one row of a large microbatch."""
        return self.cost(self.common, Remat.NONE)[1].each.total / self.rows[1]

    @property
    def lasting_bytes(self) -> int:
        """Bytes that a common layer holds throughout."""
        return self.cost(self.common, Remat.NONE)[0].fixed_bytes

    def most_bytes(self, remat: Remat, in_flight: int = 1) -> int:
        """Bytes that the largest class holds of so many small microbatches."""
        costs = (self.cost(c, remat)[0] for c in dict.fromkeys(self.homes))
        return max(c.fixed_bytes + in_flight * c.activation_bytes for c in costs)


Promises = Callable[[ShardingVariant], bool]  # if layers alike, sharded so, may win


class LayerProfiler:
    """Costs every layer class on one mesh; the request's method restricts how it is sharded."""

    def __init__(
        self,
        programs: LayerPrograms,
        context: SubmeshContext,
        request: Request,
        setting: Setting,
    ) -> None:
        self._programs, self._tables = programs, context.tables
        self._shard = replace(
            request.shard, effort=QUICK, explain=False, reshard_costs=self._tables,
            readings=programs.readings,
        )  # fmt: skip
        self._remats = tuple(Remat) if request.remat else (Remat.NONE,)
        self._setting = replace(
            setting, cluster=context.cluster, mesh=context.mesh, memory_bytes=NO_LIMIT_BYTES
        )
        self._priced: dict[int, list[_PricedLayer]] = {}  # by class

    def roomy(self, rows: int, sizes: Sequence[int], promises: Promises) -> ShardingVariant | None:
        """The fastest way for microbatches of so many rows; None where there is none."""
        setting = replace(self._setting, partial_sums=True)
        return next(self._found(rows, sizes, setting, (NO_LIMIT_BYTES,), promises), None)

    def refusal(self, rows: int) -> str:
        """The reason why so many rows have no way even without a limit; empty where they have."""
        try:
            for c in self._programs.classes:
                self._shard.run(self._programs.at(c, rows).joint.graph, self._setting)
        except InfeasibleError as error:
            return str(error)
        return ""

    def tight(
        self, rows: int, sizes: Sequence[int], budget_bytes: float, promises: Promises
    ) -> Iterator[ShardingVariant]:
        """The fastest ways within shares of a layer's budget, as far as there are any."""
        limits = [int(share * budget_bytes) for share in _SHARES]
        setting = replace(self._setting, partial_sums=False)
        yield from self._found(rows, sizes, setting, limits, promises)

    def _found(
        self,
        rows: int,
        sizes: Sequence[int],
        setting: Setting,
        limits: Sequence[int],
        promises: Promises,
    ) -> Iterator[ShardingVariant]:
        """Shards each class within each limit, until one has no plan on this mesh or within it.

        Or until that of most layers, which is the first, does not promise enough. All others are
        posed before one of them is solved: none need be where one fits nowhere.
        """

        def begun(classes: Sequence[int]) -> dict[int, Iterator[ShardingPlan]]:
            at = self._programs.at
            return {
                c: self._shard.run_within(at(c, rows).joint.graph, setting, limits) for c in classes
            }

        programs, sums = self._programs, setting.partial_sums
        first, *others = programs.classes
        layers: dict[int, _PricedLayer] = {}
        with suppress(InfeasibleError):
            runs = begun([first])
            for n in range(len(limits)):
                now = {first: self._priced_layer(first, next(runs[first]))}
                if layers.get(first) is not now[first]:
                    alone = self._variant(rows, sizes, sums, now, (first,))
                    if not promises(alone):
                        return
                if n == 0:
                    runs |= begun(others)
                now |= {c: self._priced_layer(c, next(runs[c])) for c in others}
                if any(layers.get(c) is not layer for c, layer in now.items()):
                    layers = now
                    yield self._variant(rows, sizes, sums, layers, programs.homes)

    def _alike(self, layers: Iterable[int], rows: int, others: int) -> bool:
        """True if the rules of layers' ops have the same dims at two sizes of microbatch."""

        def dims(layer: int, rows: int) -> list[object]:
            ops = self._programs.at(layer, rows).joint.graph.walk()
            return [(op.rule.operands, op.rule.results) if op.rule else None for op in ops]

        return all(dims(layer, rows) == dims(layer, others) for layer in layers)

    def _priced_layer(self, layer: int, plan: ShardingPlan) -> _PricedLayer:
        """A class under a sharding; another limit or number of rows may come to the same one."""
        known = self._priced.setdefault(layer, [])
        for priced in known:
            if priced.plan.shards_as(plan):
                return priced
        known.append(_PricedLayer(self._programs, layer, plan, self._tables))
        return known[-1]

    def _variant(
        self,
        rows: int,
        sizes: Sequence[int],
        partial_sums: bool,
        layers: Mapping[int, _PricedLayer],
        homes: tuple[int, ...],
    ) -> ShardingVariant:
        """The way that shards each class as it is priced."""
        batching, unit = self._programs.batching, 1
        if rows > 1:  # what is found for one row is for that alone, however it divides it
            unit = math.lcm(*(
                _unit(layer.plan, self._programs.at(c, rows).joint.graph, batching)
                for c, layer in layers.items()
            ))  # fmt: skip
        fewest = -(-max(sizes[0], 2) // unit) * unit
        most = max(fewest, min(max(sizes[-1], 2 * fewest), batching.batch) // unit * unit)
        # All rows may be read in other ways than some of them, as those are cut out: the sharding
        # that is for the one is not for the other.
        whole = batching.batch
        if most == whole != rows and not self._alike(layers, rows, whole):
            most = max(fewest, (whole - 1) // unit * unit)
        if rows == whole and not self._alike(layers, rows, fewest):
            fewest = most = whole
        priced = (fewest, most) if rows > 1 else (1, 1)

        @cache
        def cost(layer: int, remat: Remat) -> tuple[StageCost, StageCost]:
            return layers[layer].at_both(priced, remat)

        common, *_ = self._programs.classes
        return ShardingVariant(partial_sums, unit, priced, self._remats, cost, homes, common)


class _PricedLayer:
    """The costs of a layer under one sharding; parts that remats share are priced once."""

    def __init__(
        self, programs: LayerPrograms, layer: int, plan: ShardingPlan, tables: ReshardCosts
    ) -> None:
        self._programs, self._layer, self.plan, self._tables = programs, layer, plan, tables
        self._known: dict[object, PartCost] = {}
        self._costs: dict[tuple[int, Remat, bool], StageCost] = {}
        self._op_shardings = OpShardings()

    def at_both(self, rows: tuple[int, int], remat: Remat) -> tuple[StageCost, StageCost]:
        """The costs at two sizes of microbatch.

        What a remat runs again takes so many times longer in the larger one as a forward pass.
        """
        low = self._cost(rows[0], remat)
        if rows[0] == rows[1]:
            return low, low
        if remat is not Remat.NONE:
            plain, many = self.at_both(rows, Remat.NONE)
            more = rows[1] / rows[0]
            slower = many.forward.total / plain.forward.total if plain.forward.total else more
            high = many.with_more(plain, low, slower, more)
            fixed = many.fixed_bytes + low.fixed_bytes - plain.fixed_bytes
            return low, replace(high, once=low.once, once_bytes=low.once_bytes, fixed_bytes=fixed)
        # What runs once a step has no rows in it.
        return low, replace(self._cost(rows[1], remat, once=False), once=low.once)

    def _cost(self, rows: int, remat: Remat, once: bool = True) -> StageCost:
        key = rows, remat, once
        if key not in self._costs:
            self._costs[key] = self._added(rows, remat, once)
        return self._costs[key]

    def _added(self, rows: int, remat: Remat, once: bool) -> StageCost:
        program = self._programs.at(self._layer, rows, remat)
        costs = [
            (part, self._of(part, program.joint, rows) if once or part.is_looped else PartCost())
            for part in program.parts
        ]
        runs = max(1, self._programs.batching.batch // rows)
        return add_parts(costs, program.joint, self.plan, runs)

    def _of(self, part: Part, joint: SubmeshGraph, rows: int) -> PartCost:
        given = tuple(i.value.name for i in part.graph.inputs)
        place = part.kind, part.loop, part.round
        key = rows, place, part.equations, given, part.graph.outputs
        if key not in self._known:
            own, loose = part_plan(part, joint, self.plan), left_partial(part, joint)
            resharder, op_shardings = self._tables.resharder, self._op_shardings
            listing = lower_graph(part.graph, own, resharder, loose, op_shardings)
            self._known[key] = cost_part(part, self.plan, self._tables, listing)
        return self._known[key]


def _unit(plan: ShardingPlan, graph: Graph, batching: Batching) -> int:
    """Of how many rows a microbatch must be a multiple for a plan to divide them.

    They are divided where values lie so, and where ops read them so.
    """
    rows, lies = batching.rows_of, [*plan.values, *((name, s) for name, _, s in plan.uses)]
    for path, given in plan.assignments:
        op = graph.op_at(path)
        assert op.rule is not None
        for i, name in enumerate(op.operands):
            if isinstance(name, str) and name in rows:
                lies.append((name, given.operand_sharding(op.rule, i, plan.mesh)))
    units = set[int]()
    for name, sharding in lies:
        if name in rows and sharding.dims:
            pieces = plan.mesh.size(sharding.dims[rows[name].dim])
            # A dim that has more than the rows, as tokens, is divided by what else it has first.
            units.add(pieces // math.gcd(pieces, rows[name].outer * rows[name].inner))
    return math.lcm(*units)
