"""Kernels of the dual: messages along edges, the bound that they prove, memory's prices.

Sequential tree-reweighted message passing (TRW-S; Kolmogorov, 2006) on the costs with priced
memory: a pass sends each node's share of its belief to the neighbors that come later, or earlier.
"""

from __future__ import annotations

import numpy as np

from autopar.passes.compiled import compiled, internal
from autopar.passes.shard.solver.flat import Flat, Ints
from autopar.passes.shard.solver.problem import Floats


def held_rows(flat: Flat, choice: Ints) -> Ints:
    """Bytes beyond the least that an assignment holds at each row."""
    change = np.zeros(len(flat.slack) + 1, dtype=np.int64)
    held_changes(flat, choice, change)
    held: Ints = np.cumsum(change)[:-1]
    return held


def widest(flat: Flat) -> int:
    """The most choices of a node."""
    return int(np.diff(flat.choices).max(initial=1))


@compiled
def priced_costs(flat: Flat, running: Floats, priced: Floats) -> None:
    """Costs with every choice's bytes priced; `running` sums the prices before each row."""
    for v in range(len(flat.choices) - 1):
        first, count = flat.choices[v], flat.choices[v + 1] - flat.choices[v]
        for c in range(count):
            priced[first + c] = flat.costs[first + c]
        for h in range(flat.holdings[v], flat.holdings[v + 1]):
            price = running[flat.lasts[h]] - running[flat.firsts[h]]
            if price > 0.0:
                at = flat.nbytes_at[h]
                for c in range(count):
                    priced[first + c] += price * flat.nbytes[at + c]


@compiled
def pass_messages(
    flat: Flat, priced: Floats, messages: Floats, choice: Ints, room: Floats, forward: bool
) -> float:
    """Passes messages over the nodes once; `choice` becomes the assignment read off on the way.

    `room` is scratch for two nodes of the most choices.
    Returns a lower bound on every assignment's priced cost where the pass before ran the other
    way at the same prices: what all nodes and messages were worth at their least.
    """
    bound = 0.0
    count = len(flat.choices) - 1
    widest = len(room) // 2
    for i in range(count):
        v = i if forward else count - 1 - i
        first, width = flat.choices[v], flat.choices[v + 1] - flat.choices[v]
        for c in range(width):
            room[c] = priced[first + c]
            room[widest + c] = priced[first + c]
        later = 0
        for a in range(flat.arcs[v], flat.arcs[v + 1]):
            w, inbox = flat.ends[a], flat.inbox[a]
            for c in range(width):
                room[c] += messages[inbox + c]
            if (w > v) == forward:
                later += 1
                for c in range(width):
                    room[widest + c] += messages[inbox + c]
            else:
                at = flat.tables[a] + choice[w] * width
                for c in range(width):
                    room[widest + c] += flat.entries[at + c]
        best, least = 0, room[0]
        for c in range(1, width):
            if room[widest + c] < room[widest + best]:
                best = c
            least = min(least, room[c])
        choice[v] = best
        degree = flat.arcs[v + 1] - flat.arcs[v]
        share = 1.0 / max(1, later, degree - later)
        bound += least
        for c in range(width):
            room[c] -= least
        for a in range(flat.arcs[v], flat.arcs[v + 1]):
            if (flat.ends[a] > v) == forward:
                bound += _send(flat, messages, a, room, width, share)
    return bound


@internal
def _send(flat: Flat, messages: Floats, a: int, room: Floats, width: int, share: float) -> float:
    """The message of an arc's own node to its other end, less its least entry, which it returns."""
    w, widest = flat.ends[a], len(room) // 2
    inbox, outbox = flat.inbox[a], flat.inbox[flat.back[a]]
    for c in range(width):
        room[widest + c] = share * room[c] - messages[inbox + c]
    least = 1e300
    for d in range(flat.choices[w + 1] - flat.choices[w]):
        at = flat.tables[a] + d * width
        lowest = room[widest] + flat.entries[at]
        for c in range(1, width):
            lowest = min(lowest, room[widest + c] + flat.entries[at + c])
        messages[outbox + d] = lowest
        least = min(least, lowest)
    for d in range(flat.choices[w + 1] - flat.choices[w]):
        messages[outbox + d] -= least
    return least


@compiled
def held_changes(flat: Flat, choice: Ints, change: Ints) -> None:
    """Add how the bytes beyond the least that an assignment holds change at each row."""
    for v in range(len(flat.choices) - 1):
        for h in range(flat.holdings[v], flat.holdings[v + 1]):
            nbytes = flat.nbytes[flat.nbytes_at[h] + choice[v]]
            change[flat.firsts[h]] += nbytes
            change[flat.lasts[h]] -= nbytes


@compiled
def total_cost(flat: Flat, choice: Ints) -> float:
    """Node costs and edge entries of an assignment."""
    total = 0.0
    for v in range(len(flat.choices) - 1):
        width = flat.choices[v + 1] - flat.choices[v]
        total += flat.costs[flat.choices[v] + choice[v]]
        for a in range(flat.arcs[v], flat.arcs[v + 1]):
            if flat.ends[a] > v:
                total += flat.entries[flat.tables[a] + choice[flat.ends[a]] * width + choice[v]]
    return float(total)
