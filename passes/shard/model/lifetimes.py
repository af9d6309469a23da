"""When each value is held over the step, by the rules that the listing is weighed by."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autopar.cost.spans import Span, stored_spans
from autopar.ir.control_flow import LOOPS
from autopar.ir.graph import Graph, Op
from autopar.ir.values import Value
from autopar.passes.shard.model.decisions import (
    Place,
    Reading,
    ReadKind,
    Rematerializable,
    Standing,
)


def materialized(reading: Reading) -> frozenset[str]:
    """Values that are written to memory: inputs, outputs, and what is not fused away.

    A value that element-wise work makes and only element-wise work of the same region reads is
    fused by every XLA back end.
    """
    kept = {i.value.name for i in reading.graph.inputs}
    kept.update(o for o, target, _ in reading.outputs if isinstance(o, str) and target is None)
    fusible = _fusible(reading)
    for read in reading.reads:
        region = read.region if read.kind is ReadKind.GROUP else None
        for name in _sources(read.standing, read.value):
            if region is None or fusible.get(name) != region:
                kept.add(name)
    return frozenset(kept)


def read_by_groups(reading: Reading) -> Iterator[str]:
    """Values that element-wise work reads."""
    for read in reading.reads:
        if read.kind is ReadKind.GROUP:
            yield from _sources(read.standing, read.value)


def _fusible(reading: Reading) -> dict[str, str]:
    """Values that element-wise ops make, with the ops' regions."""
    found: dict[str, str] = {}
    for path in reading.followers:
        op = reading.graph.op_at(path)
        found.update((r.name, op.origin.region) for r in op.results)
    return found


def _sources(standing: Standing, value: Value) -> Iterator[str]:
    if isinstance(standing, Place):
        yield value.name
    elif isinstance(standing, Rematerializable):
        for inner, held in zip(standing.operands, standing.operand_values, strict=True):
            yield from _sources(inner, held)


class Held(NamedTuple):
    """A value of the whole step, under the value that stands for it, and when it is there."""

    name: str
    value: Value
    place: Place
    first: int
    last: int


def lifetimes(reading: Reading) -> Iterator[Held]:
    """Everything that is held and when; inputs are held over the whole step.

    Every value of the whole step has its own time, though look-alikes share a place. Outputs
    that return to a donated input reuse its buffer and are not counted again.
    """
    whole, homes = reading.merged.whole, reading.merged.homes
    returned = {whole.outputs[o] for o, _ in whole.donated} - {i.value.name for i in whole.inputs}
    held = {
        home: (reading.values[home], standing)
        for home, standing in reading.standings.items()
        if isinstance(standing, Place) and home in reading.values
    }
    for name, (first, last) in _timeline(whole).items():
        item = held.get(homes[name])
        if item is not None and name not in returned:
            yield Held(name, *item, first, last)


def _timeline(graph: Graph) -> Mapping[str, Span]:
    """When each stored value is held; a loop lasts as long as its bodies, one after the other."""
    outer = stored_spans(graph)
    inner: list[tuple[int, Mapping[str, Span]]] = []
    for op in _loops(graph):
        at = min((outer[r.name][0] for r in op.results if r.name in outer), default=None)
        if at is not None:
            inner += [(at, _timeline(body)) for body in op.graphs]
    inner.sort(key=lambda given: given[0])
    return dict(_nested(outer, inner)) if inner else outer


def _nested(
    outer: Mapping[str, Span], inner: Sequence[tuple[int, Mapping[str, Span]]]
) -> Iterator[tuple[str, Span]]:
    """Spans around loops stretch by what the bodies take, and those of the bodies fit in."""
    lengths = [1 + max((last for _, last in spans.values()), default=-1) for _, spans in inner]
    starts = [at for at, _ in inner]
    room = [0, *itertools.accumulate(lengths)]
    for name, (first, last) in outer.items():
        yield (
            name,
            (
                first + room[bisect.bisect_left(starts, first)],
                last + room[bisect.bisect_right(starts, last)],
            ),
        )
    for k, (at, spans) in enumerate(inner):
        offset = at + room[k] + 1
        yield from (
            (name, (first + offset, last + offset)) for name, (first, last) in spans.items()
        )


def _loops(graph: Graph) -> Iterator[Op]:
    """The loops of a graph and of the remat bodies in it, but not those within loops."""
    for op in graph.ops:
        if op.kind in LOOPS:
            yield op
        else:
            for body in op.graphs:
                yield from _loops(body)
