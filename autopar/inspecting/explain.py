"""Explains one decision of a plan: its choice, the next best with their prices, and what binds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.inspecting.changes import sentences
from autopar.inspecting.loaded_plan import LoadedPlan
from autopar.inspecting.query import Subject, find_subject
from autopar.inspecting.reads import arrival, reads
from autopar.inspecting.reshardable_unit import ReshardableUnit, Weighed, too_large
from autopar.ir.assignment import Assignment
from autopar.ir.explanation import Alternative, Explanation, Price
from autopar.ir.mesh import MeshShape
from autopar.ir.naming import Names, spec, split
from autopar.ir.paths import meant
from autopar.ir.rule import Kind
from autopar.ir.sharding import Sharding, replicated
from autopar.ir.text import show_bytes, show_seconds
from autopar.passes.shard.diagnose.why import Case, others, unbound
from autopar.passes.shard.model.choices import Choice
from autopar.passes.shard.model.decisions import Decision
from autopar.passes.shard.model.pins import CONSTRAINT, show_spec

_SHOWN = 3
_MOST = 6  # alternatives told of, with those that do not fit
_NEGLIGIBLE = 1e-6  # of a step


def explain(loaded: LoadedPlan, asked: str) -> Explanation:
    """The decision that a path, a pattern or an op means.

    Raises ArgumentError where nothing of the plan is meant, or several ops are.
    """
    return _Explainer(*find_subject(loaded, asked)).explanation()


@dataclass(frozen=True)
class _Explainer:
    """The explanation of one subject; `case` is as the plan's pins and method leave it."""

    unit: ReshardableUnit
    case: Case
    subject: Subject

    def explanation(self) -> Explanation:
        """The choice, its reasons and its alternatives."""
        s, kept = self.subject, self._kept.sharding
        whole = replicated(len(s.value.shape))
        sharding = kept.sharding_of.get(s.value.name, whole)
        name, listings = s.value.name, self._kept.listings
        found = () if s.node is None else tuple(sorted(self._alternatives(s.node), key=_seconds))
        return Explanation(
            subject=s.name,
            shape=s.value.shape,
            dtype=s.value.dtype,
            submesh=self.unit.submesh,
            choice=spec(sharding) if s.node is None else self._text(self.case, self._own),
            sharding=sharding,
            local_bytes=sharding.local_bytes(s.value, kept.mesh),
            reads=(*reads(listings, name), *arrival(listings, name, Names(self.unit.graph))),
            price=self._kept.price,
            alternatives=found,
            shared_by=s.alike,
            binds=(*_Reasons(self.unit, self.case, s).sentences(), *self._bound(found)),
            others=s.others,
            is_split=s.node is not None and isinstance(self._own, Assignment),
        )

    @cached_property
    def _kept(self) -> Weighed:
        return self.unit.weighed(self.unit.kept, self.case.seconds)

    @property
    def _own(self) -> Choice:
        node = self.subject.node or 0
        return self.case.choices(node)[self.case.chosen[node]]

    def _text(self, case: Case, choice: Choice) -> str:
        """A choice of the decision, as the subject's own sharding or as how its op is split."""
        node, value = self.subject.node or 0, self.subject.value
        op, place = case.decision(node).op, case.place_of(value.name)
        if isinstance(choice, Assignment) and op is not None:
            return split(op, choice, case.mesh)
        if isinstance(choice, Sharding) and place is not None and place.decision == node:
            return spec(place.sharding(choice))
        return str(choice)

    def _alternatives(self, node: int) -> Iterator[Alternative]:
        """The next best that fit, and what would have been better but does not."""
        case, unit = self.case, self.unit
        limit = unit.loaded.plan.origin.memory_bytes
        if not self._free:
            case = unbound(case, node, unit.kept, unit.tables, unit.setting(unit.own_pins))
        shown, fitting = {self._text(self.case, self._own)}, 0
        for pick, answer in others(case, node, limit):
            choice = case.choices(node)[pick]
            text = self._text(case, choice)
            if text in shown:
                continue
            if fitting == _SHOWN or len(shown) > _MOST:
                return
            shown.add(text)
            weighed, least = unit.fitting(case, {node: pick}, answer)
            sharding = choice if isinstance(choice, Sharding) else None
            if weighed is None:
                yield Alternative(text, sharding, None, (), too_large(least, limit))
            else:
                fitting += 1
                subject = frozenset((self.subject.path, *self.subject.alike))
                changes = sentences(unit, self._kept, weighed, subject, text)
                if self._free:
                    changes += _honest(self._kept.price, weighed.price)
                yield Alternative(text, sharding, weighed.price, tuple(changes))

    @property
    def _free(self) -> bool:
        """True if the plan's pins and method leave more than one choice."""
        return self.subject.node is not None and len(self.case.choices(self.subject.node)) > 1

    def _bound(self, found: Sequence[Alternative]) -> Iterator[str]:
        """The alternatives that memory bars, and what asking for this choice costs."""
        barred = sum(a.price is None for a in found)
        if barred:
            limit = show_bytes(self.unit.loaded.plan.origin.memory_bytes)
            those = "one other choice does" if barred == 1 else f"{barred} other choices do"
            yield f"{those} not fit {limit} a device unless more is recomputed"
        best = min((a for a in found if a.price), key=lambda a: _seconds(a), default=None)
        if self._free or best is None:
            return
        saved = self._kept.price.seconds - _seconds(best)
        if saved > _NEGLIGIBLE * self._kept.price.seconds:
            yield f"if it were free, {best.choice} would take {show_seconds(saved)} less a step"


