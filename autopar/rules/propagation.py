"""Follows dims through ops by their rules: where the rows of a value are in what is made of it.

A dim is followed factor by factor. With the rule (b k), (k n) -> (b n) of a product, a batch in
dim 0 of the left operand is the factor b, and so dim 0 of the result; a reshape may part rows into
several factors, of which each dim shows the ones that it begins with:

    reshape f32[12, 8] -> f32[4, 3, 8]     (a b) c -> a b c      12 rows are 4 rows of 3

Bodies are followed through their ports (`autopar.ir.control_flow`). Where a rule keeps rows whole,
as it depends on what is read, or they are cut or joined, a primitive's row says whose become those
of its results: `picks` and `regroups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.ir.control_flow import ControlFlow, PortKind
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.rule import Dim, Rule
from autopar.ir.values import Role, Value
from autopar.rules.table import primitive, rule_for

_BARRIER = "optimization_barrier"


class Part(NamedTuple):
    """A dim of a value, or a factor of an op, whose major part counts so many rows."""

    at: int
    rows: int


Parts = tuple[Part, ...]  # major to minor: rows that reshape(4, -1) split are in two dims


def propagate(graph: Graph, parts: Mapping[str, Parts]) -> Mapping[str, Parts]:
    """The dims of some values, and those of all values that they reach; ops must carry rules."""
    found = dict(parts)
    _follow(graph, found)
    return found


def factors_of(rule: Rule, op: Op, parts: Mapping[str, Parts]) -> Parts:
    """The factors of an op that hold the parts of its operands, by the first operand with any."""
    for operand, where in zip(op.operands, rule.operands, strict=True):
        held = parts.get(operand, ()) if isinstance(operand, str) else ()
        found = tuple(p for d, rows in held for p in _split(rule, where[d], rows))
        if found:
            return found
    return ()


def item_rule(op: Op, operands: Sequence[Value]) -> Rule:
    """The op's rule where random keys, which no device may share, are items like any other."""
    if op.rule is not None and not any(v.dtype.startswith("key") for v in (*operands, *op.results)):
        return op.rule
    plain = replace(op, results=tuple(map(_as_number, op.results)))
    return rule_for(plain, [_as_number(v) for v in operands])


def _as_number(value: Value) -> Value:
    return replace(value, dtype="u32") if value.dtype.startswith("key") else value


# -- through one op --------------------------------------------------------------------------


def _split(rule: Rule, dim: Dim, rows: int) -> Iterator[Part]:
    """The factors of a dim that hold its rows: 12 rows of (4)(6) are 4 times 3."""
    # From the major factor inwards: each takes as many rows as it has, and leaves the rest to those
    # within it.
    for f in dim:
        size = rule.factors[f].size
        if size == 1:
            continue
        yield Part(f, min(rows, size))
        if rows <= size or rows % size:
            return
        rows //= size


def _merged(rule: Rule, dim: Dim, held: Mapping[int, int]) -> Part | None:
    """A dim's major factor and its rows, if that factor holds any."""
    # The other way round: factors from the major one on, as long as each is wholly rows.
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
    return None if major is None else Part(major, rows)


def _through_rule(op: Op, rule: Rule, found: dict[str, Parts]) -> None:
    # 1. The factors that hold rows of the operands; 2. the dims of each result that begin with such
    #    factors, in their order; 3. else what picks rows by what it reads.
    if not any(name in found for name in op.value_operands):
        return
    held = dict(factors_of(rule, op, found))
    order = {f: i for i, f in enumerate(held)}
    for result, where in zip(op.results, rule.results, strict=True):
        dims = [(m, d) for d, dim in enumerate(where) if (m := _merged(rule, dim, held))]
        dims.sort(key=lambda given: order[given[0].at])
        parts = tuple(Part(d, m.rows) for m, d in dims)
        parts = parts or tuple(_picked(op, rule, result.shape, where, found))
        if parts:
            found[result.name] = parts


