"""Kernels of the search: blocks of nodes that form trees are set anew, exactly, within memory.

A block is grown so that each node after a root touches one node before it; all else stays. The
best assignment of the block at the prices in force follows from the leaves up. Where it breaks a
row, that row's bytes get dearer for this block, and it is solved again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.passes.compiled import compiled, internal
from autopar.passes.shard.solver.flat import Flat, Ints
from autopar.passes.shard.solver.peaks import add, worst_row
from autopar.passes.shard.solver.problem import Floats

_ATTEMPTS = 6
_DEARER = 2.0
_EVERYTHING = 2**60
_MOST_ENTRIES = 300_000  # of a block's tables


class Block(NamedTuple):
    """Room for one block; letters: i position in the block, v node."""

    nodes: Ints  # [i]
    parents: Ints  # [i] position of the node that it hangs on, -1 for a root
    arcs: Ints  # [i] its arc to that node
    place: Ints  # [v] position in the block, -1 outside
    touching: Ints  # [v] how many of the block's nodes are its neighbors
    edge: Ints  # nodes that touch the block, in the order met
    wide: Ints  # [0] the places of each node in the next three
    own: Floats  # [i, choice] costs against all that stays
    total: Floats  # [i, choice] with what hangs on it
    follow: Ints  # [i, parent's choice] best own choice
    found: Ints  # [i] the choice found
    rows: Ints  # rows whose bytes are dearer
    dearer: Floats  # by how much


class State(NamedTuple):
    """An assignment that is being improved; everything in it changes in place."""

    choice: Ints
    field: Floats  # each choice's cost against the neighbors' choices, laid out like `costs`
    heap: Ints  # bytes over the limit at each row, as in `peaks`
    pending: Ints
    running: Floats  # sums of the prices of the rows before each
    chance: npt.NDArray[np.uint64]  # the generator's state


@internal
def draw(chance: npt.NDArray[np.uint64], below: int) -> int:
    """A number from 0 up to, but without, `below` (xorshift64*; Vigna, 2016)."""
    x = chance[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    chance[0] = x
    return int(np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % below)


@compiled
def search(
    flat: Flat, state: State, block: Block, roots: Ints, entries: int, heat: float, hard: bool
) -> int:
    """Set blocks anew until so many table entries were looked at; returns how many it were.

    Under `heat`, costs are shaken. Where `hard`, no row may end over its limit, or further over.
    """
    done = 0
    while done < entries:
        root = roots[draw(state.chance, len(roots))]
        most = 1 + draw(state.chance, len(block.nodes))
        count = _grow(flat, state, block, root, most)
        for i in range(count):
            v = block.nodes[i]
            done += _weight(flat, v) + flat.arcs[v + 1] - flat.arcs[v]
        _improve(flat, state, block, count, heat, hard)
        _clear(flat, block, count)
    return int(done)


@internal
def _weight(flat: Flat, v: int) -> int:
    """About how many table entries a node adds to a block."""
    width = flat.choices[v + 1] - flat.choices[v]
    return int(width * width + 10)


@internal
def _grow(flat: Flat, state: State, block: Block, root: int, most: int) -> int:
    """Let a tree grow from a root by random nodes that touch it once; returns its size."""
    waiting = _take(flat, block, root, -1, 0, 0, 0)
    count, entries = 1, _weight(flat, root)
    while waiting and count < most and entries < _MOST_ENTRIES:
        pick = draw(state.chance, waiting)
        v = block.edge[pick]
        waiting -= 1
        block.edge[pick] = block.edge[waiting]
        if block.place[v] >= 0 or block.touching[v] != 1:
            continue
        for a in range(flat.arcs[v], flat.arcs[v + 1]):
            at = int(block.place[flat.ends[a]])
            if at >= 0:
                waiting = _take(flat, block, v, at, a, count, waiting)
                count += 1
                entries += _weight(flat, v)
                break
    return count


@internal
def _take(flat: Flat, block: Block, v: int, parent: int, arc: int, i: int, waiting: int) -> int:
    block.nodes[i], block.parents[i], block.arcs[i], block.place[v] = v, parent, arc, i
    for a in range(flat.arcs[v], flat.arcs[v + 1]):
        w = flat.ends[a]
        block.touching[w] += 1
        if block.place[w] < 0 and block.touching[w] == 1 and waiting < len(block.edge):
            block.edge[waiting] = w
            waiting += 1
    return waiting


@internal
def _clear(flat: Flat, block: Block, count: int) -> None:
    for i in range(count):
        v = block.nodes[i]
        block.place[v] = -1
        for a in range(flat.arcs[v], flat.arcs[v + 1]):
            block.touching[flat.ends[a]] = 0


@internal
def _improve(flat: Flat, state: State, block: Block, count: int, heat: float, hard: bool) -> bool:
    """Find a cheaper assignment of the block that fits, and take it."""
    _own_costs(flat, state, block, count)
    for i in range(count):
        block.found[i] = state.choice[block.nodes[i]]
    before = _value(flat, block, count)
    if heat > 0.0:
        _shake(flat, state, block, count, heat)
        before = _value(flat, block, count)
    allowed = max(0, state.heap[1]) if hard else _EVERYTHING
    rows = 0
    for _ in range(_ATTEMPTS):
        _solve(flat, block, count, rows)
        after = _value(flat, block, count)
        if after >= before - 1e-9 * abs(before):
            return False
        _swap(flat, state, block, count)
        over = state.heap[1] - allowed
        if over <= 0:
            _settle(flat, state, block, count)
            return True
        row = worst_row(state.heap, state.pending)
        _swap(flat, state, block, count)
        rows = _raise(block, rows, row, (before - after) / over)
    return False


@internal
def _shake(flat: Flat, state: State, block: Block, count: int, heat: float) -> None:
    for i in range(count):
        v = block.nodes[i]
        for c in range(flat.choices[v + 1] - flat.choices[v]):
            u = (draw(state.chance, 1 << 30) + 0.5) / (1 << 30)
            block.own[i * block.wide[0] + c] += heat * np.log(-np.log(u))


@internal
def _raise(block: Block, rows: int, row: int, price: float) -> int:
    for r in range(rows):
        if block.rows[r] == row:
            block.dearer[r] *= _DEARER
            return rows
    block.rows[rows], block.dearer[rows] = row, price
    return rows + 1


@compiled
def fill_field(flat: Flat, choice: Ints, field: Floats) -> None:
    """Writes the cost of each choice of each node while all other nodes stay."""
    for v in range(len(flat.choices) - 1):
        first, width = flat.choices[v], flat.choices[v + 1] - flat.choices[v]
        for c in range(width):
            field[first + c] = flat.costs[first + c]
        for a in range(flat.arcs[v], flat.arcs[v + 1]):
            at = flat.tables[a] + choice[flat.ends[a]] * width
            for c in range(width):
                field[first + c] += flat.entries[at + c]


@internal
def _own_costs(flat: Flat, state: State, block: Block, count: int) -> None:
    """Each node's costs: its own, its bytes at their prices, its edges to what stays."""
    for i in range(count):
        v = block.nodes[i]
        first, width = flat.choices[v], flat.choices[v + 1] - flat.choices[v]
        own = i * block.wide[0]
        for c in range(width):
            block.own[own + c] = state.field[first + c]
        if block.parents[i] >= 0:
            arc, p = block.arcs[i], block.nodes[block.parents[i]]
            at = flat.tables[arc] + state.choice[p] * width
            for c in range(width):
                block.own[own + c] -= flat.entries[at + c]
            back = flat.back[arc]
            rows = flat.choices[p + 1] - flat.choices[p]
            at = flat.tables[back] + state.choice[v] * rows
            for c in range(rows):
                block.own[block.parents[i] * block.wide[0] + c] -= flat.entries[at + c]
        for h in range(flat.holdings[v], flat.holdings[v + 1]):
            price = state.running[flat.lasts[h]] - state.running[flat.firsts[h]]
            if price > 0.0:
                at = flat.nbytes_at[h]
                for c in range(width):
                    block.own[own + c] += price * flat.nbytes[at + c]


