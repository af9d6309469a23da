"""Seconds of a collective on the links that it crosses, by the cheapest of the known algorithms.

V is the whole local buffer in bytes (the result of an all-gather; the operand of every other
kind), n the number of devices, B one-way bytes/s per device, a the seconds of a step.

On switches (NCCL's ring and double binary tree; in-switch addition where there is any), with C
the rate of what a device takes in of its own share:

    all-gather                   s + (n-1) a + (n-1)/n V/B + 1/n V/C
    reduce-scatter               the same with 2 V/C: read, and added to
    all-reduce                   min( s + 2(n-1) a + 2(n-1)/n V/B + 3/n V/C,
                                      s + 2 log2(n) a + 2V/B + 3 V/C,
                                      s' + V/(e B) )
    all-to-all                   s + (n-1) a + (n-1)/n V/B(shuffle) + 1/n V/C
    permute                      s + a + V/B(pair)

Small messages may be sent another way, which starts sooner and is slower, as NCCL has it inside a
host: each of these is the lesser of both. A pair is as soon under way as a small message. An
all-to-all is made of pairs, whatever its size: there they are all under way together, and wait for
one another twice, to be sent and to be received: 2 a.

A ring over several levels is one ring: it crosses each level as often as the group has members
at one place of it, so the slowest of B, g B', g h B'', ... sets its pace, and waits for all of
them. An all-reduce may also go level by level, each working on what those inside leave: V, V/g,
V/(g h), ... In an all-to-all the levels work at the same time, each on what is for others there.

On a torus with k directions of L bytes/s per link and way, as libtpu's own estimates have it
(all checked rows within 5 %):

    all-gather                   hops + min( (n-1)/n V/(2 L), V/(k L) )      v5e: V/(2 L)
    all-reduce, reduce-scatter   hops + 2V/(2 k L)
    all-to-all                   hops + (n-1)/n V/L * (longest direction)/2
    permute                      hop + V/L

libtpu builds a reduce-scatter as an all-reduce and a slice, so they cost the same. It charges
nothing extra for a direction that does not close into a ring (v6e:4x4 and v5p:2x2x4 as v5p:4x4x4)
and neither do we, but for the hops; groups that interleave along a direction share its links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from autopar.cluster import LinkLevel
from autopar.errors import ClusterError
from autopar.ir.listing import COLLECTIVES

# Of a reduce-scatter and an all-reduce that take as long, a plan takes the reduce-scatter.
SCATTER_TIE = 0.999


def collective_seconds(kind: str, nbytes: float, levels: Sequence[LinkLevel]) -> float:
    """Seconds of one collective over `levels`, innermost first; 0 for one device or no bytes.

    `nbytes` is the whole local buffer V of this module's docstring.
    Raises ClusterError where the kind is not one of COLLECTIVES.
    """
    if kind not in COLLECTIVES:
        raise ClusterError(
            f"collective {kind!r} is not known; expected one of {', '.join(COLLECTIVES)}"
        )
    if nbytes <= 0 or not levels:
        return 0.0
    if kind == "collective-permute":
        # The farthest neighbor decides: someone always crosses the outermost level.
        outer = levels[-1]
        pair = min(level.pair_bytes_per_second for level in levels)
        return (outer.small or outer).start_seconds + outer.latency_seconds + nbytes / pair
    # Levels of one kind go together. A network between slices sees only the part that the slice
    # leaves to each device.
    seconds, inside = 0.0, 1
    for name, group in groupby(levels, key=lambda level: level.kind):
        own = tuple(group)
        if name not in FORMULAS:
            raise ClusterError(
                f"links of kind {name!r} have no price; add a formula of theirs to FORMULAS in "
                f"autopar/cost/collective.py, which has {', '.join(FORMULAS)}"
            )
        seconds += FORMULAS[name](kind, nbytes if kind == "all-to-all" else nbytes / inside, own)
        inside *= math.prod(level.size for level in own)
    return seconds


def _on_torus(kind: str, nbytes: float, levels: Sequence[LinkLevel]) -> float:
    devices = math.prod(level.size for level in levels)
    fraction = (devices - 1) / devices
    hops = sum(_hops(level) * level.latency_seconds for level in levels)
    if kind == "all-gather":
        share = 1.0 if levels[0].full_gather else fraction
        gathered = share * nbytes / min(level.bytes_per_second for level in levels)
        # With three directions libtpu pads and all-reduces instead.
        return hops + min(gathered, 2 * nbytes / sum(level.bytes_per_second for level in levels))
    if kind == "all-to-all":
        # The busiest direction: the longest, or a shorter one that has to share its links.
        slowest = max(level.size / 2 / level.pair_bytes_per_second for level in levels)
        return hops + fraction * nbytes * slowest
    return hops + 2 * nbytes / sum(level.bytes_per_second for level in levels)


def _hops(level: LinkLevel) -> int:
    return level.size // 2 if level.wraps else level.size - 1


def _on_switches(kind: str, nbytes: float, levels: Sequence[LinkLevel]) -> float:
    seconds = _sent_alike(kind, nbytes, levels)
    if kind == "all-to-all" or all(level.small is None for level in levels):
        return seconds
    return min(seconds, _sent_alike(kind, nbytes, [level.small or level for level in levels]))


def _sent_alike(kind: str, nbytes: float, levels: Sequence[LinkLevel]) -> float:
    if kind == "all-to-all":
        parts = (_shuffle(nbytes, level, inside) for level, inside in _with_inside(levels))
        return _own(nbytes, levels) + max(parts)
    if kind == "all-gather":
        return _ring(nbytes, levels, 1) + _own(nbytes, levels)
    if kind == "reduce-scatter":
        return _ring(nbytes, levels, 1) + 2 * _own(nbytes, levels)
    by_level = sum(_all_reduce(nbytes / inside, level) for level, inside in _with_inside(levels))
    return min(_ring_all_reduce(nbytes, levels), by_level)


def _with_inside(levels: Sequence[LinkLevel]) -> Iterator[tuple[LinkLevel, int]]:
    """Each level with how many members of the group are at one place of it."""
    inside = 1
    for level in levels:
        yield level, inside
        inside *= level.size


def _ring(nbytes: float, levels: Sequence[LinkLevel], rounds: int) -> float:
    """A buffer sent so many times around one ring through all members of a group."""
    devices = math.prod(level.size for level in levels)
    waits = sum(
        level.start_seconds + rounds * (level.size - 1) * level.latency_seconds for level in levels
    )
    pace = min(inside * level.bytes_per_second for level, inside in _with_inside(levels))
    return waits + rounds * nbytes * (devices - 1) / devices / pace


def _own(nbytes: float, levels: Sequence[LinkLevel]) -> float:
    """Seconds in which a device reads its own share once."""
    return _taken_in(nbytes / math.prod(level.size for level in levels), levels[0])


def _taken_in(nbytes: float, level: LinkLevel) -> float:
    return nbytes / level.local_bytes_per_second if level.local_bytes_per_second else 0.0


def _ring_all_reduce(nbytes: float, levels: Sequence[LinkLevel]) -> float:
    """A reduce-scatter and an all-gather in one."""
    return _ring(nbytes, levels, 2) + 3 * _own(nbytes, levels)


def _all_reduce(nbytes: float, level: LinkLevel) -> float:
    """The best way to add up over one level."""
    best = min(_ring_all_reduce(nbytes, (level,)), _tree(nbytes, level))
    if level.reduces_in_switch:
        summed = nbytes / level.bytes_per_second / level.reduces_in_switch
        best = min(best, level.reduction_start_seconds + summed)
    return best


def _tree(nbytes: float, level: LinkLevel) -> float:
    """Up and down a double binary tree: few steps, and every device adds up the whole buffer."""
    steps = 2 * math.ceil(math.log2(level.size)) * level.latency_seconds
    moved = 2 * nbytes / level.bytes_per_second + 3 * _taken_in(nbytes, level)
    return level.start_seconds + steps + moved


def _shuffle(nbytes: float, level: LinkLevel, inside: int) -> float:
    """The part of an all-to-all that leaves for other members at this level.

    Each device sends one message to each of the `inside` devices under each other member: together,
    as where small messages have a way of their own, or one after the other.
    """
    fraction = (level.size - 1) / level.size
    messages = 2 if level.small is not None else (level.size - 1) * inside
    moved = nbytes * fraction / level.shuffle_bytes_per_second
    return level.start_seconds + messages * level.latency_seconds + moved


# The seconds of a collective (its kind, the bytes, the levels) by the kind of its links: a new
# kind of link is priced by a row here.
FORMULAS: Mapping[str, Callable[[str, float, Sequence[LinkLevel]], float]] = {
    "switch": _on_switches,
    "torus": _on_torus,
}
