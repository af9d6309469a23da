"""The joint search over stages and shardings: prices, dynamic program, ranking, stage programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.errors import InfeasibleError, MemoryLimitError
from autopar.ir.stages import StagePlan
from autopar.passes.base import Setting
from autopar.passes.layer.fixed import Fixed
from autopar.passes.stage.prices import Choice, Ranked, Wanted
from autopar.passes.stage.search import search
from autopar.planner.layer_programs import LayerPrograms
from autopar.planner.request import Request
from autopar.planner.sliced_step import SlicedStep, slice_step
from autopar.planner.source import Source
from autopar.planner.stage_programs import StagePrograms, build_stages, stage_plan
from autopar.planner.stage_table import stage_table
from autopar.planner.step_timing import Timing, timing_of
from autopar.schedule.table import SCHEDULES

# The most microbatches that a search without a fixed number tries: more only shrink the bubble
# that these have made small, and each costs a launch.
_MOST_MICROBATCHES = 512
# Of the memory, what is planned for: a stage may hold more than its layers' prices add up to.
_SHARES = (1.0, 0.87, 0.75)


@dataclass(frozen=True)
class FoundStages:
    """The stage programs that were chosen, when they run, and what else was looked at.

    `layers_of` says how many layers each stage has.
    """

    staged: StagePrograms
    timing: Timing
    ranked: Ranked
    layers_of: tuple[int, ...]

    @property
    def layer_count(self) -> int:
        """Layers of all stages."""
        return sum(self.layers_of)


def search_stages(source: Source, request: Request, setting: Setting) -> FoundStages | None:
    """The best stage programs for a request; None where one program of the whole batch is best.

    Raises BatchError where the step cannot be cut into microbatches exactly; InfeasibleError or
    MemoryLimitError where no stages are as wanted or fit.
    """
    counts = _counts(source, request)
    chunks = SCHEDULES[request.schedule].usual_chunks if request.schedule is not None else 1
    fewest = chunks * (request.stages or 1)
    known: dict[int, SlicedStep] = {}

    def sliced(microbatches: int) -> SlicedStep:
        if microbatches not in known:
            trace = source.trace_at(microbatches, cut=request.stages != 1)
            known[microbatches] = slice_step(trace, request.rules, setting, fewest)
        return known[microbatches]

    apart = LayerPrograms(sliced(max(counts)), request.rules)
    table = stage_table(apart, counts, request, setting)
    wanted = Wanted(request.stages, request.microbatches, request.schedule)
    failure: MemoryLimitError | None = None
    for share in _SHARES:
        held = replace(table, memory_bytes=int(share * table.memory_bytes))
        try:
            ranked = setting.watched("stage", held, partial(search, held, wanted))
            best = ranked.best
            if best.microbatches == 1 and len(best.stages) == 1:
                return None
            return _built(best, sliced(best.microbatches), ranked, request, setting)
        except MemoryLimitError as error:
            failure = failure or error
    raise failure or InfeasibleError("no stages were found")


def _built(
    choice: Choice, sliced: SlicedStep, ranked: Ranked, request: Request, setting: Setting
) -> FoundStages:
    """A choice's stages as programs, its layers joined to one for each stage.

    So a plan that is loaded comes to the same programs from the stages' bounds alone.
    """
    layers = sliced.layers.layers
    cuts = Fixed(tuple(layers[s.last].last + 1 for s in choice.stages[:-1]))
    joined = replace(sliced, layers=cuts.run(sliced.batching, setting))
    stages: StagePlan = stage_plan(joined.layers, layers, choice, request.cluster)
    stages.verify()
    blocks = tuple(dict.fromkeys(s.block for s in choice.stages))
    made = build_stages(joined, stages, choice, request, setting)
    timing = timing_of(stages, made.costs, blocks, request.cluster)
    return FoundStages(made, timing, ranked, tuple(s.last - s.first + 1 for s in choice.stages))


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
