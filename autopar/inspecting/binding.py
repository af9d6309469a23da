"""Reasons that keep a decision where it is: pins, method, memory, dims, state, its rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.inspecting.query import Subject
from autopar.inspecting.reshardable_unit import ReshardableUnit
from autopar.ir.mesh import MeshShape
from autopar.ir.paths import meant
from autopar.ir.rule import Kind
from autopar.ir.text import show_bytes, show_seconds
from autopar.passes.shard.diagnose.why import Case
from autopar.passes.shard.model.decisions import Decision
from autopar.passes.shard.model.pins import CONSTRAINT, show_spec


@dataclass(frozen=True)
class Bound:
    """A subject in its unit, and the case as the plan's own pins and method leave it."""

    unit: ReshardableUnit
    case: Case
    subject: Subject

    def sentences(self) -> tuple[str, ...]:
        """The reasons that bind, what the user asked for first."""
        node = self.subject.node
        if node is None:
            return ("nothing to decide: it is made where it is read",)
        decision = self.case.decision(node)
        found = [*self._asked(decision, len(self.case.choices(node)))]
        found += self._memory()
        found += _indivisible(self.subject.value.shape, decision, self.case.mesh)
        graph = self.unit.graph
        if self.subject.path in {graph.inputs[i].path for _, i in graph.donated}:
            found.append("it is state: its new value must come out as it lies, in the same buffer")
        found += self._rule(decision)
        if decision.count > 1:
            what = "ops" if decision.op is not None else "values"
            found.append(f"{decision.count} {what} that look alike take this one decision")
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
            yield f"method={origin.method!r} leaves it this choice alone"

    def _memory(self) -> Iterator[str]:
        plan = self.unit.loaded.plan
        price = self.unit.kept.outcome.memory_price_seconds_per_byte * 2**30
        if price > 0:
            yield (
                f"memory binds: {show_bytes(plan.prediction.peak_bytes)} of "
                f"{show_bytes(plan.origin.memory_bytes)} a device are held, and one GiB more would "
                f"save {show_seconds(price)} a step"
            )

    def _rule(self, decision: Decision) -> Iterator[str]:
        op = decision.op
        if op is None or op.rule is None:
            return
        if not op.rule.known:
            yield f"{op.kind} has no sharding rule: it runs whole on every device"
        whole = sum(f.kind in (Kind.REPLICATE, Kind.PERMUTE) for f in op.rule.factors if f.size > 1)
        if whole:
            yield f"{whole} of its dims must be whole on each device, by the rule of {op.kind}"


def _indivisible(shape: tuple[int, ...], decision: Decision, mesh: MeshShape) -> Iterator[str]:
    """Dims that some axes do not divide, in the value itself or in one that follows it."""
    if not any(n > 1 for n in shape):
        if mesh.device_count > 1:
            yield "it is a single number, which cannot be cut up"
        return
    follows = len(decision.sizes) == len(shape) and decision.op is None
    for d, n in enumerate(shape):
        least = decision.sizes[d] if follows else n
        for axis, size in zip(mesh.names, mesh.sizes, strict=True):
            if n > 1 and n % size:
                yield f"dim {d} of {n} does not divide by {axis}={size}"
            elif n > 1 and least % size:
                yield (
                    f"dim {d} of {n} divides by {axis}={size}, but in values that follow it "
                    f"that dim is cut into parts of {least}"
                )
