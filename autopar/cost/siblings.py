"""Kernels that XLA runs as one: element-wise work, sums and turns that go over the same alike.

Its multi-output fusion joins them if they share an operand, be it only a mask or its places, and
neither waits for the other. Of layers side by side it has the scores of several before it sums up
the first, and on GPUs those of all before it turns the first one's weights over:

    m = max(s, places)   w = turned(s, m, places)   m' = max(s', places)   w' = turned(s', m', ..)
    as they run          s   s'   m, m'   w, w'

Element-wise work and sums over its items run as one, too, be it that they read the same or that
the sums are of what the work makes, which then waits for all that these wait for:

    p = f(x, y)   g = sum(x * z)   s = sum(p)        p, g, s = f(x, y, z)
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autopar.cost.kernels import COPY, LARGE_ON_TPU_BYTES, NUMBER_BYTES, Kernel, Stored
from autopar.cost.line import read_line
from autopar.cost.ops import is_fused_into_readers, summed_dims
from autopar.cost.order import as_one, either, looked_up_alone
from autopar.cost.sizes import Sizes
from autopar.ir.listing import Block, LocalOp
from autopar.ir.values import item_bytes

# What one kernel may hold near a core; tiles of what is turned over lie there, and of sums in f32
# four. Sums over rows take next to nothing, but one kernel has so many at most.
_NEAR_BYTES, _TILE_ITEMS, _TILES_OF_SUM, _SUM_BYTES, _MOST_ROWS = 48 * 1024, 32 * 33, 4, 4, 8
_MOST_BY_GROUPS = 32  # each reads and makes a piece, and a kernel has 96 of both at most
_MOST_ON_TPU = 4  # as DeepSeek's layers show on v5p


@dataclass(frozen=True)
class Iteration:
    """The shape of what a kernel goes over, and how.

    It does so item by item, to make as many; along the `dims` that it sums up; to turn them over,
    so that they lie in the order `dims`; or by groups, to copy each. Of all but the first kind, so
    many run as one at `most`.
    """

    sizes: tuple[int, ...]
    kind: Literal["items", "sum", "turn", "groups"] = "items"
    dims: tuple[int, ...] = ()
    most: int = 0

    @property
    def family(self) -> Hashable:
        """The same for all that one kernel may do while it goes over what it reads once."""
        return self.sizes if self.kind in ("items", "sum") else self


def iteration_of(block: Block, sizes: Sizes, kernel: Kernel) -> Iteration | None:
    """The iteration of a kernel over what it reads; None for what XLA joins with nothing."""
    if sizes.platform == "cpu" or kernel.alone:
        return None
    step = kernel.instruction(block)
    if isinstance(step, LocalOp):
        return _iteration_of_op(block, sizes, step) if kernel.is_light else None
    line = read_line(block, sizes)
    grouped = line.grouped.get(kernel.makes[0])
    if grouped is not None:
        return None if grouped.turned else Iteration(grouped.shape, "groups", (), _MOST_BY_GROUPS)
    turned = line.copies.get(kernel.makes[0]) if kernel.at == COPY else None
    at = line.maker.get(turned[0]) if turned is not None else None
    made = block.instructions[at] if at is not None else None
    if turned is None or not isinstance(made, LocalOp):
        return None
    op = sizes.op(made.equation)
    most = _NEAR_BYTES // (_TILE_ITEMS * item_bytes(op.results[0].dtype))
    return Iteration(sizes.made(made, op), "turn", turned[1], most)


def _iteration_of_op(block: Block, sizes: Sizes, step: LocalOp) -> Iteration | None:
    op = sizes.op(step.equation)
    dims, shape, made = summed_dims(op), sizes.shard(step, op), sizes.made(step, op)
    if not dims or math.prod(shape) != math.prod(made) * math.prod(shape[d] for d in dims):
        # What is summed in windows makes about as much as it reads.
        return by_item(made) if sizes.platform == "gpu" and is_fused_into_readers(op) else None
    if sizes.platform == "tpu":
        is_large = math.prod(shape) * _SUM_BYTES > LARGE_ON_TPU_BYTES
        return None if is_large else Iteration(shape, "sum", dims, _MOST_ON_TPU)
    operand = step.operands[0]
    innermost = read_line(block, sizes).orders.innermost(operand, shape) if operand else None
    columns = _NEAR_BYTES // (_TILES_OF_SUM * _TILE_ITEMS * _SUM_BYTES)
    return Iteration(shape, "sum", dims, _MOST_ROWS if innermost in dims else columns)


def by_item(made: tuple[int, ...]) -> Iteration | None:
    """The iteration of work that makes items of such a shape; None for one number."""
    return Iteration(made) if made else None


@dataclass
class _Fused:
    """Kernels that run as one: what they have at hand, read or made.

    `bit` stands for them while more may join them, until the kernel `end`. From the kernel `since`
    on there are pieces that wait for them. Those that do not go item by item all go `alike`.
    """

    first: int
    bit: int
    since: int
    end: int = 0
    at_hand: set[str] = field(default_factory=set[str])
    made: set[str] = field(default_factory=set[str])
    alike: Iteration | None = None
    alike_count: int = 0

    def may_take(self, kernel: Kernel, own: Iteration, waits: Mapping[str, int]) -> bool:
        """True if a kernel may go with them, and nothing it reads, but what they make, waits."""
        if own.kind != "items" and self.alike is not None:
            if self.alike != own or self.alike_count == own.most:
                return False
        return not any(waits.get(n, 0) & self.bit for n in kernel.reads if n not in self.made)

    def take(self, kernel: Kernel, own: Iteration) -> list[str]:
        """Note that a kernel runs with them; returns what they newly have at hand."""
        names = [*kernel.reads]
        if own.kind == "items":
            self.made.update(kernel.makes)
            names += kernel.makes
        else:
            self.alike, self.alike_count = own, self.alike_count + 1
        new = [name for name in names if name not in self.at_hand]
        self.at_hand.update(new)
        return new


def at_hand(
    kernels: Sequence[Kernel], iterations: Sequence[Iteration | None], nbytes: Mapping[str, int]
) -> dict[int, tuple[int, frozenset[str]]]:
    """By kernel, the one that it runs with, and the pieces that it need not load as that has them.

    XLA runs work that goes over the same items and reads the same, or what other such work stores,
    as one kernel with several results (multi-output fusion), unless it waits for other work that
    waits for the rest. Of the 10 pieces that Adam's three kernels would move it moves 7:

        m' = f(m, g)   v' = f(v, g)   p' = f(p, m', v')     loads p, m, v and g, stores the rest

    `iterations` tell how kernels go over what they read; None for those that run alone. That two
    read the same number, such as a learning rate, does not join them.
    """
    # 1. Of each piece, the last kernel that has it at hand in a family, where several have.
    ends: dict[tuple[Hashable, str], int] = {}
    seen: set[tuple[Hashable, str]] = set()
    for k, (kernel, own) in enumerate(zip(kernels, iterations, strict=True)):
        if own is None:
            continue
        for name in (*kernel.reads, *(kernel.makes if own.kind == "items" else ())):
            if nbytes[name] > NUMBER_BYTES:
                if (own.family, name) in seen:
                    ends[own.family, name] = k
                seen.add((own.family, name))
    having: dict[tuple[Hashable, str], list[_Fused]] = {}  # by family, and a piece at hand
    waits: dict[str, int] = {}  # of each piece, all those that it waits for and more may join
    growing: dict[int, _Fused] = {}  # these, by their bits
    until: dict[int, list[_Fused]] = {}
    found: dict[int, tuple[int, frozenset[str]]] = {}
    bits = count = 0
    for k, (kernel, own) in enumerate(zip(kernels, iterations, strict=True)):
        before = 0
        for name in kernel.reads:
            before = either(before, waits.get(name, 0))
        before &= bits
        if own is not None:
            # 2. It joins the first that it may; who waits for those now waits for its operands too.
            shared = (name for name in kernel.reads if nbytes[name] > NUMBER_BYTES)
            near = {f.bit: f for name in shared for f in having.get((own.family, name), ())}
            able = (near[bit] for bit in sorted(near) if near[bit].may_take(kernel, own, waits))
            fused = next(able, None)
            if fused is None:
                fused = _Fused(k, 1 << count, k)
                count += 1
            else:
                found[k] = fused.first, kernel.reads & fused.at_hand
                known = waits.get(kernels[fused.first].makes[0], 0)
                if before & ~known:
                    for name in (n for other in kernels[fused.since : k] for n in other.makes):
                        if waits.get(name, 0) & fused.bit:
                            waits[name] |= before
                    for other in growing.values():
                        if other.bit & before:
                            other.since = min(other.since, fused.since)
                before |= known
            for name in fused.take(kernel, own):
                having.setdefault((own.family, name), []).append(fused)
                fused.end = max(fused.end, ends.get((own.family, name), 0))
            if fused.end > k:
                bits |= fused.bit
                growing[fused.bit] = fused
                until.setdefault(fused.end, []).append(fused)
            before |= fused.bit & bits
        if before:
            waits.update(dict.fromkeys(kernel.makes, before))
        # 3. Whom nobody may join any more, nobody needs to wait for.
        for ended in until.pop(k, ()):
            if ended.end == k:
                growing.pop(ended.bit, None)
                bits &= ~ended.bit
    return found


def with_siblings(stored: Stored, iterations: Sequence[Iteration | None]) -> Stored:
    """The same kernels, those that run as one joined, in an order that can run; see `at_hand`."""
    kernels = stored.kernels
    alone = looked_up_alone(kernels)
    iterations = [
        None if k in alone or kernels[k].alone else own for k, own in enumerate(iterations)
    ]
    joined: dict[int, list[int]] = {}
    for k, (first, _) in at_hand(kernels, iterations, stored.nbytes).items():
        joined.setdefault(first, [first]).append(k)
    return as_one(stored, joined.values())
