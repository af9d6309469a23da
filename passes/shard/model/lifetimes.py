"""Lifetimes of values over the step, by the rules that weigh a listing.

Before any plan is made they are those of the step that lies whole on one device. The solver's
memory rows are read off that listing by `autopar.cost.memory`, as a plan's peak is read off the
plan's own: the same kernels, the same order, the same lives.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from autopar.cluster.chip import Platform
from autopar.cost.liveness import BlockSpans, Span
from autopar.ir.graph import Graph
from autopar.ir.values import Value
from autopar.passes.base import Holding
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


class Lifetime(NamedTuple):
    """A value of the whole step, under the value that stands for it, and when it is there.

    Of what a loop is given, `copies` says how many times the value's bytes a copy of it holds that
    is made for the loop, in another sharding than it lies in; 0 is the value itself.
    """

    name: str
    value: Value
    place: Place
    first: int
    last: int
    copies: int = 0


def lifetimes(
    reading: Reading, platform: Platform = "gpu", held_longer: Mapping[str, Holding] | None = None
) -> Iterator[Lifetime]:
    """Everything that is held and when; inputs are held over the whole step.

    So is, of what is `held_longer`, what is held throughout. Of what several microbatches hold at
    once, others keep theirs until the last op of the loop that reads any.

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
    timeline = _Timeline(reading.spans(platform))
    spans = timeline.spans
    longer = held_longer or {}
    flying = [n for n, h in longer.items() if h.times > 1 and not h.throughout and n in spans]
    spans.update(dict.fromkeys(flying, (0, max((spans[n][1] for n in flying), default=0))))
    always = [n for n, h in longer.items() if h.throughout]
    always += [i.value.name for i in whole.inputs]
    spans.update(dict.fromkeys(always, (0, timeline.end)))
    entries = dict(_entries(whole))
    for name, (first, last) in spans.items():
        item = held.get(homes.get(name, ""))
        if item is not None and name not in returned and not _is_outside(entries.get(name)):
            yield Lifetime(name, *item, first, last)
    for name, entry in entries.items():
        item = held.get(homes[name])
        if item is not None and name in timeline.loops and entry.copies:
            yield Lifetime(name, *item, *timeline.loops[name], entry.copies)


class _Entry(NamedTuple):
    """An input of a loop's body: a whole operand or a slice of one.

    A copy that is made for the loop holds `copies` times its bytes. A carry has none: the loop's
    results take over its buffer.
    """

    is_slice: bool
    copies: int


def _is_outside(entry: _Entry | None) -> bool:
    return entry is not None and not entry.is_slice


def _entries(graph: Graph) -> Iterator[tuple[str, _Entry]]:
    """The inputs of the bodies of all loops."""
    for op in graph.ops:
        for body in op.graphs:
            yield from _entries(body)
        flow = op.control_flow
        if flow is None or flow.is_remat:
            continue
        for port in flow.operands:
            copies = 0 if port.is_carry else flow.trips if port.by_row else 1
            for n, (b, at) in enumerate(port.inputs):  # branches share what they are given
                name = op.graphs[b].inputs[at].value.name
                yield name, _Entry(port.by_row, copies if n == 0 else 0)


class _Timeline:
    """Spans of a step and of its loops' bodies on one axis of time.

    A loop lasts as long as its bodies, one after the other: what is held around it stretches.

        kernels of the step   0 1 [loop at 2] 3        bodies: a (2 kernels), b (1 kernel)
        time                  0 1  2 | 3 4 | 5  6
                                   loop  a   b  3
    """

    def __init__(self, block: BlockSpans) -> None:
        self.spans: dict[str, Span] = {}
        self.loops: dict[str, Span] = {}  # by what a body is given, when its loop runs
        self.end = max(0, self._lay(block, 0) - 1)

    def _lay(self, block: BlockSpans, start: int) -> int:
        """Lay a block out from a time on; gives the time after it."""
        lengths = [_length(body) for _, body in block.bodies]
        starts = [at for at, _ in block.bodies]
        room = [0, *itertools.accumulate(lengths)]
        for name, (first, last) in block.spans.items():
            opens = start + first + room[bisect.bisect_left(starts, first)]
            self.spans[name] = opens, start + last + room[bisect.bisect_right(starts, last)]
        for k, (at, body) in enumerate(block.bodies):
            begins = start + at + room[k]
            ends = self._lay(body, begins + 1) - 1
            self.loops.update(dict.fromkeys(body.inputs, (begins, ends)))
        return start + block.length + room[-1]


def _length(block: BlockSpans) -> int:
    return block.length + sum(_length(body) for _, body in block.bodies)
