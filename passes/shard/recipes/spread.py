"""Follows a dim through a reading: which dims and factors of which decisions are split together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from autopar.ir.graph import Op
from autopar.passes.shard.model.decisions import Place, Read, Reading, ReadKind

Slot = tuple[int, int]  # a decision, and a dim of it, or a factor if it is an op's
Slots = Mapping[int, frozenset[int]]


def spread(
    reading: Reading, seeds: Iterable[Slot], through: Callable[[Read], bool] = lambda r: True
) -> Slots:
    """The slots that are reached from the seeds by reads that `through` lets pass."""
    near: dict[Slot, list[Slot]] = {}
    for read in reading.reads:
        if through(read):
            for left, right in _links(read):
                near.setdefault(left, []).append(right)
                near.setdefault(right, []).append(left)
    found = dict.fromkeys(seeds)
    queue = list(found)
    for slot in queue:
        fresh = [n for n in near.get(slot, ()) if n not in found]
        found.update(dict.fromkeys(fresh))
        queue.extend(dict.fromkeys(fresh))
    slots: dict[int, frozenset[int]] = {}
    for decision, at in found:
        slots[decision] = slots.get(decision, frozenset()) | {at}
    return slots


def _links(read: Read) -> Iterator[tuple[Slot, Slot]]:
    if isinstance(read.standing, Place):
        for d, home in enumerate(read.standing.dims):
            other = _in_reader(read, d)
            if home >= 0 and other is not None:
                yield (read.standing.decision, home), (read.reader, other)


def _in_reader(read: Read, dim: int) -> int | None:
    """The reader's dim or factor that goes with a dim of the value."""
    if read.kind is ReadKind.EXACT:
        return read.dims[dim] if read.dims[dim] >= 0 else None
    assert read.op is not None
    assert read.op.rule is not None
    rule = read.op.rule
    dims = rule.results[-1 - read.operand] if read.operand < 0 else rule.operands[read.operand]
    factor = rule.major(dims[dim])
    if read.kind is ReadKind.OP or factor is None:
        return factor
    result = next((r for r, there in enumerate(rule.results[0]) if factor in there), None)
    if result is None or rule.major(rule.results[0][result]) != factor:
        return None
    return read.dims[result] if read.dims[result] >= 0 else None


def shared_factors(op: Op) -> frozenset[int]:
    """The factors of a product that stand in both operands and in the result: batch dims."""
    if op.kind != "dot_general" or op.rule is None:
        return frozenset()
    dims = (*op.rule.operands, op.rule.results[0])
    left, right, out = ({f for dim in tensor for f in dim} for tensor in dims)
    return frozenset(f for f in left & right & out if op.rule.factors[f].size > 1)
