"""The step as the stage search traces it: on the rows of any number of microbatches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.frontend import StepSpec, TracedStep
from autopar.frontend.microbatch.batch_inputs import batch_inputs
from autopar.frontend.microbatch.part_trace import (
    MicrobatchTrace,
    split_microbatch,
    trace_microbatch,
)
from autopar.frontend.rewrite.layer_scans import layer_scans
from autopar.frontend.rewrite.scan_split import Cuts
from autopar.frontend.trace.step import with_state
from autopar.planner.remat import Form
from autopar.planner.request import Request
from autopar.rules import RuleBook, attach_rules


@dataclass(frozen=True)
class Member:
    """A function that is planned together with a step; it runs `weight` times for each step."""

    source: Source
    weight: float


@dataclass(frozen=True)
class Source:
    """A step with the arguments that it is traced on; traces are kept by number of microbatches.

    With stages, scans over layers are cut into single layers. The `family` are functions of the
    step's state that are planned together with it.
    """

    spec: StepSpec
    args: Sequence[Any]
    kwargs: dict[str, Any]
    traced: TracedStep
    rules: RuleBook
    batch_axes: tuple[tuple[str, int | None], ...] = ()
    family: tuple[Member, ...] = ()
    _known: dict[tuple[int, bool], MicrobatchTrace] = field(
        default_factory=dict[tuple[int, bool], MicrobatchTrace], compare=False, repr=False
    )

    @classmethod
    def of(
        cls, spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any], traced: TracedStep,
        request: Request,
    ) -> Source:  # fmt: skip
        """The source for a request."""
        return cls(spec, args, kwargs, traced, request.rules, request.batch_axes)

    def with_state(self, paths: Collection[str]) -> Source:
        """The source with the inputs of these paths marked as state, which need not come back."""
        traced = with_state(self.traced, paths)
        return self if traced is self.traced else replace(self, traced=traced, _known={})

    @cached_property
    def plain(self) -> Form:
        """The step as it was traced, nothing recomputed."""
        return Form(self.traced, attach_rules(self.traced.graph, self.rules))

    @property
    def rows(self) -> int:
        """Rows of the whole batch; raises BatchError where they cannot be told."""
        return batch_inputs(self.traced, dict(self.batch_axes)).extent

    def trace_at(self, microbatches: int, cut: bool) -> MicrobatchTrace:
        """The step on one of so many microbatches; raises BatchError where there are no such."""
        key = (microbatches, cut)
        if key not in self._known:
            axes = dict(self.batch_axes)
            trace = trace_microbatch(
                self.spec, self.args, self.kwargs, microbatches, axes, self.traced
            )
            self._known[key] = _cut(trace) if cut else trace
        return self._known[key]


def _cut(trace: MicrobatchTrace) -> MicrobatchTrace:
    """Both traces with every scan over layers cut into single layers, in line."""
    scans = layer_scans(trace.whole)
    return split_microbatch(trace, Cuts.everywhere(scans)) if scans else trace
