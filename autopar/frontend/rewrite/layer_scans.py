"""Scans over layers, whose slices derive from the step's state; and rows through equations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax import lax

from autopar.frontend.plain_data import plain_params, type_of
from autopar.frontend.trace.graph import is_backward
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep, refs
from autopar.ir.control_flow import PortKind
from autopar.ir.graph import Op
from autopar.ir.rule import Dims, Kind, Rule
from autopar.ir.values import Role, Value
from autopar.rules import primitive
from autopar.rules.propagation import item_rule


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
    if not any(equation.primitive.name == "scan" for equation in traced.program.walk()):
        return ()
    # 1. Values with the same rows in dim 0, as far as equations keep rows apart: w, dw, m, v, w'.
    groups = _Groups(traced)
    found: dict[Ref, list[Equation]] = {}
    # 2. Scans whose slices are of one group go over the same layers;
    # 3. those are layers whose slices derive from state, and not from the batch.
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


def _slices(scan: Equation) -> list[Ref | Const]:
    assert scan.control_flow is not None
    return scan.control_flow.operands_of(scan.operands, PortKind.SLICED)


def links(equation: Equation) -> Iterator[tuple[Ref, ...]]:
    """Values of an equation, each time those that have the same rows in dim 0."""
    flow = equation.control_flow
    if equation.primitive.name == "optimization_barrier":
        yield from _pairs(equation.operands, equation.results)
    elif flow is None:
        rows = rows_through(equation)
        if rows is not None:
            operands = refs(equation.operands[i] for i in rows.operands)
            yield (*operands, *(equation.results[i] for i in rows.results))
    elif flow.kind == "scan":
        stacked = flow.results_of(equation.results, PortKind.STACKED)
        yield (*refs(_slices(equation)), *stacked)
    elif not flow.repeats:
        for b, body in enumerate(equation.bodies):
            given = (equation.operands[p.operand] for p in flow.inputs[b] if p.operand is not None)
            yield from _pairs(given, body.inputs)
            yield from _pairs(body.outputs, equation.results)
            for inner in body.equations:
                yield from links(inner)


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
        # New state has the rows of the state that it replaces.
        for o, i in traced.donated:
            self._join(tuple(refs([program.outputs[o], program.inputs[i]])))

    def root(self, ref: Ref) -> Ref:
        """The value that stands for a value's group."""
        # Path halving.
        while (parent := self._parent.setdefault(ref, ref)) != ref:
            self._parent[ref] = ref = self._parent[parent]
        return ref

    def _join(self, together: tuple[Ref, ...]) -> None:
        for other in together[1:]:
            left, right = sorted((self.root(together[0]), self.root(other)))
            self._parent[right] = left

    def scan(self, root: Ref, scans: list[Equation]) -> LayerScan:
        """The LayerScan of a group that has these scans."""
        program = self._traced.program
        values = frozenset(r for r in self._parent if self.root(r) == root)
        length = min(s.params["length"] for s in scans)
        back = sum(map(is_backward, scans))
        stacked = (i for i in self._traced.state_inputs if program.inputs[i] in values)
        inputs = tuple(i for i in stacked if program.input_avals[i].shape[0] % length == 0)
        return LayerScan(length, len(scans) - back, back, inputs, values)


def all_values(program: FlatProgram) -> Iterator[tuple[Ref, Any]]:
    """The values of a program with their types, those of bodies too."""
    yield from program.avals()
    for equation in program.equations:
        for body in equation.bodies:
            yield from all_values(body)


# -- rows in dim 0 through one equation --------------------------------------------------------

# Reductions that devices may not be able to combine, but pieces can: what of two makes one.
_COMBINED: Mapping[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": lax.add, "reduce_max": lax.max, "reduce_min": lax.min, "reduce_prod": lax.mul,
    "reduce_and": lax.bitwise_and, "reduce_or": lax.bitwise_or, "reduce_xor": lax.bitwise_xor,
    "dot_general": lax.add,
}  # fmt: skip
# Of equations whose parameters speak of whole shapes: the one that says how many rows they make.
_SHAPES = {
    "broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes",
    "slice": "limit_indices", "dynamic_slice": "slice_sizes",
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Operands and results with the same rows in dim 0, by position; the rest has none.

    With `combine` the rows are reduced away: results of pieces combine to the whole result.
    """

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    combine: Callable[[Any, Any], Any] | None = None


def rows_through(equation: Equation) -> Rows | None:
    """The rows that an equation keeps apart; None for one that mixes them, or is not known.

    They are a factor of its rule that begins dim 0 wherever it stands: one that passes, and is in
    every result, or one that is summed (or the like), and is in none. A result may have a multiple
    of the rows of its operand, or a part, as a reshape's.
    """
    kind = equation.primitive.name
    facts = primitive(kind)
    if equation.bodies or (facts.local and kind not in _SHAPES) or not equation.results:
        return None
    if kind in _COMBINED and 0 in equation.params.get("axes", ()):
        return Rows((0,), combine=_COMBINED[kind])
    if not any((*equation.operand_shapes, *(a.shape for a in equation.result_avals))):
        return None
    if kind == "iota" and equation.params["dimension"] == 0:
        return None  # each row is its number
    # No rule of these asks for the type of an operand; keys are items like any other here.
    operands = [Value(f"%{i}", s, "f32") for i, s in enumerate(equation.operand_shapes)]
    results = tuple(Value("", *type_of(aval)) for aval in equation.result_avals)
    names = tuple(value.name for value in operands)
    rule = item_rule(Op(kind, names, results, plain_params(equation.params)), operands)
    begins = (_first(rule, dims) for dims in (*rule.operands, *rule.results))
    found = (_apart(rule, f, kind) for f in dict.fromkeys(begins) if f is not None)
    return next((rows for rows in found if rows is not None), None) if rule.known else None


def _first(rule: Rule, dims: Dims) -> int | None:
    """The factor that dim 0 of a tensor begins with."""
    if not dims or not dims[0]:
        return None
    major = rule.major(dims[0])
    return dims[0][0] if major is None else major


def _apart(rule: Rule, f: int, kind: str) -> Rows | None:
    """The rows that a factor counts, if it begins dim 0 wherever it stands."""
    factor, tensors = rule.factors[f], (*rule.operands, *rule.results)
    begins = [_first(rule, dims) == f for dims in tensors]
    later = (dim for b, dims in zip(begins, tensors, strict=True) for dim in dims[b:])
    sizes = [
        math.prod(rule.factors[g].size for g in dims[0])
        for b, dims in zip(begins, tensors, strict=True)
        if b
    ]
    if any(f in dim for dim in later) or factor.size not in sizes:
        return None
    count = len(rule.operands)
    operands = tuple(i for i, b in enumerate(begins[:count]) if b)
    results = tuple(i for i, b in enumerate(begins[count:]) if b)
    if factor.kind is Kind.PASS and len(results) == len(rule.results):
        return Rows(operands, results)
    if factor.kind is Kind.REDUCE and not results and kind in _COMBINED:
        return Rows(operands, combine=_COMBINED[kind])
    return None


def piece_params(equation: Equation, rows: int) -> dict[str, Any]:
    """The parameters of an equation whose first result has so many rows."""
    name = _SHAPES.get(equation.primitive.name)
    if name is None:
        return equation.params
    return {**equation.params, name: (rows, *equation.params[name][1:])}
