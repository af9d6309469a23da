"""The joint search over stages and shardings: slice, price, search, shard and lower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.cluster import Cluster, device_order
from autopar.cluster.submesh import Block, cut_out
from autopar.errors import InfeasibleError, MemoryLimitError
from autopar.ir.layers import Layer, LayerSequence
from autopar.ir.stages import Stage, StagePlan, Submesh
from autopar.passes.base import Setting
from autopar.passes.layer.fixed import Fixed
from autopar.passes.stage.prices import Choice, ChosenStage, Ranked
from autopar.passes.stage.search import Search
from autopar.planner.layer_programs import LayerPrograms
from autopar.planner.placed_stages import PlacedStages
from autopar.planner.request import Request
from autopar.planner.sliced_step import SlicedStep, slice_step
from autopar.planner.source import Source
from autopar.planner.stage_programs import StagePrograms, lower_stages
from autopar.planner.stage_table import stage_table
from autopar.planner.submesh_sharding import SubmeshSharder
from autopar.schedule.table import SCHEDULES

# The most microbatches that a search without a fixed number tries: more only shrink the bubble
# that these have made small, and each costs a launch.
_MOST_MICROBATCHES = 512
# Of the memory, what is planned for: a stage may hold more than its layers' prices add up to.
_SHARES = (1.0, 0.87, 0.75)


@dataclass(frozen=True)
class FoundStages:
    """The stage programs that were chosen, and what else was looked at.

    `layers_of` says how many layers each stage has.
    """

    programs: StagePrograms
    ranked: Ranked
    layers_of: tuple[int, ...]


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
        if microbatches not in known:
            trace = source.trace_at(microbatches, cut=request.stages != 1)
            known[microbatches] = slice_step(
                trace, request.rules, setting, fewest, request.batch, request.layer
            )
        return known[microbatches]

    # 2. The price of every layer on every submesh, mesh and number of rows.
    apart = LayerPrograms(sliced(max(counts)), request.rules)
    table = stage_table(apart, counts, request, setting)
    # 3. The best stages by these prices, then sharded and lowered. A stage may hold more than its
    #    layers' prices add up to: then the search plans for less of the memory.
    stage = Search(request.stages, request.microbatches, request.schedule)
    failure: MemoryLimitError | None = None
    for share in _SHARES:
        held = replace(table, memory_bytes=int(share * table.memory_bytes))
        try:
            ranked = setting.watched("stage", held, partial(stage.run, held, setting))
            best = ranked.best
            if best.microbatches == 1 and len(best.stages) == 1:
                return None
            made = build_stages(sliced(best.microbatches), best, request, setting)
            return FoundStages(made, ranked, tuple(s.last - s.first + 1 for s in best.stages))
        except MemoryLimitError as error:
            failure = failure or error
    raise failure or InfeasibleError("no stages were found")


def build_stages(
    sliced: SlicedStep, choice: Choice, request: Request, setting: Setting
) -> StagePrograms:
    """A choice's stages as programs, its layers merged to one for each stage.

    So a plan that is loaded comes to the same programs from the stages' bounds alone. Raises
    MemoryLimitError where a submesh's stages do not fit.
    """
    layers = sliced.layers.layers
    cuts = Fixed(tuple(layers[s.last].last + 1 for s in choice.stages[:-1]))
    merged = cuts.run(sliced.batching, setting)
    stages = _stage_plan(merged, layers, choice, request.cluster)
    placed = PlacedStages.of(sliced.batching, stages, request.cluster)
    sharder = SubmeshSharder(placed, request, setting)
    variants = {s.block: (s.recipe, s.partial_sums) for s in choice.stages}
    shardings = [sharder.shard(k, *variant) for k, variant in enumerate(variants.values())]
    return lower_stages(sliced.trace, placed, shardings)


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
            Stage(i, i, blocks.index(s.block), s.recompute, _cuts(layers, s))
            for i, s in enumerate(choice.stages)
        ),
        tuple(Submesh(meshes[b], _devices(cluster, b, Submesh(meshes[b]))) for b in blocks),
        choice.microbatches,
        choice.schedule,
    )


def _cuts(layers: Sequence[Layer], stage: ChosenStage) -> tuple[int, ...]:
    """The boundaries between the layers of a stage that is recomputed."""
    return tuple(layers[i].last + 1 for i in range(stage.first, stage.last) if stage.recompute)


def _devices(cluster: Cluster, block: Block, submesh: Submesh) -> tuple[int, ...]:
    order = device_order(cut_out(cluster, block.submesh), submesh.mesh)
    return tuple(block.start + i for i in order)


def _counts(source: Source, request: Request) -> Sequence[int]:
    """The numbers of microbatches to try."""
    if request.microbatches is not None:
        return (request.microbatches,)
    whole = (1,) if request.may_be_one_program else ()
    return (*whole, *_powers(source.rows)) or (1,)


def _powers(rows: int) -> Iterator[int]:
    """Powers of two that divide the rows, from 2 on."""
    count = 2
    while rows % count == 0 and count <= min(rows, _MOST_MICROBATCHES):
        yield count
        count *= 2
