"""The order in which a device meets its forwards, and its backwards, when it holds v chunks.

Legend: p devices, m microbatches, v chunks; device d holds stages d, p+d, 2p+d, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from autopar.schedule.grid import Kind, Task


def group_size(p: int, m: int) -> int:
    """Number of microbatches that pass through all chunks together: p or a little more, at most m.

    More than one chunk asks for groups that come out even: see `groups_evenly`.
    """
    return m // max(1, m // p)


def groups_evenly(p: int, m: int) -> bool:
    """True if m microbatches are whole groups: so it is if p divides m, or m is less than 2p."""
    return m % max(1, m // p) == 0


def in_groups(kind: Kind, p: int, m: int, v: int, d: int) -> Iterator[Task]:
    """The mv tasks of one kind, group by group; forwards take the chunks upwards, others downwards.

    Forwards with p=2 m=4 v=2 on device 0: F0.0 F0.1 F2.0 F2.1 F0.2 F0.3 F2.2 F2.3
    """
    group = group_size(p, m)
    stages = range(d, p * v, p)
    for first in range(0, m, group):
        for stage in stages if kind is Kind.FORWARD else reversed(stages):
            yield from (Task(kind, stage, i) for i in range(first, min(first + group, m)))


def in_turn(p: int, m: int, v: int, d: int, warmup: int, backward: Kind) -> Iterator[Task]:
    """The warm-up forwards, then one forward and one backward in turn, then the backwards left."""
    # Both take the tasks of their kind in the order of `in_groups`; when the forwards run out, only
    # backwards are left.
    forwards = in_groups(Kind.FORWARD, p, m, v, d)
    yield from islice(forwards, warmup)
    for task in in_groups(backward, p, m, v, d):
        yield from islice(forwards, 1)
        yield task
