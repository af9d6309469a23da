"""Kernels of the dual: messages along edges, the bound that they prove, memory's prices.

Sequential tree-reweighted message passing (TRW-S; Kolmogorov, 2006) on the costs with priced
memory: a pass sends each node's share of its belief to the neighbors that come later, or earlier.
"""

from __future__ import annotations

import numpy as np

from autopar.passes.compiled import compiled, internal
from autopar.passes.shard.solver.csr_problem import Csr
from autopar.passes.shard.solver.problem import Floats, Ints


def held_rows(csr: Csr, choice: Ints) -> Ints:
    """Bytes beyond the least that an assignment holds at each row."""
    change = np.zeros(len(csr.slack) + 1, dtype=np.int64)
    held_changes(csr, choice, change)
    held: Ints = np.cumsum(change)[:-1]
    return held


def widest(csr: Csr) -> int:
    """The most choices of a node."""
    return int(np.diff(csr.choices).max(initial=1))


@compiled
def priced_costs(csr: Csr, running: Floats, priced: Floats) -> None:
    """Costs with every choice's bytes priced; `running` sums the prices before each row."""
    for v in range(len(csr.choices) - 1):
        first, count = csr.choices[v], csr.choices[v + 1] - csr.choices[v]
        for c in range(count):
            priced[first + c] = csr.costs[first + c]
        for h in range(csr.holdings[v], csr.holdings[v + 1]):
            price = running[csr.lasts[h]] - running[csr.firsts[h]]
            if price > 0.0:
                at = csr.nbytes_at[h]
                for c in range(count):
                    priced[first + c] += price * csr.nbytes[at + c]


@compiled
def pass_messages(
    csr: Csr,
    priced: Floats,
    messages: Floats,
    choice: Ints,
    margins: Floats,
    room: Floats,
    forward: bool,
) -> float:
    """Send messages in a pass over the nodes; `choice` becomes the assignment read off on the way.

    `room` is scratch for two nodes of the most choices.
    Returns a lower bound on every assignment's priced cost where the pass before ran the other
    way at the same prices: what all nodes and messages were worth at their least.
    """
    bound = 0.0
    count = len(csr.choices) - 1
    widest = len(room) // 2
    for i in range(count):
        v = i if forward else count - 1 - i
        first, width = csr.choices[v], csr.choices[v + 1] - csr.choices[v]
        for c in range(width):
            room[c] = priced[first + c]
            room[widest + c] = priced[first + c]
        later = 0
        for a in range(csr.arcs[v], csr.arcs[v + 1]):
            w, inbox = csr.ends[a], csr.inbox[a]
            for c in range(width):
                room[c] += messages[inbox + c]
            if (w > v) == forward:
                later += 1
                for c in range(width):
                    room[widest + c] += messages[inbox + c]
            else:
                at = csr.tables[a] + choice[w] * width
                for c in range(width):
                    room[widest + c] += csr.entries[at + c]
        best, least = 0, room[0]
        for c in range(1, width):
            if room[widest + c] < room[widest + best]:
                best = c
            least = min(least, room[c])
        choice[v] = best
        degree = csr.arcs[v + 1] - csr.arcs[v]
        share = 1.0 / max(1, later, degree - later)
        bound += least
        for c in range(width):
            room[c] -= least
            margins[first + c] = room[c]
        for a in range(csr.arcs[v], csr.arcs[v + 1]):
            if (csr.ends[a] > v) == forward:
                bound += _send(csr, messages, a, room, width, share)
    return bound


@internal
def _send(csr: Csr, messages: Floats, a: int, room: Floats, width: int, share: float) -> float:
    """The message of an arc's own node to its other end, less its least entry, which it returns."""
    w, widest = csr.ends[a], len(room) // 2
    inbox, outbox = csr.inbox[a], csr.inbox[csr.back[a]]
    for c in range(width):
        room[widest + c] = share * room[c] - messages[inbox + c]
    least = 1e300
    for d in range(csr.choices[w + 1] - csr.choices[w]):
        at = csr.tables[a] + d * width
        lowest = room[widest] + csr.entries[at]
        for c in range(1, width):
            lowest = min(lowest, room[widest + c] + csr.entries[at + c])
        messages[outbox + d] = lowest
        least = min(least, lowest)
    for d in range(csr.choices[w + 1] - csr.choices[w]):
        messages[outbox + d] -= least
    return least


@compiled
def held_changes(csr: Csr, choice: Ints, change: Ints) -> None:
    """Add how the bytes beyond the least that an assignment holds change at each row."""
    for v in range(len(csr.choices) - 1):
        for h in range(csr.holdings[v], csr.holdings[v + 1]):
            nbytes = csr.nbytes[csr.nbytes_at[h] + choice[v]]
            change[csr.firsts[h]] += nbytes
            change[csr.lasts[h]] -= nbytes


@compiled
def total_cost(csr: Csr, choice: Ints) -> float:
    """Node costs and edge entries of an assignment."""
    total = 0.0
    for v in range(len(csr.choices) - 1):
        width = csr.choices[v + 1] - csr.choices[v]
        total += csr.costs[csr.choices[v] + choice[v]]
        for a in range(csr.arcs[v], csr.arcs[v + 1]):
            if csr.ends[a] > v:
                total += csr.entries[csr.tables[a] + choice[csr.ends[a]] * width + choice[v]]
    return float(total)