def _picked(
    op: Op, rule: Rule, shape: tuple[int, ...], where: Sequence[Dim], found: Mapping[str, Parts]
) -> Iterator[Part]:
    # Rows cut or looked up out of a batch, joined with it, or written into one, are a batch too.
    facts = primitive(op.kind)
    picked = () if facts.picks is None else (op.operands[facts.picks],)
    sources = op.operands if facts.regroups else picked
    held = next((found[s] for s in sources if isinstance(s, str) and s in found), ())
    if op.kind == "gather" and held:
        indexed = {f for dim in rule.operands[1] for f in dim if rule.factors[f].size > 1}
        yield from (Part(d, shape[d]) for d, dim in enumerate(where) if indexed & {*dim})
    elif op.kind != "gather":
        yield from (Part(d, shape[d]) for d, _ in held if shape[d] > 1)


# -- through a graph, and the bodies in it ---------------------------------------------------


def _follow(graph: Graph, found: dict[str, Parts]) -> None:
    for op in graph.ops:
        if op.control_flow is not None:
            _through_bodies(op, op.control_flow, found)
        elif op.kind == _BARRIER:
            for operand, result in zip(op.operands, op.results, strict=True):
                _pass(operand, result.name, found)
        elif op.rule is not None:
            _through_rule(op, op.rule, found)


def _through_bodies(op: Op, flow: ControlFlow, found: dict[str, Parts]) -> None:
    """Twice where there are carries: one may start without rows (zeros) and get them inside."""
    for _ in range(1 if flow.is_remat else 2):
        for b, body in enumerate(op.graphs):
            for port, given in zip(flow.inputs[b], body.inputs, strict=True):
                if port.operand is not None:
                    _pass(op.operands[port.operand], given.value.name, found, -port.by_row)
            _follow(body, found)
            for port, left in zip(flow.outputs[b], body.outputs, strict=True):
                # To the result, and to the next trip where its start had no rows.
                if port.result is None or not isinstance(left, str) or left not in found:
                    continue
                name = op.results[port.result].name
                _pass(left, name, found, port.by_row)
                if port.by_row:
                    found[name] = _stacked(op, flow, found[name], found)
                for to, i in port.inputs:
                    found.setdefault(op.graphs[to].inputs[i].value.name, found[left])


def _pass(operand: Operand, name: str, found: dict[str, Parts], shift: int = 0) -> None:
    """Another name for an operand, with so many dims more before the others."""
    if not isinstance(operand, str) or operand not in found:
        return
    if parts := tuple(Part(d + shift, rows) for d, rows in found[operand] if d + shift >= 0):
        found[name] = parts


def _stacked(op: Op, flow: ControlFlow, inner: Parts, found: Mapping[str, Parts]) -> Parts:
    """Slices one behind the other; as many rows as the trips take slices of, if they do."""
    for operand in flow.operands_of(op.operands, PortKind.SLICED):
        for place, part in enumerate(found.get(operand, ()) if isinstance(operand, str) else ()):
            if part.at == 0:
                return (*inner[:place], part, *inner[place:])
    return inner


# -- the batch -------------------------------------------------------------------------------------


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
        return () if op.rule is None else factors_of(op.rule, op, self.parts)


def tag_batch(graph: Graph) -> BatchTags:
    """Follow the first dim of the batch arguments through the graph.

    The batch size is the commonest leading dim among batch arguments, the first of equals;
    arguments with another one (a table, a key) carry none.
    """
    batch = [i for i in graph.inputs if i.role is Role.BATCH]
    given = [i for i in batch if i.value.shape and not i.value.dtype.startswith("key")]
    sizes = [i.value.shape[0] for i in given]
    if not sizes:
        return BatchTags(None, "", {})
    size = max(sizes, key=lambda n: (sizes.count(n), -sizes.index(n)))
    carriers = [i for i in given if i.value.shape[0] == size]
    found = propagate(graph, {i.value.name: (Part(0, size),) for i in carriers})
    return BatchTags(size, carriers[0].path, found)
