"""A step cut into microbatches and layers: what stages are priced by and made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import BatchError, PlanMismatchError
from autopar.frontend.microbatch.part_trace import MicrobatchTrace
from autopar.frontend.rewrite.rescale import rescale
from autopar.ir.batching import BatchGraphs, Batching
from autopar.ir.plan import Plan
from autopar.ir.plan_file import contents_of
from autopar.ir.stages import LayerSequence
from autopar.passes.base import Setting
from autopar.passes.batch.identity import OneMicrobatch
from autopar.passes.layer.fixed import Fixed
from autopar.passes.layer.min_cut import MinCut
from autopar.passes.pipeline import PassPipeline
from autopar.planner.compatibility import check_plan
from autopar.planner.placed_stages import slice_whole
from autopar.planner.remat import form_of
from autopar.planner.source import Source
from autopar.rules import RuleBook, attach_rules

_UNEVEN = 1.5  # of a stage's share of the work, what a layer may have
_IN_STAGES = PassPipeline.of_options(stages=None, microbatches=None)


@dataclass(frozen=True)
class SlicedStep:
    """A step's trace on one microbatch, how microbatches make up the step, and its layers."""

    trace: MicrobatchTrace
    batching: Batching
    layers: LayerSequence

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.batching.microbatches

    def resized(self, microbatches: int, rules: RuleBook) -> SlicedStep | None:
        """The step in other microbatches, between the same layers; None where it must be traced.

        What was found of the rows holds for any number of them. The layers' figures stay those of
        the microbatch that they were cut by.
        """
        trace = self.trace.resized(microbatches, self.batching.batch)
        if trace is None:
            return None
        graph = attach_rules(trace.part.graph, rules)
        return replace(
            self,
            trace=trace,
            batching=replace(self.batching, graph=graph, microbatches=microbatches),
        )


def slice_step(
    trace: MicrobatchTrace,
    rules: RuleBook,
    setting: Setting,
    fewest: int = 1,
    passes: PassPipeline = _IN_STAGES,
) -> SlicedStep:
    """Microbatches and layers of a traced step: those that its structure suggests.

    Where the layer slot leaves their number open, and these are less than the `fewest` that are
    needed or so uneven that they make no such stages, there are `fewest` layers of even work.
    Raises BatchError where the step cannot be cut into these microbatches exactly.
    """
    sliced, layering = slice_at(trace, rules, setting, passes), passes.layer
    if not isinstance(layering, MinCut) or layering.layers is not None:
        return sliced
    if fewest == 1 or _suits(sliced.layers, fewest):
        return sliced
    even = replace(passes, layer=replace(layering, layers=fewest))
    return replace(sliced, layers=even.cut_layers(sliced.batching, setting))


def slice_as_planned(source: Source, plan: Plan, setting: Setting) -> SlicedStep:
    """A step cut and recomputed as a saved plan has it.

    Raises PlanMismatchError where the plan is for another step, or this one cannot be cut so, or
    does not make what is recomputed. A stack of layers that stages share is an argument a layer.
    """
    if plan.is_one_program:
        check_plan(plan, source.traced)
        form = form_of(source.plain, plan.recomputation, source.rules)
        trace = MicrobatchTrace.of_whole(form.traced)
        return SlicedStep(trace, *slice_whole(form.graph, setting))
    try:
        trace = source.trace_at(plan.microbatches, cut=len(plan.stages) > 1)
    except BatchError as error:
        raise PlanMismatchError(
            f"the plan for {plan.origin.step!a} cuts the step into {plan.microbatches} "
            f"microbatches, which cannot be: {error}"
        ) from error
    check_plan(plan, trace.whole)
    with contents_of(plan):
        cuts = Fixed(tuple(stage.stop for stage in plan.stages[:-1]))
        return slice_at(trace, source.rules, setting, replace(_IN_STAGES, layer=cuts))


def _suits(sequence: LayerSequence, stages: int) -> bool:
    """True if layers can make so many stages, none with far more work than its share."""
    work = [layer.flops for layer in sequence.layers]
    return len(work) >= stages and max(work) * stages <= _UNEVEN * sum(work)


def slice_at(
    trace: MicrobatchTrace, rules: RuleBook, setting: Setting, passes: PassPipeline
) -> SlicedStep:
    """The batch and the layer slot on a traced step; raises as `slice_step`."""
    trace, batching = batched(trace, rules, setting, passes)
    return SlicedStep(trace, batching, passes.cut_layers(batching, setting))


def batched(
    trace: MicrobatchTrace, rules: RuleBook, setting: Setting, passes: PassPipeline = _IN_STAGES
) -> tuple[MicrobatchTrace, Batching]:
    """The batching, after factors that may wait until the loop is over were taken out of it."""
    if trace.microbatches == 1:
        passes = replace(passes, batch=OneMicrobatch())
    batching = passes.cut_batch(_graphs(trace, rules), setting)
    while batching.rescales:
        trace = replace(
            trace,
            whole=rescale(trace.whole, batching.rescales),
            part=rescale(trace.part, batching.rescales),
        )
        batching = passes.cut_batch(_graphs(trace, rules), setting)
    return trace, batching


def _graphs(trace: MicrobatchTrace, rules: RuleBook) -> BatchGraphs:
    whole = attach_rules(trace.whole.graph, rules)
    part = attach_rules(trace.part.graph, rules)
    return BatchGraphs(whole, part, trace.microbatches, trace.index, trace.sources)
