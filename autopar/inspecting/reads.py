"""Who reads a value, at the end of its casts and moves, and how it comes about, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.inspecting.reshardable_unit import Listing
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.naming import RENAMING, Names, over, place_of, spec
from autopar.ir.paths import common_path, unnumbered
from autopar.ir.sharding import Sharding
from autopar.ir.spmd import Block, Collective, Fence, LocalOp, Loop, Move
from autopar.ir.text import show_bytes, show_seconds
from autopar.rules import HEAVY

_SHOWN = 5
_FAR = 200  # values looked at from an argument's new value back to its gradient
_REGIONS = ("forward", "backward", "update")


@dataclass(frozen=True)
class Reader:
    """An op that reads a value in some sharding, after the collectives that brought it there."""

    op: Op
    sharding: Sharding
    via: tuple[Collective, ...]
    runs: int


def reads(listings: Sequence[Listing], name: str) -> tuple[str, ...]:
    """A sentence for each way in which a value is read, forward first, heavy ops first."""
    groups: dict[tuple[object, ...], list[Reader]] = {}
    waiting = [name]
    for form in waiting:  # what one part makes of it, another may read
        for listing in listings:
            graph, block = listing.graph, listing.program.block
            for reader in _readers(graph, block, form, (), listing.runs):
                groups.setdefault(_alike(reader), []).append(reader)
            # Casts and the like of it that leave the graph.
            renamed = (op for op in graph.ops if op.kind in RENAMING and form in op.operands)
            names = (op.results[0].name for op in renamed)
            waiting += [n for n in names if n in graph.outputs and n not in waiting]
    order = sorted(groups.values(), key=_weight)
    sentences = [_sentence(group) for group in order[:_SHOWN]]
    rest = sum(len(g) for g in order[_SHOWN:])
    return (*sentences, *([f"{rest} more ops read it"] if rest else ()))


def _alike(reader: Reader) -> tuple[object, ...]:
    """The key that readers of one sentence share; of the update only how it is read."""
    op, via = reader.op, tuple((c.kind, c.axes, c.nbytes) for c in reader.via)
    if op.origin.region == "update" and op.kind not in HEAVY:
        return "update", reader.sharding, via
    return op.kind, op.origin.region, unnumbered(op.origin.module), reader.sharding, via


def _weight(group: Sequence[Reader]) -> tuple[int, int]:
    op = group[0].op
    region = op.origin.region
    return _REGIONS.index(region) if region in _REGIONS else len(_REGIONS), -op.flops


def _readers(
    graph: Graph, block: Block, name: str, via: tuple[Collective, ...], runs: int
) -> Iterator[Reader]:
    """Readers of a value in a block and in the loops of it; casts and the like are gone through."""
    for step in block.instructions:
        if isinstance(step, Move) and step.source == name:
            yield from _readers(graph, block, step.result, (*via, *step.collectives), runs)
        elif isinstance(step, Fence) and name in step.sources:
            result = step.results[step.sources.index(name)]
            yield from _readers(graph, block, result, via, runs)
        elif isinstance(step, LocalOp) and name in step.operands:
            op = graph.op_at(step.equation)
            if op.kind in RENAMING and op.origin.region != "update":
                yield from _readers(graph, block, step.results[0], via, runs)
            else:
                sharding = step.operand_shardings[step.operands.index(name)]
                yield Reader(op, sharding, via, runs)
        elif isinstance(step, Loop) and name in step.operands:
            yield from _looped(graph, step, name, via, runs)


def _looped(
    graph: Graph, loop: Loop, name: str, via: tuple[Collective, ...], runs: int
) -> Iterator[Reader]:
    """Readers in the bodies of a loop; what chooses a branch is read by the loop itself."""
    op = graph.op_at(loop.equation)
    assert op.control_flow is not None
    places = op.control_flow.operands[loop.operands.index(name)].inputs
    if not places:
        yield Reader(op, Sharding(()), via, runs)
    for b, i in places:
        body = loop.bodies[b]
        yield from _readers(graph, body, body.inputs[i], via, runs * loop.runs)


def _sentence(group: Sequence[Reader]) -> str:
    first, count = group[0], len(group)
    op = first.op
    if op.origin.region == "update" and op.kind not in HEAVY:
        who = "the update reads"
    else:
        alike = unnumbered(place_of(op))
        places = {place_of(r.op) for r in group}
        at = common_path(sorted(p for p in places if unnumbered(p) == alike))
        times = f"{count} " if count > 1 else ""
        who = f"{times}{op.origin.region} {op.kind} ({at}) read{'s' if count == 1 else ''}"
    how = "it replicated" if first.sharding.is_replicated else f"it as {spec(first.sharding)}"
    return f"{who} {how} {_after(first.via)}"


def _after(via: Sequence[Collective]) -> str:
    if not via:
        return "without communication"
    steps = (
        f"{c.kind} over {over(c.axes)} ({show_bytes(c.nbytes)}, {show_seconds(c.seconds)})"
        for c in via
    )
    return f"after {', then '.join(steps)}"


# -- gradients ---------------------------------------------------------------------------------


def arrival(listings: Sequence[Listing], name: str, names: Names) -> Iterator[str]:
    """Sentences on how a value comes to be: by sums, or as an argument's gradient."""
    for listing in listings:
        graph, block = listing.graph, listing.program.block
        for step in block.instructions:
            if isinstance(step, Move) and step.result == name and step.collectives:
                yield f"it is made {_after(step.collectives)}"
        index = next((k for k, i in enumerate(graph.inputs) if i.value.name == name), -1)
        output = next((o for o, i in graph.donated if i == index), None)
        made = block.outputs[output] if output is not None else None
        sent = _sent(graph, block, made) if made is not None and made != name else None
        if sent is not None:
            made = names.of(sent.value.name)
            yield f"its new value is made {_after(sent.collectives)} of {made}"


def _sent(graph: Graph, block: Block, name: str) -> Move | None:
    """The first move with collectives on the way back through element-wise work."""
    makers = {r: s for s in block.instructions if isinstance(s, LocalOp) for r in s.results}
    moves = {s.result: s for s in block.instructions if isinstance(s, Move)}
    waiting = [name]
    for value in waiting:
        move, run = moves.get(value), makers.get(value)
        if len(waiting) > _FAR:
            return None
        before: tuple[str | None, ...] = ()
        if move is not None:
            if move.collectives:
                return move
            before = (move.source,)
        elif run is not None and graph.op_at(run.equation).kind not in HEAVY:
            op = graph.op_at(run.equation)
            pairs = zip(run.operands, op.operands, strict=True)
            before = tuple(n for n, o in pairs if _count(graph, o) == op.results[0].item_count)
        waiting += [n for n in before if n is not None and n not in waiting]
    return None


def _count(graph: Graph, operand: Operand) -> int:
    if isinstance(operand, str):
        return graph.nested_values[operand].item_count
    return math.prod(operand.shape)