@internal
def _settle(flat: Flat, state: State, block: Block, count: int) -> None:
    """The neighbors' fields follow a block that was just exchanged; `found` holds the old."""
    for i in range(count):
        v, old = block.nodes[i], block.found[i]
        new = state.choice[v]
        if old == new:
            continue
        for a in range(flat.arcs[v], flat.arcs[v + 1]):
            w, back = flat.ends[a], flat.back[a]
            first, width = flat.choices[w], flat.choices[w + 1] - flat.choices[w]
            at, was = flat.tables[back] + new * width, flat.tables[back] + old * width
            for c in range(width):
                state.field[first + c] += flat.entries[at + c] - flat.entries[was + c]


@internal
def _solve(flat: Flat, block: Block, count: int, rows: int) -> None:
    """The best assignment of the block, into `found`."""
    for i in range(count):
        v, own = block.nodes[i], i * block.wide[0]
        width = flat.choices[v + 1] - flat.choices[v]
        for c in range(width):
            block.total[own + c] = block.own[own + c]
        for h in range(flat.holdings[v], flat.holdings[v + 1]):
            for r in range(rows):
                if flat.firsts[h] <= block.rows[r] < flat.lasts[h]:
                    at = flat.nbytes_at[h]
                    for c in range(width):
                        block.total[own + c] += block.dearer[r] * flat.nbytes[at + c]
    for i in range(count - 1, -1, -1):
        v, up, own = block.nodes[i], block.parents[i], i * block.wide[0]
        width = flat.choices[v + 1] - flat.choices[v]
        if up < 0:
            best = 0
            for c in range(1, width):
                if block.total[own + c] < block.total[own + best]:
                    best = c
            block.found[i] = best
            continue
        p = block.nodes[up]
        for d in range(flat.choices[p + 1] - flat.choices[p]):
            at = flat.tables[block.arcs[i]] + d * width
            lowest, best = block.total[own] + flat.entries[at], 0
            for c in range(1, width):
                cost = block.total[own + c] + flat.entries[at + c]
                if cost < lowest:
                    lowest, best = cost, c
            block.total[up * block.wide[0] + d] += lowest
            block.follow[own + d] = best
    for i in range(1, count):
        block.found[i] = block.follow[i * block.wide[0] + block.found[block.parents[i]]]


@internal
def _value(flat: Flat, block: Block, count: int) -> float:
    """The cost of `found` at the prices in force, with the edges inside the block."""
    cost = 0.0
    for i in range(count):
        cost += block.own[i * block.wide[0] + block.found[i]]
        if block.parents[i] >= 0:
            v = block.nodes[i]
            width = flat.choices[v + 1] - flat.choices[v]
            at = flat.tables[block.arcs[i]] + block.found[block.parents[i]] * width
            cost += flat.entries[at + block.found[i]]
    return float(cost)


@internal
def _swap(flat: Flat, state: State, block: Block, count: int) -> None:
    """Exchange the block's assignment with `found`; the rows follow. Twice is as before."""
    for i in range(count):
        v, new = block.nodes[i], block.found[i]
        old = state.choice[v]
        if old == new:
            continue
        for h in range(flat.holdings[v], flat.holdings[v + 1]):
            at = flat.nbytes_at[h]
            change = int(flat.nbytes[at + new] - flat.nbytes[at + old])
            if change:
                add(state.heap, state.pending, flat.firsts[h], flat.lasts[h], change)
        state.choice[v], block.found[i] = new, old
