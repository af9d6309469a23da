"""Tries recomputation where memory binds: other forms of the step, for the planner to plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import WeakValueDictionary

from autopar.errors import PlanError, PlanMismatchError
from autopar.frontend import TracedStep
from autopar.frontend.rewrite.remat import rematerialize, value_names
from autopar.ir.graph import Graph
from autopar.ir.sharding_plan import Recomputation
from autopar.passes.shard.model.recompute import Cut, Cuts
from autopar.passes.shard.model.residuals import Residuals
from autopar.rules import RuleBook, attach_rules

_WORTH = 0.1  # of what is over the limit, that recomputing must save to be tried
_MARGIN = 0.98  # of the bytes that the limit leaves, as the other form may be sharded otherwise


@dataclass(frozen=True)
class Form:
    """A step in the form in which it is planned and run, and what it recomputes.

    Where a plan is all that is left of the step there is no `trace`, and no other form to be made.
    Meshes share the forms that are made of it, by the values that these make again, and what is
    known of leaner ones, by what its plan there holds and takes: that is often the same plan.
    """

    trace: TracedStep | None
    graph: Graph
    recomputed: Recomputation = field(default_factory=Recomputation)
    recomputing: WeakValueDictionary[tuple[str, ...], Form] = field(
        default_factory=lambda: WeakValueDictionary[tuple[str, ...], Form](),
        init=False, compare=False, repr=False,
    )  # fmt: skip
    leaner_forms: WeakValueDictionary[tuple[int, float], LeanerForms] = field(
        default_factory=lambda: WeakValueDictionary[tuple[int, float], LeanerForms](),
        init=False, compare=False, repr=False,
    )  # fmt: skip

    @property
    def traced(self) -> TracedStep:
        """The step as it runs; raises PlanError where the form was read from a plan."""
        if self.trace is None:
            raise PlanError("a plan's own step cannot be run or recomputed: plan it from its code")
        return self.trace


@dataclass(frozen=True)
class LeanerForms:
    """Forms of a step that recompute, so that its plan without a limit would hold less.

    `peak_bytes` are those that this plan holds.
    """

    residuals: Residuals
    peak_bytes: int

    @property
    def whole_bytes(self) -> float:
        """The peak that the cut sees where nothing is recomputed."""
        return self.cuts.weighed(frozenset()).peak_bytes

    @cached_property
    def cuts(self) -> Cuts:
        """The choices of what is made again, each weighed once."""
        return Cuts(self.residuals.tradeoff, self.residuals.peak)

    def within(self, allowed_bytes: int) -> Recomputation | None:
        """The cheapest recomputation that should leave no more than so many bytes.

        Where nothing is enough it goes as far as it can, up to all that scans hold; None where that
        is not worth a plan.
        """
        limit = self.whole_bytes - (self.peak_bytes - allowed_bytes)
        found = self.cuts.within(_MARGIN * limit) or self.cuts.weighed(frozenset())
        if found.peak_bytes > _MARGIN * limit and self.residuals.stacks:
            whole = self.cuts.weighed(self.residuals.inside_scans)
            found = min(found, whole, key=lambda cut: cut.peak_bytes)
        recomputed = self._recomputation(found)
        is_worth = recomputed.saved_bytes > _WORTH * (self.whole_bytes - limit)
        return recomputed if is_worth else None

    def ever_leaner(self, worth_seconds: float) -> Iterator[Recomputation]:
        """Recomputations that may save time, from that which saves most on, if that is so much.

        What a scan does not stack for the backward pass is neither written nor read. Each holds
        clearly less than the one before: what keeps nothing apart is fused best, and what holds
        little is scheduled best, which the sum of all ops does not tell.
        """
        if not self.residuals.stacks:
            return
        tradeoff = self.residuals.tradeoff
        again = self.cuts.cheapest([0.0] * len(tradeoff.kept))
        if -tradeoff.seconds(again) <= worth_seconds:
            return
        cut = self.cuts.weighed(again)
        while True:
            yield self._recomputation(cut)
            leaner = self.cuts.within(_MARGIN * cut.peak_bytes)
            if leaner is None or leaner.peak_bytes > _MARGIN * cut.peak_bytes:
                return
            cut = leaner

    def checkpointed(self) -> Recomputation | None:
        """A recomputation of all that scans hold, as by `jax.checkpoint` around a layer."""
        whole = self.residuals.inside_scans if self.residuals.stacks else frozenset[int]()
        return self._recomputation(self.cuts.weighed(whole)) if whole else None

    def _recomputation(self, cut: Cut) -> Recomputation:
        saved = max(0, int(self.whole_bytes - cut.peak_bytes))
        return Recomputation(self.residuals.values(cut.again), cut.seconds, saved)


def form_of(plain: Form, recomputed: Recomputation, rules: RuleBook) -> Form:
    """The step that recomputes these values; raises PlanMismatchError where it has them not."""
    if not recomputed.values:
        return plain
    known = plain.recomputing.get(recomputed.values)
    if known is not None:
        return known if known.recomputed == recomputed else replace(known, recomputed=recomputed)
    unknown = _unknown(plain.traced, recomputed.values)
    if unknown:
        raise PlanMismatchError(
            f"the plan for {plain.traced.name} recomputes {', '.join(unknown[:8])}, which the step "
            "does not make.\nPlan again for this step."
        )
    traced = rematerialize(plain.traced, recomputed.values)
    form = Form(traced, attach_rules(traced.graph, rules), recomputed)
    plain.recomputing[recomputed.values] = form
    return form


def _unknown(traced: TracedStep, names: Sequence[str]) -> list[str]:
    known = value_names(traced)
    return [n for n in names if n not in known]
