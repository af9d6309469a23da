"""Which dim of each value carries the batch, followed from the arguments through the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.rule import Rule
from autopar.ir.values import Role, Value

_ALIASES = ("remat2", "checkpoint")
_BARRIER = "optimization_barrier"


@dataclass(frozen=True)
class BatchTags:
    """The batch size, the argument it was read from, and the batch dim of each value."""

    size: int | None
    path: str
    dims: Mapping[str, int]

    def dim(self, name: str) -> int | None:
        """The dim of a value that carries the batch."""
        return self.dims.get(name)

    def factor(self, op: Op) -> int | None:
        """The factor of an op that carries the batch."""
        return None if op.rule is None else batch_factor(op.rule, op, self.dims)


def tag_batch(graph: Graph) -> BatchTags:
    """Follow the first dim of the batch arguments through the graph.

    The batch size is the commonest leading dim among batch arguments, the first of equals;
    arguments with another one (a table, a key) carry none.
    """
    given = [i for i in graph.inputs if i.role is Role.BATCH and _may_carry(i.value)]
    sizes = [i.value.shape[0] for i in given]
    if not sizes:
        return BatchTags(None, "", {})
    size = max(sizes, key=lambda n: (sizes.count(n), -sizes.index(n)))
    carriers = [i for i in given if i.value.shape[0] == size]
    found = followed(graph, {i.value.name: 0 for i in carriers})
    return BatchTags(size, carriers[0].path, found)


def followed(graph: Graph, dims: Mapping[str, int]) -> Mapping[str, int]:
    """Some values' dims, and those of all values that they reach."""
    found = dict(dims)
    _follow(graph, found)
    return found


def _may_carry(value: Value) -> bool:
    return bool(value.shape) and not value.dtype.startswith("key")


def batch_factor(rule: Rule, op: Op, dims: Mapping[str, int]) -> int | None:
    """The factor of an op that carries the batch."""
    for operand, where in zip(op.operands, rule.operands, strict=True):
        d = dims.get(operand) if isinstance(operand, str) else None
        if d is not None and where[d]:
            return next((f for f in where[d] if rule.factors[f].size > 1), None)
    return None


def _follow(graph: Graph, found: dict[str, int]) -> None:
    for op in graph.ops:
        if op.kind in _ALIASES:
            _through(op, found)
        elif op.kind == _BARRIER:
            _pass(op.operands, op.results, found)
        elif op.graphs:
            _through_loop(op, found)
        elif op.rule is not None:
            _through_rule(op, op.rule, found)


def _through_rule(op: Op, rule: Rule, found: dict[str, int]) -> None:
    factor = batch_factor(rule, op, found)
    if factor is None:
        return
    for result, where in zip(op.results, rule.results, strict=True):
        for d, dim in enumerate(where):
            major = next((f for f in dim if rule.factors[f].size > 1), None)
            if major == factor:
                found[result.name] = d


def _pass(operands: Sequence[Operand], results: Sequence[Value], found: dict[str, int]) -> None:
    for operand, result in zip(operands, results, strict=True):
        if isinstance(operand, str) and operand in found:
            found[result.name] = found[operand]


def _through(op: Op, found: dict[str, int]) -> None:
    body = op.graphs[0]
    for given, operand in zip(body.inputs, op.operands, strict=True):
        if isinstance(operand, str) and operand in found:
            found[given.value.name] = found[operand]
    _follow(body, found)
    for result, inner in zip(op.results, body.outputs, strict=True):
        if isinstance(inner, str) and inner in found:
            found[result.name] = found[inner]


def _through_loop(op: Op, found: dict[str, int]) -> None:
    """Twice, as a carry may start without the batch (zeros) and get it in the body."""
    scan = op.kind == "scan"
    for _ in range(2):
        for b, body in enumerate(op.graphs):
            for i, given in enumerate(body.inputs):
                _enter(op, b, i, given.value.name, found, scan)
            _follow(body, found)
            for i, inner in enumerate(body.outputs):
                _leave(op, b, i, inner if isinstance(inner, str) else "", found, scan)


def _enter(op: Op, b: int, i: int, name: str, found: dict[str, int], scan: bool) -> None:
    if scan:
        operand, fixed = op.operands[i], op.whole("num_consts") + op.whole("num_carry")
        shift = 1 if i >= fixed else 0
    elif op.kind == "while":
        tests, bodies = op.whole("cond_nconsts"), op.whole("body_nconsts")
        first = tests if b == 1 else 0
        own = tests if b == 0 else bodies
        operand, shift = op.operands[first + i if i < own else tests + bodies + i - own], 0
    else:
        operand, shift = op.operands[i + 1], 0
    if isinstance(operand, str) and operand in found and found[operand] >= shift:
        found[name] = found[operand] - shift


def _leave(op: Op, b: int, i: int, inner: str, found: dict[str, int], scan: bool) -> None:
    if inner not in found or (op.kind == "while" and b == 0):
        return
    carries = op.whole("num_carry") if scan else len(op.results)
    found[op.results[i].name] = found[inner] + (1 if i >= carries else 0)
    body = op.graphs[b]
    if scan and i < carries:
        found.setdefault(body.inputs[op.whole("num_consts") + i].value.name, found[inner])
    elif op.kind == "while":
        found.setdefault(body.inputs[op.whole("body_nconsts") + i].value.name, found[inner])
