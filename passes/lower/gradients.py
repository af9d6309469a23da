"""The backward ops of a stage in two: I, which lower stages wait for, and W, which can wait.

W is all that no cotangent for a lower stage needs. It reads what I made, so that together they run
each op once. See `docs/explanation/stage-programs.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from autopar.ir.batching import When
from autopar.passes.lower.outline import Outline

# An op with more FLOPs than this for each item that it reads stays where it can fill a gap.
_LIGHT = 4


class Placed(Protocol):
    """Where an op of a loop runs."""

    @property
    def stage(self) -> int:
        """Its stage."""
        ...

    @property
    def is_backward(self) -> bool:
        """Whether it is of the backward pass."""
        ...


def weight_gradients(outline: Outline, places: Mapping[int, Placed]) -> frozenset[int]:
    """The backward ops of one loop that no stage waits for."""
    backward = [i for i, place in places.items() if place.is_backward]
    awaited: set[int] = set()
    for i in reversed(backward):
        readers = [j for j in outline.readers[i] if j in places]
        leaves = any(places[j].stage != places[i].stage for j in readers)
        if leaves or not outline.ops[i].results or any(j in awaited for j in readers):
            awaited.add(i)
    weights: set[int] = set()
    for stage in sorted({places[i].stage for i in backward}):
        members = [i for i in backward if places[i].stage == stage]
        mine = [i for i in members if i not in awaited]
        weights |= _lightened(outline, mine) if len(mine) < len(members) else set(mine)
    return frozenset(weights)


def _lightened(outline: Outline, weights: Sequence[int]) -> set[int]:
    """W without the light ops that leave less to keep between I and W when they run in I.

    Such as a cast to fewer bytes, or a transpose, of what nobody else in W reads.
    """
    kept = set(weights)
    for i in weights:
        op = outline.ops[i]
        makers = [outline.maker.get(n, -1) for n in outline.reads[i]]
        items = sum(outline.graph.values[n].item_count for n in outline.reads[i])
        if op.flops > _LIGHT * items or op.graphs or not kept.isdisjoint(makers):
            continue
        if 0 < sum(r.nbytes for r in op.results) <= _dropped_bytes(outline, i, kept):
            kept.discard(i)
    return kept


def _dropped_bytes(outline: Outline, i: int, kept: set[int]) -> int:
    """The bytes that are not kept for W if an op that reads them runs in I."""
    dropped = 0
    for name in outline.reads[i]:
        j = outline.maker.get(name, -1)
        if j < 0 or outline.when(j) is not When.LOOP or name in outline.leaving:
            continue
        if not any(r in kept and r != i and name in outline.reads[r] for r in outline.readers[j]):
            dropped += outline.graph.values[name].nbytes
    return dropped
