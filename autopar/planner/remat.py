"""Tries recomputation where memory binds: other forms of the step, for the planner to plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.cost.memory import Held
from autopar.cost.prices import Prices
from autopar.errors import PlanError, PlanMismatchError
from autopar.frontend import TracedStep
from autopar.frontend.rewrite.remat import rematerialize, value_names
from autopar.ir.graph import Graph
from autopar.ir.recomputation import Recomputation
from autopar.passes.base import Setting
from autopar.passes.pipeline import Decided
from autopar.passes.shard.model.local_costs import local_costs
from autopar.passes.shard.model.recompute import levels
from autopar.passes.shard.model.residuals import Residuals
from autopar.rules import RuleBook, attach_rules

_WORTH = 0.1  # of what is over the limit, that recomputing must save to be tried
_TIGHTENINGS = (0.98, 0.8, 0.6)  # of the bytes that the limit leaves


@dataclass(frozen=True)
class Form:
    """A step in the form in which it is planned and run, and what it recomputes.

    Where a plan is all that is left of the step there is no `trace`, and no other form to be made.
    """

    trace: TracedStep | None
    graph: Graph
    recomputed: Recomputation = field(default_factory=Recomputation)

    @property
    def traced(self) -> TracedStep:
        """The step as it runs; raises PlanError where the form was read from a plan."""
        if self.trace is None:
            raise PlanError("a plan's own step cannot be run or recomputed: plan it from its code")
        return self.trace


def leaner_forms(
    plain: Form, roomy: Decided, held: Held, setting: Setting, rules: RuleBook
) -> Iterator[Form]:
    """The step with recomputation so that the plan made without a limit would fit it, if it can.

    The first form is the cheapest that should fit. What follows recomputes more and more, for
    where the pass sees more held than the cut did; where nothing is enough, the last goes as far
    as it can, and half the way.
    """
    mesh = roomy.sharding.mesh
    prices = Prices(setting.cluster, mesh)
    costs = local_costs(roomy.graph, roomy.sharding, roomy.program, prices)
    residuals = Residuals(roomy.graph, costs)
    whole = residuals.peak(frozenset())
    # Both the pass's memory rows, which see what the cut sees, and the listing must fit.
    left = setting.memory_bytes - held.argument_bytes
    limit = min(left, whole - (held.peak_bytes - setting.memory_bytes))
    seen: set[tuple[str, ...]] = set()
    for tightening in _TIGHTENINGS:
        found = levels(residuals.tradeoff, residuals.peak, tightening * limit)
        for level in reversed(found):
            names = residuals.tradeoff.names(level.again)
            saved = int(whole - level.peak_bytes)
            if names not in seen and saved > _WORTH * (whole - limit):
                seen.add(names)
                yield form_of(plain, Recomputation(names, level.seconds, saved), rules)
        if not found or found[-1].peak_bytes > tightening * limit:
            return


def form_of(plain: Form, recomputed: Recomputation, rules: RuleBook) -> Form:
    """The step that recomputes these values; raises PlanMismatchError where it has them not."""
    if not recomputed.values:
        return plain
    unknown = _unknown(plain.traced, recomputed.values)
    if unknown:
        raise PlanMismatchError(
            f"the plan for {plain.traced.name} recomputes {', '.join(unknown[:8])}, which the step "
            "does not make.\nPlan again for this step."
        )
    traced = rematerialize(plain.traced, recomputed.values)
    return Form(traced, attach_rules(traced.graph, rules), recomputed)


def _unknown(traced: TracedStep, names: Sequence[str]) -> list[str]:
    known = value_names(traced)
    return [n for n in names if n not in known]
