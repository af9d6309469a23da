"""The joint search over stages and shardings: slice, price, search, shard and lower.

Stages that are to be one program are on equal submeshes, under equal meshes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.cluster import Cluster, device_order
from autopar.cluster.placement import Block, cut_out
from autopar.cost.stage import StageCost, peak_bytes
from autopar.errors import InfeasibleError, LoweringError, MemoryLimitError
from autopar.frontend.microbatch.part_trace import MicrobatchTrace
from autopar.ir.sharding_plan import Margin
from autopar.ir.stages import Layer, LayerSequence, Remat, Stage, StagePlan, Submesh
from autopar.passes.base import Setting
from autopar.passes.layer.fixed import Fixed
from autopar.passes.lower.lowering import Spmd
from autopar.passes.pipeline import PassPipeline
from autopar.passes.stage.prices import Choice, ChosenStage, Option, StageTable
from autopar.passes.stage.search import Ranked
from autopar.planner.placed_stages import PlacedStages, SubmeshContexts
from autopar.planner.request import Request
from autopar.planner.sliced_step import LayerPrograms, SlicedStep, Source, slice_step
from autopar.planner.stage_programs import StagePrograms
from autopar.planner.stage_table import stage_table
from autopar.planner.submesh_sharding import StageMemoryError, SubmeshSharder, programs_of
from autopar.schedule.table import SCHEDULES


def equal_stages_table(table: StageTable, passes: PassPipeline, setting: Setting) -> StageTable:
    """The table with one submesh and one logical mesh: those of the best stages that are equal.

    Raises LoweringError for a schedule that has other tasks than one forward and one backward of
    each stage; InfeasibleError or MemoryLimitError where no equal stages are as wanted or fit.
    """
    best: tuple[float, StageTable] | None = None
    refusal: InfeasibleError | None = None
    for candidate in _tables(table, passes):
        try:
            seconds = passes.search(candidate, setting).best.seconds
        except (InfeasibleError, MemoryLimitError) as error:
            refusal = refusal or error
            continue
        if best is None or seconds < best[0]:
            best = seconds, candidate
    if best is None:
        raise refusal or InfeasibleError(
            f"the {table.cluster.device_count} devices of {table.cluster.name} make no equal "
            "submeshes of as many stages as lower=spmd is asked for"
        )
    return best[1]


def _tables(table: StageTable, passes: PassPipeline) -> Iterator[StageTable]:
    """The table for every submesh that the devices are a multiple of, and every mesh of it."""
    stages, wanted = passes.stage.stages, passes.stage.schedule
    schedules = tuple(
        s.name
        for s in SCHEDULES.values()
        if s.name in table.schedules and s.usual_chunks == 1 and not s.needs_split
    )
    if wanted is not None and wanted not in schedules:
        raise LoweringError(
            f"lower=spmd runs one forward and one backward in a tick, which schedule {wanted!r} "
            f"is not made of; there are {', '.join(schedules)}"
        )
    every = table.cluster.device_count
    for u, submesh in enumerate(table.submeshes):
        count, rest = divmod(every, submesh.device_count)
        if rest or count != (stages or count):
            continue
        meshes = {option.mesh for batch in table.batches for option in batch.options[u]}
        for mesh in sorted(meshes, key=lambda m: (m.sizes, m.names)):
            batches = tuple(
                replace(b, options=(tuple(o for o in b.options[u] if o.mesh == mesh),))
                for b in table.batches
            )
            priced = tuple(b for b in batches if b.options[0])
            yield replace(table, submeshes=(submesh,), batches=priced, schedules=schedules)


# Numbers of microbatches that are searched lie so far apart at least, if many divide the batch.
_APART = 1.3
_MANY = 12
# Choices that are built before the search gives up, each after what the one before has taught.
_BUILDS = 8
# The prices of two choices are a few per cent off what they take when built, and both alike.
_FAR = 1.05
# One program of the whole step fuses what a stage's parts store for each other: of their work, the
# share that it may come to.
_FUSED = 0.7
# Runners-up that are built at most where the best came out slower than they are priced, by this.
_RUNNERS_UP, _CLEARLY = 3, 0.01


@dataclass(frozen=True)
class FoundStages:
    """The stage programs that were chosen with their step's trace, and what else was looked at.

    `margins` are the simple plans that it was measured against. One program of the whole step takes
    `least_whole_seconds` at least, by the prices of its layers.
    """

    trace: MicrobatchTrace
    programs: StagePrograms
    ranked: Ranked
    choice: Choice
    margins: tuple[Margin, ...]
    least_whole_seconds: float

    @property
    def layers_of(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(s.last - s.first + 1 for s in self.choice.stages)


def search_stages(source: Source, request: Request, setting: Setting) -> FoundStages | None:
    """The best stage programs for a request; None where one program of the whole batch is best.

    Raises BatchError where the step cannot be cut into microbatches exactly; InfeasibleError or
    MemoryLimitError where no stages are as wanted or fit.
    """
    # 1. The numbers of microbatches to try; the step in the smallest of them, cut into layers.
    counts = _counts(source, request)
    chunks = SCHEDULES[request.schedule].usual_chunks if request.schedule is not None else 1
    fewest = chunks * (request.stages or 1)
    known: dict[int, SlicedStep] = {}

    def sliced(microbatches: int) -> SlicedStep:
        if microbatches in known:
            return known[microbatches]
        first = next(iter(known.values()), None)
        found = first.resized(microbatches, request.rules) if first is not None else None
        if found is None:
            trace = source.trace_at(microbatches, cut=request.stages != 1)
            found = slice_step(trace, request.rules, setting, fewest, request.passes)
        return known.setdefault(microbatches, found)

    # 2. The cost of every layer on every submesh, mesh and number of rows.
    programs = LayerPrograms(sliced(max(counts)), request.rules)
    if any(request.shard.recipe.suits(reading) for reading in programs.every_reading()):
        request = request.of_parts()
    contexts = SubmeshContexts(request.cluster, request.compiler_options)
    table = stage_table(programs, counts, request, setting, contexts)
    if isinstance(request.passes.lower, Spmd):
        table = equal_stages_table(table, request.passes, setting)

    # 3. The best stages by these costs, sharded and lowered.
    def build(choice: Choice) -> StagePrograms:
        return build_stages(sliced(choice.microbatches), choice, request, setting, contexts)

    first, ranked = _first_built(table, request.passes, setting, build)
    if first is None:
        return None
    built, choice = fastest_built(ranked, first, build)
    # 4. The simple plan, which no search should fall behind.
    chosen, choice, margins = _no_worse_than_simple(ranked, built, choice, build)
    trace, least = sliced(choice.microbatches).trace, _least_whole_seconds(table)
    return FoundStages(trace, chosen, ranked, choice, margins, least)


def _first_built(
    table: StageTable,
    passes: PassPipeline,
    setting: Setting,
    build: Callable[[Choice], StagePrograms],
) -> tuple[StagePrograms | None, Ranked]:
    """The best choice that fits when it is built; no programs where one program is best.

    A stage may hold more than its layers' costs add up to. Then the difference is set aside for
    stages of its kind, and the search goes on: what did not fit is not chosen again.
    """
    failure: MemoryLimitError | None = None
    for _ in range(_BUILDS):
        try:
            ranked = passes.search(table, setting)
        except MemoryLimitError as error:
            raise failure or error from None
        best = ranked.best
        if best.microbatches == 1 and len(best.stages) == 1:
            return None, ranked
        try:
            return build(best), ranked
        except StageMemoryError as error:
            failure = failure or error
            table = _set_aside(table, best, error)
    raise failure or InfeasibleError("no stages were found")


def _set_aside(table: StageTable, choice: Choice, error: StageMemoryError) -> StageTable:
    """The table with what built stages held beside their price set aside for their kind.

    That is, on any mesh of their submesh: what is held beside the price comes from the remat.
    """
    blocks = list(dict.fromkeys(s.block for s in choice.stages))
    block = blocks[error.submesh]
    (stage, *_) = (s for s in choice.stages if s.block == block)
    more = error.peak_bytes - choice.peak_bytes[error.submesh]

    def corrected(option: Option) -> Option:
        if (option.remat, option.partial_sums) != (stage.remat, stage.partial_sums):
            return option
        return replace(option, spare_bytes=option.spare_bytes + more)

    u = table.submeshes.index(block.shape)
    return replace(
        table,
        batches=tuple(
            replace(
                batch,
                options=tuple(
                    tuple(map(corrected, options)) if n == u else options
                    for n, options in enumerate(batch.options)
                ),
            )
            for batch in table.batches
        ),
    )


def fastest_built(
    ranked: Ranked, first: StagePrograms, build: Callable[[Choice], StagePrograms]
) -> tuple[StagePrograms, Choice]:
    """The best choice as it was built, or a runner-up that is faster.

    A stage that holds more than its price is sharded otherwise to fit, which takes longer. So the
    next is built as long as it is priced clearly below the fastest that is built.
    """
    fastest, choice = first, ranked.best
    for other in ranked.others[:_RUNNERS_UP]:
        if other.seconds >= fastest.timing.device_seconds * (1 - _CLEARLY):
            break
        with suppress(MemoryLimitError):
            built = build(other)
            if built.timing.order < fastest.timing.order:
                fastest, choice = built, other
    return fastest, choice


def _no_worse_than_simple(
    ranked: Ranked,
    built: StagePrograms,
    choice: Choice,
    build: Callable[[Choice], StagePrograms],
) -> tuple[StagePrograms, Choice, tuple[Margin, ...]]:
    """The faster of what was built and the simple plan, with what the simple one takes.

    One that by its price is far behind, both the other's price and what that takes, is not built.
    """
    simple = ranked.simple
    if simple is None:
        return built, choice, ()
    name = _name_simple(simple)
    if simple.stages == choice.stages and simple.microbatches == choice.microbatches:
        return built, choice, (Margin(name, built.timing.seconds, "the plan itself"),)
    if simple.seconds > _FAR * max(choice.seconds, built.timing.device_seconds):
        return built, choice, (Margin(name, simple.seconds, "by its price"),)
    try:
        other = build(simple)
    except MemoryLimitError:
        return built, choice, (Margin(name, None, "does not fit"),)
    margins = (Margin(name, other.timing.seconds, ""),)
    if other.timing.order < built.timing.order:
        return other, simple, margins
    return built, choice, margins


def _least_whole_seconds(table: StageTable) -> float:
    """Seconds of one program of the whole step at least; infinite where its layers do not fit.

    Its collectives may run beside all of its work, where those of stages wait for a part to end.
    Where no way was priced on all devices, those of the largest submesh are taken to scale.
    """
    least = math.inf
    for batch in table.batches:
        if batch.microbatches > 1:
            continue
        priced = zip(table.submeshes, batch.options, strict=True)
        shape, options = max(
            ((shape, options) for shape, options in priced if options),
            key=lambda row: row[0].device_count,
        )
        share = shape.device_count / table.cluster.device_count
        for option in options:
            if share * peak_bytes(option.layers, 1) <= table.memory_bytes:
                step = StageCost.of_layers(option.layers).of_step(1)
                least = min(least, share * max(step.compute, step.communication))
    return _FUSED * least


def _name_simple(simple: Choice) -> str:
    first = simple.stages[0]
    remat = f", {first.remat} remat" if first.remat is not Remat.NONE else ""
    return (
        f"{simple.devices} equal stages on ({first.mesh}), {simple.microbatches} microbatches"
        f"{remat}"
    )


def build_stages(
    sliced: SlicedStep,
    choice: Choice,
    request: Request,
    setting: Setting,
    contexts: SubmeshContexts,
) -> StagePrograms:
    """A choice's stages as programs, its layers merged to one for each stage.

    So a plan that is loaded comes to the same programs from the stages' bounds alone. Raises
    MemoryLimitError where a submesh's stages do not fit.
    """
    layers = sliced.layers.layers
    cuts = Fixed(tuple(layers[s.last].last + 1 for s in choice.stages[:-1]))
    merged = cuts.between(sliced.batching, setting)
    stages = _stage_plan(merged, layers, choice, request.cluster)
    own = tuple(map(contexts.of, stages.submeshes))
    placed = PlacedStages.of(sliced.batching, stages, request.cluster, own)
    sharder = SubmeshSharder(placed, request, setting)
    partial_sums = list({s.block: s.partial_sums for s in choice.stages}.values())
    # The fullest first: what does not fit is found out soonest, and what fits there fits elsewhere.
    peaks = choice.peak_bytes or (0,) * len(partial_sums)
    order = sorted(range(len(peaks)), key=lambda k: -peaks[k])
    plans = {k: sharder.shard(k, partial_sums[k]) for k in order}
    slowest = max(order, key=lambda k: plans[k].seconds)
    if not partial_sums[slowest]:
        plans[slowest] = sharder.quickened(slowest, plans[slowest])
    programs = programs_of(placed, [plans[k] for k in range(len(peaks))], setting)
    return programs.lowered_by(request.passes.lower, setting)


def _stage_plan(
    merged: LayerSequence, layers: Sequence[Layer], choice: Choice, cluster: Cluster
) -> StagePlan:
    """The choice as stages of one merged layer each.

    A submesh's devices stand in the order of its logical mesh.
    """
    blocks = list(dict.fromkeys(s.block for s in choice.stages))
    meshes = {s.block: s.mesh for s in choice.stages}
    return StagePlan(
        merged,
        tuple(
            Stage(i, i, blocks.index(s.block), s.remat, _cuts(layers, s))
            for i, s in enumerate(choice.stages)
        ),
        tuple(Submesh(meshes[b], _devices(cluster, b, Submesh(meshes[b]))) for b in blocks),
        choice.microbatches,
        choice.schedule,
    )


def _cuts(layers: Sequence[Layer], stage: ChosenStage) -> tuple[int, ...]:
    """The boundaries between the layers of a stage that recomputes."""
    if stage.remat is Remat.NONE:
        return ()
    return tuple(layers[i].last + 1 for i in range(stage.first, stage.last))


def _devices(cluster: Cluster, block: Block, submesh: Submesh) -> tuple[int, ...]:
    order = device_order(cut_out(cluster, block.shape), submesh.mesh)
    return tuple(block.start + i for i in order)


def _counts(source: Source, request: Request) -> Sequence[int]:
    """The numbers of microbatches to try."""
    if request.microbatches is not None:
        return (request.microbatches,)
    whole = (1,) if request.may_be_one_program else ()
    return (*whole, *_divisors(source.rows)) or (1,)


def _divisors(rows: int) -> tuple[int, ...]:
    """The numbers from 2 on that divide the rows; of many, those that lie some way apart."""
    found = [n for n in range(2, rows + 1) if rows % n == 0]
    if len(found) <= _MANY:
        return tuple(found)
    spread = [found[-1]]
    for n in reversed(found):
        if n * _APART <= spread[-1]:
            spread.append(n)
    return tuple(reversed(spread))
