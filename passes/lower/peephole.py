"""Rewrites of a straight line of instructions that send less and change no value.

XLA makes the same of all-reduces and reduce-scatters by itself, so without them a plan would
count what no device sends.

    `combine_once`      all-reduce(a) + all-reduce(b)        ->  all-reduce(a + b)
    `move_once`         a -> b -> c, b read by nothing else  ->  a -> c
    `merge_scatters`    all-reduce, then a slice of it       ->  reduce-scatter
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from autopar.cost.reshard import Resharder, Route
from autopar.ir.sharding import MeshShape
from autopar.ir.sharding_plan import OpPath
from autopar.ir.spmd import (
    COLLECTIVES,
    Collective,
    Fence,
    Instruction,
    LocalOp,
    Loop,
    Move,
    MoveStep,
)


def combine_once(
    steps: Sequence[Instruction], outputs: Sequence[str | None], sums: Collection[OpPath]
) -> list[Instruction]:
    """Two partial sums that are only added to each other are added first, and combined then.

    `sums` are the ops that add. Equal moves must take both operands from partial sums; the result
    may itself be an operand of the next.
    """
    uses = _uses(steps, outputs)
    moves: dict[str, Move] = {}
    dropped: set[str] = set()
    kept: list[Instruction] = []
    for step in steps:
        made: Sequence[Instruction] = (step,)
        # The sum is made of what the two moves start from; they are dropped, and one follows it.
        if isinstance(step, LocalOp) and step.equation in sums and _alike(step, moves, uses):
            operands, (result,) = [name for name in step.operands if name], step.results
            one, other = (moves[name] for name in operands)
            dropped.update(operands)
            summed, partial = f"{result}.partial", one.before
            value = replace(one.value, name=result)
            made = (
                LocalOp(
                    step.equation, (one.source, other.source), (summed,), (partial,) * 2, (partial,)
                ),
                replace(other, value=value, source=summed, result=result, repeat=0),
            )
        kept += made
        moves.update((m.result, m) for m in made if isinstance(m, Move))
    return [s for s in kept if not (isinstance(s, Move) and s.result in dropped)]


def move_once(
    steps: Sequence[Instruction],
    outputs: Sequence[str | None],
    mesh: MeshShape,
    resharder: Resharder,
) -> list[Instruction]:
    """Join two moves of one value into one, if the second makes no larger a piece."""
    uses = _uses(steps, outputs)
    first = {s.result: at for at, s in enumerate(steps) if isinstance(s, Move)}
    kept: list[Instruction | None] = list(steps)
    for at, step in enumerate(steps):
        if not isinstance(step, Move) or uses[step.source] != 1 or step.source not in first:
            continue
        earlier = kept[first[step.source]]
        if not isinstance(earlier, Move) or not earlier.combiner == step.combiner == "sum":
            continue
        # If c were larger than b, the detour over b would send less.
        shape = earlier.value.shape
        items, later = (math.prod(m.after.shard_shape(shape, mesh)) for m in (earlier, step))
        if later <= items:
            route = merge_scatters(resharder.route(earlier.value, earlier.before, step.after))
            kept[at] = None
            kept[first[step.source]] = replace(
                step, value=earlier.value, source=earlier.source, before=earlier.before,
                steps=route.steps, collectives=route.collectives,
            )  # fmt: skip
            first[step.result] = first[step.source]
    return [s for s in kept if s is not None]


def merge_scatters(route: Route) -> Route:
    """A route in which an all-reduce that is sliced at once is a reduce-scatter, as to XLA.

    It takes no longer than the pair that was chosen.
    """
    steps: list[MoveStep] = []
    moved: list[Collective] = []
    collectives = iter(route.collectives)
    waiting = list(route.steps)
    while waiting:
        step = waiting.pop(0)
        collective = next(collectives) if step.kind in COLLECTIVES else None
        # One dim must be sliced, by the same axes in the same order.
        slices = waiting[: len(step.axes)]
        slices_dim = all(s.kind == "slice" and s.dim == slices[0].dim for s in slices)
        sliced = tuple(a for s in slices for a in s.axes)
        if step.kind == "all-reduce" and collective and slices_dim and sliced == step.axes:
            del waiting[: len(slices)]
            step = MoveStep("reduce-scatter", step.axes, slices[0].dim)
            collective = replace(collective, kind=step.kind)
        steps.append(step)
        moved += [collective] if collective else []
    return Route(tuple(steps), tuple(moved), route.seconds)


def _uses(steps: Sequence[Instruction], outputs: Sequence[str | None]) -> Counter[str | None]:
    uses = Counter(outputs)
    uses.update(name for step in steps for name in _read(step))
    return uses


def _read(step: Instruction) -> Iterator[str]:
    """The names that an instruction reads; a loop's bodies have names of their own."""
    if isinstance(step, Move):
        yield step.source
    elif isinstance(step, Fence):
        yield from step.sources
    else:
        assert isinstance(step, LocalOp | Loop)
        yield from (name for name in step.operands if name is not None)


def _alike(run: LocalOp, moves: dict[str, Move], uses: Counter[str | None]) -> bool:
    """True if both operands are combined in the same way, for this sum alone."""
    found = [moves[name] for name in run.operands if name in moves and uses[name] == 1]
    if len(found) != 2:
        return False
    one, other = found
    return (
        bool(one.before.partial)
        and not one.after.partial
        and one.combiner == other.combiner == "sum"
        and (one.before, one.after, one.steps) == (other.before, other.after, other.steps)
        and run.result_shardings == (one.after,)
    )
