"""Liveness of a run of kernels: the most bytes held, and the pieces held then."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from autopar.cost.kernels import Kernel, Stored
from autopar.ir.listing import Block
from autopar.ir.peak import HeldKind

_ALIGNMENT = 256  # every buffer's size is rounded up to it


@dataclass(frozen=True)
class Moment:
    """The kernel of a block at which its own pieces hold the most, and their bytes."""

    block: Block
    stored: Stored
    at: int
    nbytes: int  # scratch included
    held: tuple[tuple[str, int], ...]
    outside: Collection[str] = ()  # pieces that are held all along, and counted elsewhere
    apart: tuple[tuple[str, int], ...] = ()  # those that are held all along, and counted here

    @property
    def kernel(self) -> Kernel | None:
        """The kernel that runs then; None in a block that stores nothing."""
        kernels = self.stored.kernels
        return kernels[self.at] if kernels else None


def busiest(
    block: Block, stored: Stored, outside: Collection[str], apart: Collection[str] = ()
) -> Moment:
    """The moment at which a block holds most; buffers of pieces `outside` are held all along.

    So are those `apart`, which nothing else may use, and which count: what a program gives back.
    """
    lives = _Lives.of(stored, {*outside, *apart})
    at, most = _peak(stored, lives, in_place=True)
    lasting = tuple((name, _rounded(stored.nbytes[name])) for name in sorted(set(apart)))
    held = (*lasting, *_held_at(stored, at, lives))
    return Moment(block, stored, at, most + sum(n for _, n in lasting), held, outside, lasting)


def most_bytes(stored: Stored, outside: Collection[str]) -> int:
    """The most that is held where every kernel has new buffers for what it makes.

    So much XLA counts when it chooses between orders.
    """
    return _peak(stored, _Lives.of(stored, outside), in_place=False)[1]


def held_kinds(moment: Moment, kinds: Mapping[str, HeldKind]) -> Iterator[Counter[HeldKind]]:
    """Bytes held while each kernel of a moment's block runs, by kind.

    Scratch, and pieces of no kind, are temporary.
    """
    stored, now = moment.stored, Counter[HeldKind]()
    for name, nbytes in moment.apart:
        now[kinds.get(name, HeldKind.TEMPORARY)] += nbytes
    lives = _Lives.of(stored, {*moment.outside, *(name for name, _ in moment.apart)})
    kind_of = {name: kinds.get(name, HeldKind.TEMPORARY) for name in lives.sizes}
    dying = lives.dying()
    for k, kernel in enumerate(stored.kernels):
        for name in kernel.makes:
            if name in kind_of:
                now[kind_of[name]] += lives.sizes[name]
        dead = dying.get(k, ())
        held = now.copy()
        held[HeldKind.TEMPORARY] += kernel.scratch_bytes
        for name in lives.taken(kernel, dead):
            held[kind_of[name]] -= lives.sizes[name]
        yield held
        for name in dead:
            now[kind_of[name]] -= lives.sizes[name]


Span = tuple[int, int]  # the first and the last kernel, both included


@dataclass(frozen=True)
class BlockSpans:
    """Spans, in kernels, of a block's stored pieces, and of those of its loops' bodies.

    `inputs` are what the block is given, which is held from its first kernel on. `bodies` are
    (kernel of the loop, spans of one of its bodies).
    """

    inputs: tuple[str, ...]
    spans: Mapping[str, Span]
    length: int
    bodies: tuple[tuple[int, BlockSpans], ...]


def piece_spans(stored: Stored) -> Mapping[str, Span]:
    """From which kernel to which each stored piece is held.

    A piece whose buffer an in-place kernel's result takes is gone when that kernel runs.
    """
    lives, kernels = _Lives.of(stored, ()), stored.kernels
    end = max(0, len(kernels) - 1)
    spans: dict[str, Span] = {}
    for k, kernel in enumerate(kernels):
        for name in (*sorted(kernel.reads), *kernel.makes):
            first = spans[name][0] if name in spans else 0
            spans[name] = (k if name in kernel.makes else first, min(end, lives.last[name]))
    dying = lives.dying()
    for k, kernel in enumerate(kernels):
        for donor in lives.taken(kernel, dying.get(k, ())).values():
            if spans[donor][0] < k:
                spans[donor] = (spans[donor][0], k - 1)
    return spans


def buffers(stored: Stored, outside: Collection[str]) -> Iterator[tuple[str, int, Span]]:
    """The buffers of the pieces that are not outside: the first piece in each, bytes and span.

    What lives on ends behind the last kernel.
    """
    lives = _Lives.of(stored, outside)
    dying, first_of = lives.dying(), dict[str, str]()
    spans = dict[str, Span]()
    for k, kernel in enumerate(stored.kernels):
        taken = lives.taken(kernel, dying.get(k, ()))
        for name in kernel.makes:
            if name in lives.sizes:
                donor = taken.get(name)
                first = name if donor is None else first_of[donor]
                first_of[name] = first
                spans[first] = (spans[first][0] if first in spans else k, lives.last[name])
    yield from ((name, lives.sizes[name], span) for name, span in spans.items())


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class _Lives:
    """Rounded bytes of pieces, their last readers, and which pieces have several readers.

    Those `in_tuples` are made by a kernel that gives back several, be it scratch.
    """

    sizes: dict[str, int]
    last: dict[str, int]
    shared: set[str]
    in_tuples: set[str]

    @classmethod
    def of(cls, stored: Stored, outside: Collection[str]) -> _Lives:
        """The lives of the pieces that are not outside."""
        nbytes, sizes = stored.nbytes, dict[str, int]()
        last, made, shared = dict[str, int](), dict[str, int](), set[str]()
        in_tuples = set[str]()
        for k, kernel in enumerate(stored.kernels):
            for name in kernel.reads:
                if name in last:
                    shared.add(name)
                last[name] = k
            if stored.gives_tuples and not (kernel.is_light and len(kernel.makes) == 1):
                in_tuples.update(kernel.makes)
            for name in kernel.makes:
                made[name] = k
                if name not in outside:
                    sizes[name] = _rounded(nbytes[name])
        last = {**made, **last}
        for name, then in stored.sent.items():
            last[name] = max(last[name], made[then])
        last.update(dict.fromkeys(stored.kept, len(stored.kernels)))
        return cls(sizes, last, shared, in_tuples)

    def dying(self) -> Mapping[int, list[str]]:
        """By kernel, what nobody reads any more once it has run."""
        found = defaultdict[int, list[str]](list)
        for name, k in self.last.items():
            if name in self.sizes:
                found[k].append(name)
        return found

    def taken(self, kernel: Kernel, dead: Collection[str]) -> Mapping[str, str]:
        """Results of an in-place kernel, with the operands that die in it whose buffers they take.

        One that others read too, or that comes in a tuple, element-wise work leaves alone.
        """
        if not kernel.in_place or not dead:
            return {}
        sizes = self.sizes
        free = [
            name
            for name in sorted(dead)
            if name in kernel.reads
            and not (kernel.is_light and (name in self.shared or name in self.in_tuples))
        ]
        taken = dict[str, str]()
        for name in kernel.makes:
            donor = next((n for n in free if sizes[n] == sizes.get(name)), None)
            if donor is not None:
                free.remove(donor)
                taken[name] = donor
        return taken


def _peak(stored: Stored, lives: _Lives, in_place: bool) -> tuple[int, int]:
    """The kernel at which the most is held, and the bytes."""
    sizes, dying = lives.sizes, lives.dying()
    now = most = at = 0
    for k, kernel in enumerate(stored.kernels):
        for name in kernel.makes:
            now += sizes.get(name, 0)
        dead = dying.get(k, ())
        total = now + kernel.scratch_bytes
        if total > most:
            if in_place:
                total -= sum(sizes[name] for name in lives.taken(kernel, dead))
            if total > most:
                most, at = total, k
        for name in dead:
            now -= sizes[name]
    return at, most


def _held_at(stored: Stored, at: int, lives: _Lives) -> tuple[tuple[str, int], ...]:
    """The pieces that are held while a kernel runs, with their bytes, in the order made."""
    sizes, last = lives.sizes, lives.last
    held: list[tuple[str, int]] = []
    for k, kernel in enumerate(stored.kernels[: at + 1]):
        dead = [r for r in kernel.reads if last[r] == at and r in sizes] if k == at else []
        taken = lives.taken(kernel, dead)
        for name in kernel.makes:
            if name in sizes and last[name] >= at and (k < at or name not in taken):
                held.append((name, sizes[name]))
    return tuple(held)
