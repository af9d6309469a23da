"""Which dims of each value carry the batch, followed from the arguments through the rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.rule import Dim, Rule
from autopar.ir.values import Role, Value

_ALIASES = ("remat2", "checkpoint")
_BARRIER = "optimization_barrier"


class Part(NamedTuple):
    """A dim of a value, or a factor of an op, whose major part counts so many rows."""

    at: int
    rows: int


Parts = tuple[Part, ...]  # major to minor: rows that reshape(4, -1) split are in two dims


@dataclass(frozen=True)
class BatchTags:
    """The batch size, the argument it was read from, and where each value carries the batch."""

    size: int | None
    path: str
    parts: Mapping[str, Parts]

    def dims(self, name: str) -> Parts:
        """The dims of a value that carry the batch."""
        return self.parts.get(name, ())

    def factors(self, op: Op) -> Parts:
        """The factors of an op that carry the batch."""
        return () if op.rule is None else batch_factors(op.rule, op, self.parts)


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
    found = followed(graph, {i.value.name: (Part(0, size),) for i in carriers})
    return BatchTags(size, carriers[0].path, found)


def followed(graph: Graph, parts: Mapping[str, Parts]) -> Mapping[str, Parts]:
    """Some values' dims, and those of all values that they reach."""
    found = dict(parts)
    _follow(graph, found)
    return found


def _may_carry(value: Value) -> bool:
    return bool(value.shape) and not value.dtype.startswith("key")


def batch_factors(rule: Rule, op: Op, parts: Mapping[str, Parts]) -> Parts:
    """The factors of an op that carry the batch, by the first operand that does."""
    for operand, where in zip(op.operands, rule.operands, strict=True):
        held = parts.get(operand, ()) if isinstance(operand, str) else ()
        found = tuple(p for d, rows in held for p in _split(rule, where[d], rows))
        if found:
            return found
    return ()


def _split(rule: Rule, dim: Dim, rows: int) -> Iterator[Part]:
    """The factors of a dim that hold its rows: 12 rows of (4)(6) are 4 times 3."""
    for f in dim:
        size = rule.factors[f].size
        if size == 1:
            continue
        yield Part(f, min(rows, size))
        if rows <= size or rows % size:
            return
        rows //= size


def _merged(rule: Rule, dim: Dim, held: Mapping[int, int]) -> tuple[int, int] | None:
    """A dim's major factor and its rows, if that factor carries any."""
    major, rows = None, 1
    for f in dim:
        size = rule.factors[f].size
        if size == 1:
            continue
        if f not in held:
            break
        major = f if major is None else major
        rows *= held[f]
        if held[f] < size:
            break
    return None if major is None else (major, rows)


def _follow(graph: Graph, found: dict[str, Parts]) -> None:
    for op in graph.ops:
        if op.kind in _ALIASES:
            _through(op, found)
        elif op.kind == _BARRIER:
            _pass(op.operands, op.results, found)
        elif op.graphs:
            _through_loop(op, found)
        elif op.rule is not None:
            _through_rule(op, op.rule, found)


def _through_rule(op: Op, rule: Rule, found: dict[str, Parts]) -> None:
    factors = batch_factors(rule, op, found)
    held = dict(factors)
    order = {f: i for i, f in enumerate(held)}
    for result, where in zip(op.results, rule.results, strict=True):
        dims = [(m, d) for d, dim in enumerate(where) if (m := _merged(rule, dim, held))]
        dims.sort(key=lambda given: order[given[0][0]])
        parts = tuple(Part(d, rows) for (_, rows), d in dims) or tuple(_picked(op, rule, found))
        if parts:
            found[result.name] = parts


def _picked(op: Op, rule: Rule, found: Mapping[str, Parts]) -> Iterator[Part]:
    """Rows that are cut or looked up out of a batch, or written into one, are a batch too."""
    source = op.operands[op.kind == "dynamic_update_slice"] if op.operands else None
    held = found.get(source, ()) if isinstance(source, str) else ()
    shape = op.results[0].shape if op.results else ()
    if op.kind in ("dynamic_slice", "dynamic_update_slice", "slice"):
        yield from (Part(d, shape[d]) for d, _ in held if shape[d] > 1)
    elif op.kind == "gather" and held:
        indexed = {f for dim in rule.operands[1] for f in dim if rule.factors[f].size > 1}
        yield from (Part(d, shape[d]) for d, dim in enumerate(rule.results[0]) if indexed & {*dim})


def _pass(operands: Sequence[Operand], results: Sequence[Value], found: dict[str, Parts]) -> None:
    for operand, result in zip(operands, results, strict=True):
        if isinstance(operand, str) and operand in found:
            found[result.name] = found[operand]


def _through(op: Op, found: dict[str, Parts]) -> None:
    body = op.graphs[0]
    for given, operand in zip(body.inputs, op.operands, strict=True):
        if isinstance(operand, str) and operand in found:
            found[given.value.name] = found[operand]
    _follow(body, found)
    for result, inner in zip(op.results, body.outputs, strict=True):
        if isinstance(inner, str) and inner in found:
            found[result.name] = found[inner]


def _through_loop(op: Op, found: dict[str, Parts]) -> None:
    """Twice, as a carry may start without the batch (zeros) and get it in the body."""
    scan = op.kind == "scan"
    for _ in range(2):
        for b, body in enumerate(op.graphs):
            for i, given in enumerate(body.inputs):
                _enter(op, b, i, given.value.name, found, scan)
            _follow(body, found)
            for i, inner in enumerate(body.outputs):
                _leave(op, b, i, inner if isinstance(inner, str) else "", found, scan)


def _enter(op: Op, b: int, i: int, name: str, found: dict[str, Parts], scan: bool) -> None:
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
    held = found.get(operand, ()) if isinstance(operand, str) else ()
    if parts := tuple(Part(d - shift, rows) for d, rows in held if d >= shift):
        found[name] = parts


def _leave(op: Op, b: int, i: int, inner: str, found: dict[str, Parts], scan: bool) -> None:
    if inner not in found or (op.kind == "while" and b == 0):
        return
    carries = op.whole("num_carry") if scan else len(op.results)
    parts = found[inner]
    found[op.results[i].name] = parts if i < carries else _stacked(op, parts, found)
    body = op.graphs[b]
    if scan and i < carries:
        found.setdefault(body.inputs[op.whole("num_consts") + i].value.name, parts)
    elif op.kind == "while":
        found.setdefault(body.inputs[op.whole("body_nconsts") + i].value.name, parts)


def _stacked(op: Op, parts: Parts, found: Mapping[str, Parts]) -> Parts:
    """Slices one behind the other; as many rows as the trips take slices of, if they do."""
    inner = tuple(Part(d + 1, rows) for d, rows in parts)
    scanned = op.operands[op.whole("num_consts") + op.whole("num_carry") :]
    for held in _known(scanned, found):
        for place, part in enumerate(held):
            if part.at == 0:
                return (*inner[:place], part, *inner[place:])
    return inner


def _known(operands: Iterable[Operand], found: Mapping[str, Parts]) -> Iterator[Parts]:
    yield from (found[o] for o in operands if isinstance(o, str) and o in found)
