"""What a run of kernels holds at most, and which pieces those are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from autopar.cost.kernels import Kernel, Stored
from autopar.ir.spmd import Block

_ALIGNMENT = 256  # every buffer's size is rounded up to it


@dataclass(frozen=True)
class Moment:
    """The kernel of a block at which its own pieces hold the most, and their bytes."""

    block: Block
    stored: Stored
    at: int
    nbytes: int  # scratch included
    held: tuple[tuple[str, int], ...]

    @property
    def kernel(self) -> Kernel | None:
        """The kernel that runs then; None in a block that stores nothing."""
        kernels = self.stored.kernels
        return kernels[self.at] if kernels else None


def busiest(block: Block, stored: Stored, outside: Collection[str]) -> Moment:
    """When a block holds the most; pieces `outside` have buffers that are held all along."""
    kernels, nbytes = stored.kernels, stored.nbytes
    last = _last_reads(stored)
    dying: dict[int, list[str]] = defaultdict(list)
    for name, k in last.items():
        dying[k].append(name)
    now = most = at = 0
    sizes: dict[str, int] = {}
    for k, kernel in enumerate(kernels):
        for name in kernel.makes:
            if name not in outside:
                sizes[name] = -(-nbytes[name] // _ALIGNMENT) * _ALIGNMENT
                now += sizes[name]
        dead = [name for name in dying.get(k, ()) if name in sizes]
        total = now + kernel.scratch_bytes
        if total > most:
            taken = _taken(kernel, dead, sizes) if kernel.in_place and dead else ()
            total -= sum(sizes[name] for name in taken)
            if total > most:
                most, at = total, k
        for name in dead:
            now -= sizes[name]
    return Moment(block, stored, at, most, _held_at(stored, at, last, sizes))


def _last_reads(stored: Stored) -> dict[str, int]:
    last: dict[str, int] = {}
    for k, kernel in enumerate(stored.kernels):
        last.update(dict.fromkeys(kernel.reads, k))
        for name in kernel.makes:
            last.setdefault(name, k)
    last.update(dict.fromkeys(stored.kept, len(stored.kernels)))
    return last


def _taken(kernel: Kernel, dead: Collection[str], sizes: dict[str, int]) -> tuple[str, ...]:
    """Results of an in-place kernel that take the buffer of an operand which dies in it."""
    free = sorted(sizes[name] for name in dead if name not in kernel.makes)
    taken: list[str] = []
    for name in kernel.makes:
        if name in sizes and sizes[name] in free:
            free.remove(sizes[name])
            taken.append(name)
    return tuple(taken)


def _held_at(
    stored: Stored, at: int, last: dict[str, int], sizes: dict[str, int]
) -> tuple[tuple[str, int], ...]:
    """The pieces that are held while a kernel runs, with their bytes, in the order made."""
    held: list[tuple[str, int]] = []
    for k, kernel in enumerate(stored.kernels[: at + 1]):
        dead = [r for r in kernel.reads if last[r] == at and r in sizes] if k == at else []
        taken = _taken(kernel, dead, sizes) if kernel.in_place else ()
        for name in kernel.makes:
            if name in sizes and last[name] >= at and (k < at or name not in taken):
                held.append((name, sizes[name]))
    return tuple(held)