def _seconds(alternative: Alternative) -> float:
    return alternative.price.seconds if alternative.price is not None else float("inf")


def _honest(kept: Price, other: Price) -> Iterator[str]:
    """A note where the two ways to count a plan's seconds disagree on which is better."""
    faster = kept.seconds - other.seconds
    dearer = other.solver_seconds - kept.solver_seconds
    if faster > _NEGLIGIBLE * kept.seconds and dearer > _NEGLIGIBLE * kept.solver_seconds:
        yield (
            f"the predicted step, with overlap and fusion, is {show_seconds(faster)} shorter; the "
            f"cost that the solver minimizes, without overlap, is {show_seconds(dearer)} higher"
        )
    elif dearer < -_NEGLIGIBLE * kept.solver_seconds:
        yield f"the cost that the solver minimizes is {show_seconds(-dearer)} lower: a better plan"


# -- what binds ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reasons:
    """A subject in its unit, and the case as the plan's own pins and method leave it."""

    unit: ReshardableUnit
    case: Case
    subject: Subject

    def sentences(self) -> tuple[str, ...]:
        """The reasons that bind, what the user asked for first."""
        node = self.subject.node
        if node is None:
            return ("nothing to decide: it is computed where it is read",)
        decision = self.case.decision(node)
        found = [*self._asked(decision, len(self.case.choices(node)))]
        found += self._memory()
        found += _indivisible(self.subject.value.shape, decision, self.case.mesh)
        graph = self.unit.graph
        if self.subject.path in {graph.inputs[i].path for _, i in graph.donated}:
            found.append("it is state: its new value keeps the sharding, in the same buffer")
        found += self._rule(decision)
        if decision.count > 1:
            what = "ops" if decision.op is not None else "values"
            found.append(f"{decision.count} {what} that are alike share this decision")
        return tuple(found)

    def _asked(self, decision: Decision, choices: int) -> Iterator[str]:
        origin = self.unit.loaded.plan.origin
        paths = [a.path for a in self.unit.loaded.plan.arguments]
        for pattern, dims in origin.pins:
            if self.subject.path in meant(pattern, paths):
                yield f"the pin {pattern!r} = {show_spec(dims)} fixes it"
        if decision.label == CONSTRAINT and decision.fixed is not None:
            yield f"the step's own {CONSTRAINT} at {decision.line} fixes it"
        if decision.fixed is None and choices == 1 and origin.method != "auto":
            yield f"method={origin.method!r} allows only this choice"

    def _memory(self) -> Iterator[str]:
        plan = self.unit.loaded.plan
        price = self.unit.kept.outcome.memory_price_seconds_per_byte * 2**30
        if price > 0:
            yield (
                f"memory: {show_bytes(plan.prediction.peak_bytes)} of the "
                f"{show_bytes(plan.origin.memory_bytes)} a device are used; one more GiB would "
                f"save {show_seconds(price)} a step"
            )

    def _rule(self, decision: Decision) -> Iterator[str]:
        op = decision.op
        if op is None or op.rule is None:
            return
        if not op.rule.known:
            yield f"{op.kind} has no sharding rule: it runs replicated on every device"
        whole = sum(f.kind in (Kind.REPLICATE, Kind.PERMUTE) for f in op.rule.factors if f.size > 1)
        if whole:
            yield f"{whole} of its dims cannot be sharded, by the sharding rule of {op.kind}"


def _indivisible(shape: tuple[int, ...], decision: Decision, mesh: MeshShape) -> Iterator[str]:
    """Dims that some axes do not divide, in the value itself or in one that follows it."""
    if not any(n > 1 for n in shape):
        if mesh.device_count > 1:
            yield "it is a scalar, which cannot be sharded"
        return
    follows = len(decision.sizes) == len(shape) and decision.op is None
    for d, n in enumerate(shape):
        least = decision.sizes[d] if follows else n
        for axis, size in zip(mesh.names, mesh.sizes, strict=True):
            if n > 1 and n % size:
                yield f"dim {d} of size {n} is not divisible by {axis}={size}"
            elif n > 1 and least % size:
                yield (
                    f"dim {d} of size {n} is divisible by {axis}={size}, but values that follow it "
                    f"split it into parts of {least}"
                )
