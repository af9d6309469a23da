"""Scans over layers, whose slices derive from the step's state; and rows through equations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax import lax

from autopar.frontend.trace.graph import is_backward
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
        """The refusal of a group that has these scans."""
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


# -- rows through an equation that does the same to every row of dim 0 ----------------------------


_POINTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e "
    "bitcast_convert_type cbrt ceil clamp complex conj convert_element_type copy copy_p cos cosh "
    "digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow "
    "is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not or "
    "population_count pow real reduce_precision rem round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan "
    "tanh xor".split()
)
_ALONG_AXIS = {
    "cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis",
    "cumlogsumexp": "axis", "concatenate": "dimension", "split": "axis", "sort": "dimension",
}  # fmt: skip
_REDUCTIONS: Mapping[str, Callable[[Any, Any], Any] | None] = {
    "reduce_sum": lax.add, "reduce_max": lax.max, "reduce_min": lax.min, "reduce_prod": lax.mul,
    "reduce_and": lax.bitwise_and, "reduce_or": lax.bitwise_or, "reduce_xor": lax.bitwise_xor,
    "argmax": None, "argmin": None,
}  # fmt: skip
# What a parameter of a piece's own equation says of its rows.
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

    A result may have a multiple of the rows of its operand, or a part, as a reshape's.
    """
    kind = equation.primitive.name
    shapes = equation.operand_shapes
    if kind in _POINTWISE:
        return _pointwise(equation)
    if kind in _ALONG_AXIS:
        return _all(equation) if equation.params[_ALONG_AXIS[kind]] else None
    if kind in _REDUCTIONS:
        if 0 not in equation.params["axes"]:
            return _all(equation)
        combine = _REDUCTIONS[kind]
        return Rows((0,), combine=combine) if combine is not None else None
    rule = _RULES.get(kind)
    if rule is None or not shapes:
        return Rows((), (0,)) if kind == "iota" and equation.params["dimension"] else None
    return rule(equation)


def piece_params(equation: Equation, rows: int) -> dict[str, Any]:
    """The parameters of an equation whose first result has so many rows."""
    name = _SHAPES.get(equation.primitive.name)
    if name is None:
        return equation.params
    return {**equation.params, name: (rows, *equation.params[name][1:])}


def _all(equation: Equation) -> Rows:
    return Rows(tuple(range(len(equation.operands))), tuple(range(len(equation.results))))


def _pointwise(equation: Equation) -> Rows | None:
    """Operands are scalars, or of the result's rank; what is 1 in size is repeated."""
    shape = equation.result_avals[0].shape
    operands = [(i, s[0]) for i, s in enumerate(equation.operand_shapes) if s]
    known = all(len(s) in (0, len(shape)) for s in equation.operand_shapes)
    same = tuple(i for i, size in operands if size == shape[0])
    return Rows(same, (0,)) if known and same else None


def _broadcast(equation: Equation) -> Rows | None:
    dims, (given,) = equation.params["broadcast_dimensions"], equation.operand_shapes[:1]
    made = equation.params["shape"]
    if not made:
        return None
    source = dims.index(0) if 0 in dims else None
    if source is None or given[source] != made[0]:
        return Rows((), (0,))
    return Rows((0,), (0,)) if source == 0 else None


def _reshape(equation: Equation) -> Rows | None:
    given, made = equation.operand_shapes[0], equation.params["new_sizes"]
    if not given or not made or not math.prod(given) or equation.params.get("dimensions"):
        return None
    return Rows((0,), (0,)) if given[0] % made[0] == 0 or made[0] % given[0] == 0 else None


def _first_dim_stays(equation: Equation) -> Rows | None:
    params, given = equation.params, equation.operand_shapes[0]
    match equation.primitive.name:
        case "transpose":
            stays = bool(given) and params["permutation"][0] == 0
        case "squeeze" | "rev":
            stays = 0 not in params["dimensions"]
        case "pad":
            stays = params["padding_config"][0] == (0, 0, 0)
        case "dynamic_slice":
            stays = params["slice_sizes"][0] == given[0]
        case _:
            ends = params["start_indices"][0], params["limit_indices"][0]
            stays = ends == (0, given[0]) and (params["strides"] or (1,))[0] == 1
    return Rows((0,), (0,)) if stays else None


def _dot(equation: Equation) -> Rows | None:
    (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
    if 0 in left_batch:
        return Rows((0, 1), (0,)) if left_batch[0] == 0 == right_batch[0] else None
    if 0 in left:
        return Rows((0, 1), combine=lax.add) if right[left.index(0)] == 0 else None
    ranks = [len(s) for s in equation.operand_shapes]
    if left_batch or not any(ranks):
        return None
    # The free dims of the first operand come first in the result.
    if ranks[0] > len(left):
        return Rows((0,), (0,))
    return Rows((1,), (0,)) if ranks[1] > len(right) and 0 not in right else None


_RULES: Mapping[str, Callable[[Equation], Rows | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "dot_general": _dot,
    **dict.fromkeys(
        ("transpose", "squeeze", "rev", "pad", "slice", "dynamic_slice"), _first_dim_stays
    ),
}
