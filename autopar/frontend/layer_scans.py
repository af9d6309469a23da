"""Finds scans over layers: those that take slice by slice what derives from the step's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from autopar.frontend.regions import is_backward
from autopar.frontend.stacks import rows_through
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep, refs
from autopar.ir.values import Role

# Equations whose bodies read their operands and make their results as they are.
OPEN = ("cond", "remat2", "checkpoint")


@dataclass(frozen=True)
class LayerScan:
    """Scans over the same layers: forward ones, and those that go back over what these left.

    `length` are the layers; `forward` and `backward` count the scans. `inputs` are the state
    inputs that are stacked along dim 0, one row or more for each layer. `values` are all values
    with such rows.
    """

    length: int
    forward: int
    backward: int
    inputs: tuple[int, ...]
    values: frozenset[Ref]

    def __str__(self) -> str:
        scans = f"{self.forward} forward and {self.backward} backward"
        return f"{self.length} layers: {scans} scan(s), {len(self.inputs)} stacked state inputs"


def layer_scans(traced: TracedStep) -> tuple[LayerScan, ...]:
    """The scans over layers of a step, in the order in which they first run.

    Values belong together where equations keep their rows apart, as far as that goes: from the
    stacked parameters through the scans to their gradients, moments and replacements.
    """
    groups = _Groups(traced)
    found: dict[Ref, list[Equation]] = {}
    pure = _state_alone(traced)
    for equation in traced.program.walk():
        if equation.primitive.name == "scan":
            for ref in list(refs(_slices(equation)))[:1]:
                found.setdefault(groups.root(ref), []).append(equation)
    return tuple(
        scan
        for root, scans in found.items()
        if any(not pure.isdisjoint(refs(_slices(s))) for s in scans)
        for scan in (groups.scan(root, scans),)
        if scan.inputs
    )


def _slices(scan: Equation) -> tuple[Ref | Const, ...]:
    return scan.operands[scan.params["num_consts"] + scan.params["num_carry"] :]


def links(equation: Equation) -> Iterator[tuple[Ref, ...]]:
    """Values of an equation, each time those that have the same rows in dim 0."""
    kind = equation.primitive.name
    if kind == "scan":
        stacked = equation.results[equation.params["num_carry"] :]
        yield (*refs(_slices(equation)), *stacked)
    elif kind == "optimization_barrier":
        yield from _pairs(equation.operands, equation.results)
    elif kind in OPEN:
        for body in equation.bodies:
            given = equation.operands[len(equation.operands) - len(body.inputs) :]
            yield from _pairs(given, body.inputs)
            yield from _pairs(body.outputs, equation.results)
            for inner in body.equations:
                yield from links(inner)
    else:
        rows = rows_through(equation)
        if rows is not None:
            operands = refs(equation.operands[i] for i in rows.operands)
            yield (*operands, *(equation.results[i] for i in rows.results))


def _pairs(left: Iterable[Ref | Const], right: Iterable[Ref | Const]) -> Iterator[tuple[Ref, ...]]:
    pairs = zip(left, right, strict=True)
    yield from ((a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def _state_alone(traced: TracedStep) -> frozenset[Ref]:
    """Values made of state and of nothing of the batch."""
    given = zip(traced.graph.inputs, traced.program.inputs, strict=True)
    roles = [(i.role, ref) for i, ref in given]
    state = {ref for role, ref in roles if role is Role.STATE}
    batch = {ref for role, ref in roles if role is Role.BATCH}
    for equation in traced.program.equations:
        operands = set(refs(equation.operands))
        for group in (state, batch):
            if not group.isdisjoint(operands):
                group.update(equation.results)
    return frozenset(state - batch)


class _Groups:
    """Values in groups with the same rows (disjoint sets, joined by size of their numbers)."""

    def __init__(self, traced: TracedStep) -> None:
        self._traced, program = traced, traced.program
        self._parent: dict[Ref, Ref] = {}
        for equation in program.equations:
            for together in links(equation):
                self._join(together)
        for o, i in traced.donated:
            self._join(tuple(refs([program.outputs[o], program.inputs[i]])))

    def root(self, ref: Ref) -> Ref:
        """The value that stands for a value's group."""
        while (parent := self._parent.setdefault(ref, ref)) != ref:
            self._parent[ref] = ref = self._parent[parent]
        return ref

    def _join(self, together: tuple[Ref, ...]) -> None:
        for other in together[1:]:
            left, right = sorted((self.root(together[0]), self.root(other)))
            self._parent[right] = left

    def scan(self, root: Ref, scans: list[Equation]) -> LayerScan:
        """What there is to say of a group that has these scans."""
        program = self._traced.program
        values = frozenset(r for r in self._parent if self.root(r) == root)
        length = min(s.params["length"] for s in scans)
        back = sum(map(is_backward, scans))
        stacked = (i for i in self._traced.state_inputs if program.inputs[i] in values)
        inputs = tuple(i for i in stacked if program.input_avals[i].shape[0] % length == 0)
        return LayerScan(length, len(scans) - back, back, inputs, values)


def all_values(program: FlatProgram) -> Iterator[tuple[Ref, Any]]:
    """Every value with its type, those of bodies too."""
    yield from program.avals()
    for equation in program.equations:
        for body in equation.bodies:
            yield from all_values(body)
