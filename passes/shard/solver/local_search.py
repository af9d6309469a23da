r"""Local search: assignments that fit made cheaper, block by block, under noise that fades.

1. **Mend**: where rows are over their limit their bytes get dearer, and the nodes that hold there
   are set anew, until all rows are kept.
2. **Block**: a tree of nodes is grown from a root so that each node touches one node before it; all
   else stays. The best assignment of the tree follows exactly from its leaves up:

        r          total[v,c] = own[v,c] + sum over children w of
       / \             min_d (total[w,d] + table[v,w,c,d])
      v   w
      |            own[v] are the costs against all nodes that stay
      u

   Where the block's best breaks a row, that row's bytes get dearer for this block, and it is solved
   again; no assignment that breaks the limit is ever taken.
3. **Anneal**: costs are shaken by Gumbel noise (perturb and take the best; Papandreou and Yuille,
   2011), which fades over a cycle, and with it the dual's prices: first room is left where the
   dual says that it is dear, in the end only what fits counts.

The worst row is known at once from a tree over the rows (a segment tree): a node holds the greatest
of its two children plus what was added to its whole range (`pending`); `heap[1]` is the greatest.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.passes.compiled import compiled, internal
from autopar.passes.shard.solver.dual_ascent import held_rows, sums_before, total_cost, widest
from autopar.passes.shard.solver.effort import MOST_ENTRIES, AbstractMeter
from autopar.passes.shard.solver.problem import Csr, Floats, Ints

_NOTHING = -(2**60)


def grown(values: Ints) -> tuple[Ints, Ints]:
    """The heap over some rows and its pending additions."""
    size = 1 << max(len(values) - 1, 0).bit_length()
    heap = np.full(2 * size, _NOTHING, dtype=np.int64)
    heap[size : size + len(values)] = values
    level = size
    while level > 1:
        heap[level // 2 : level] = heap[level : 2 * level].reshape(-1, 2).max(axis=1)
        level //= 2
    return heap, np.zeros(size, dtype=np.int64)


@internal
def add(heap: Ints, pending: Ints, first: int, last: int, amount: int) -> None:
    """Add to the rows from `first` up to, but without, `last`."""
    size = len(pending)
    left, right = first + size, last + size
    while left < right:
        if left & 1:
            heap[left] += amount
            if left < size:
                pending[left] += amount
            left += 1
        if right & 1:
            right -= 1
            heap[right] += amount
            if right < size:
                pending[right] += amount
        left >>= 1
        right >>= 1
    for leaf in (first + size, last - 1 + size):
        p = leaf >> 1
        while p:
            heap[p] = max(heap[2 * p], heap[2 * p + 1]) + pending[p]
            p >>= 1


@internal
def worst_row(heap: Ints, pending: Ints) -> int:
    """A row where the value is greatest."""
    p = 1
    while p < len(pending):
        p = 2 * p if heap[2 * p] >= heap[2 * p + 1] else 2 * p + 1
    return p - len(pending)


_BLOCKS = (60, 200)  # the most nodes of a block, by worker
_HEATS = ((0.2, 0.02), (0.05, 0.5), (0.2, 0.005), (0.002, 0.1))  # by cycle and worker
_ROUND_ENTRIES, _MOST_ROUNDS = 5_500_000, 10  # with so many entries, one round of cycles
_SMALL_HEAT = 5.0  # times the heat of a small problem, whose answers lie far apart
_COLDEST = 0.002  # share of a cycle's heat that is left at its end
_MEND_ROUNDS = 200
_MEND_DEARER = 1.15  # times a row's price while it is over its limit
_CHUNKS = 12  # of a cycle that is limited by work
_OVERHEAD = 5_000  # of a round of mending in Python, in table entries
_GREEDY = 3  # entries of a descent, as a multiple of all entries
_MIX = 0x9E3779B97F4A7C15
_ATTEMPTS = 6
_BLOCK_DEARER = 2.0  # times a row's price when a block breaks it again
_EVERYTHING = 2**60
_MOST_ENTRIES = 300_000  # of a block's tables


class Worker:
    """An assignment that is being improved, with room for a block and a stream of chance."""

    def __init__(self, csr: Csr, seed: int, most: int) -> None:
        count = len(csr.choices) - 1
        self._csr = csr
        self._open = np.flatnonzero(np.diff(csr.choices) > 1)
        self._block = _block(count, max(1, min(most, len(self._open))), widest(csr))
        self._chance = np.array([(seed + 1) * _MIX % 2**64 | 1], dtype=np.uint64)
        self._field = np.zeros(len(csr.costs))
        self._holders = np.repeat(np.arange(count), np.diff(csr.holdings))
        self.choice = np.zeros(count, dtype=np.int64)
        self.take(self.choice)

    def take(self, choice: Ints) -> None:
        """Go on from an assignment."""
        self.choice = choice.copy()
        fill_field(self._csr, self.choice, self._field)
        self._heap, self._pending = grown(self._over())

    def _over(self) -> Ints:
        over: Ints = held_rows(self._csr, self.choice) - self._csr.slack
        return over

    @property
    def fits(self) -> bool:
        """True if the assignment keeps every row's limit."""
        return bool(self._heap[1] <= 0)

    @property
    def cost(self) -> float:
        """Of the assignment."""
        return total_cost(self._csr, self.choice)

    def run(self, entries: int, prices: Floats, heat: float, mending: Ints | None = None) -> int:
        """Set blocks anew, within the rows unless it is around the nodes `mending`.

        Returns how many table entries were looked at.
        """
        roots = self._open if mending is None else mending
        if not roots.size:
            return entries
        state = State(
            self.choice,
            self._field,
            self._heap,
            self._pending,
            sums_before(prices),
            self._chance,
        )
        return search(self._csr, state, self._block, roots, entries, heat, mending is None)

    def mend(self, prices: Floats, scale: float, meter: AbstractMeter, until: float) -> bool:
        """Make the rows over their limit dearer until none is; True if that worked."""
        csr, prices = self._csr, prices.copy()
        least = 1e-2 * scale / max(float(csr.slack.max(initial=1)), 1.0)
        for _ in range(_MEND_ROUNDS):
            if self.fits or meter.share > until:
                break
            over = self._over() > 0
            prices[over] = prices[over] * _MEND_DEARER + least
            least *= _MEND_DEARER
            before = np.concatenate([[0], np.cumsum(over)])
            roots = np.unique(self._holders[before[csr.lasts] > before[csr.firsts]])
            roots = roots[np.isin(roots, self._open)]
            widths = np.diff(csr.choices)[roots]
            entries = int(4 * (widths * widths + 10).sum())
            meter.spend(self.run(min(entries, MOST_ENTRIES), prices, 0.0, roots) + _OVERHEAD)
        return self.fits

    def descend(self, prices: Floats, meter: AbstractMeter, until: float) -> None:
        """Cheaper while it is easy: under the prices, under half of them, under none."""
        entries = min(_GREEDY * len(self._csr.entries) + 1000, MOST_ENTRIES)
        while meter.share < until:
            before = self.cost
            for fading in (1.0, 0.5, 0.0):
                meter.spend(self.run(entries, fading * prices, 0.0))
            if self.cost >= before * (1 - 1e-4):
                break


def _block(count: int, most: int, wide: int) -> Block:
    def whole(size: int, value: int = 0) -> Ints:
        return np.full(size, value, dtype=np.int64)

    return Block(
        nodes=whole(most),
        parents=whole(most),
        arcs=whole(most),
        place=whole(count, -1),
        touching=whole(count),
        edge=whole(count),
        wide=whole(1, wide),
        own=np.zeros(most * wide),
        total=np.zeros(most * wide),
        found=whole(most),
        rows=whole(16),
        dearer=np.zeros(16),
    )


def annealed(
    csr: Csr,
    prices: Floats,
    starts: Sequence[Ints],
    bound: float,
    meter: AbstractMeter,
    until: float,
    seed: int,
) -> Ints:
    """The cheapest assignment found from starts that fit, the best first, by two workers."""
    workers = [Worker(csr, 2 * seed + i, most) for i, most in enumerate(_BLOCKS)]
    heat = abs(bound) / max(int((np.diff(csr.choices) > 1).sum()), 1)
    best, cost = starts[0], total_cost(csr, starts[0])
    begin = meter.share
    # A small problem soon cools down to what one run of chance finds: it is given more of them.
    rounds = min(max(int((_ROUND_ENTRIES / max(len(csr.entries), 1)) ** 2), 1), _MOST_ROUNDS)
    if rounds == _MOST_ROUNDS:
        heat *= _SMALL_HEAT
    cycles = _HEATS * rounds
    with ThreadPoolExecutor(len(workers)) as pool:
        for cycle, heats in enumerate(cycles):
            first = begin + (until - begin) * cycle / len(cycles)
            last = begin + (until - begin) * (cycle + 1) / len(cycles)
            workers[0].take(best)
            workers[1].take(starts[(cycle + 1) % len(starts)] if cycle % 2 == 0 else best)
            _cool(workers, pool, prices, [heat * h for h in heats], meter, (first, last))
            for worker in workers:
                if worker.fits and worker.cost < cost:
                    best, cost = worker.choice.copy(), worker.cost
            if cost - bound <= 1e-7 * abs(cost):
                break
    return best


def _cool(
    workers: Sequence[Worker],
    pool: ThreadPoolExecutor,
    prices: Floats,
    heats: Sequence[float],
    meter: AbstractMeter,
    span: tuple[float, float],
) -> None:
    """A cycle: all workers side by side, in chunks, from their heat down to next to nothing."""
    for entries in meter.chunks(span[1] - span[0], len(workers) * _CHUNKS):
        share = meter.share
        if share >= span[1]:
            break
        done = min(max((share - span[0]) / (span[1] - span[0]), 0.0), 1.0)
        faded = max(0.0, 1 - 1.25 * done) * prices
        runs = [
            pool.submit(worker.run, entries, faded, heat * _COLDEST**done)
            for worker, heat in zip(workers, heats, strict=True)
        ]
        meter.spend(sum(run.result() for run in runs))


class Block(NamedTuple):
    """Room for one block; letters: i position in the block, v node."""

    nodes: Ints  # [i]
    parents: Ints  # [i] position of the node that it hangs on, -1 for a root
    arcs: Ints  # [i] its arc to that node
    place: Ints  # [v] position in the block, -1 outside
    touching: Ints  # [v] how many of the block's nodes are its neighbors
    edge: Ints  # nodes that touch the block, in the order met
    wide: Ints  # [0] the places of each node in the next two
    own: Floats  # [i, choice] costs against all that stays
    total: Floats  # [i, choice] with what hangs on it
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
    csr: Csr, state: State, block: Block, roots: Ints, entries: int, heat: float, hard: bool
) -> int:
    """Set blocks anew until so many table entries were looked at; returns how many it were.

    Under `heat`, costs are shaken. Where `hard`, no row may end over its limit, or further over.
    """
    done = 0
    while done < entries:
        root = roots[draw(state.chance, len(roots))]
        most = 1 + draw(state.chance, len(block.nodes))
        count = _grow(csr, state, block, root, most)
        for i in range(count):
            v = block.nodes[i]
            done += _weight(csr, v) + csr.arcs[v + 1] - csr.arcs[v]
        _improve(csr, state, block, count, heat, hard)
        _clear(csr, block, count)
    return int(done)


@internal
def _weight(csr: Csr, v: int) -> int:
    """About how many table entries a node adds to a block."""
    width = csr.choices[v + 1] - csr.choices[v]
    return int(width * width + 10)


@internal
def _grow(csr: Csr, state: State, block: Block, root: int, most: int) -> int:
    """Let a tree grow from a root by random nodes that touch it once; returns its size."""
    waiting = _take(csr, block, root, -1, 0, 0, 0)
    count, entries = 1, _weight(csr, root)
    while waiting and count < most and entries < _MOST_ENTRIES:
        pick = draw(state.chance, waiting)
        v = block.edge[pick]
        waiting -= 1
        block.edge[pick] = block.edge[waiting]
        if block.place[v] >= 0 or block.touching[v] != 1:
            continue
        for a in range(csr.arcs[v], csr.arcs[v + 1]):
            at = int(block.place[csr.ends[a]])
            if at >= 0:
                waiting = _take(csr, block, v, at, a, count, waiting)
                count += 1
                entries += _weight(csr, v)
                break
    return count


@internal
def _take(csr: Csr, block: Block, v: int, parent: int, arc: int, i: int, waiting: int) -> int:
    block.nodes[i], block.parents[i], block.arcs[i], block.place[v] = v, parent, arc, i
    for a in range(csr.arcs[v], csr.arcs[v + 1]):
        w = csr.ends[a]
        block.touching[w] += 1
        if block.place[w] < 0 and block.touching[w] == 1 and waiting < len(block.edge):
            block.edge[waiting] = w
            waiting += 1
    return waiting


@internal
def _clear(csr: Csr, block: Block, count: int) -> None:
    for i in range(count):
        v = block.nodes[i]
        block.place[v] = -1
        for a in range(csr.arcs[v], csr.arcs[v + 1]):
            block.touching[csr.ends[a]] = 0


@internal
def _improve(csr: Csr, state: State, block: Block, count: int, heat: float, hard: bool) -> bool:
    """Find a cheaper assignment of the block that fits, and take it."""
    _own_costs(csr, state, block, count)
    for i in range(count):
        block.found[i] = state.choice[block.nodes[i]]
    before = _value(csr, block, count)
    if heat > 0.0:
        _shake(csr, state, block, count, heat)
        before = _value(csr, block, count)
    allowed = max(0, state.heap[1]) if hard else _EVERYTHING
    rows = 0
    for _ in range(_ATTEMPTS):
        _solve(csr, block, count, rows)
        after = _value(csr, block, count)
        if after >= before - 1e-9 * abs(before):
            return False
        _swap(csr, state, block, count)
        over = state.heap[1] - allowed
        if over <= 0:
            _settle(csr, state, block, count)
            return True
        row = worst_row(state.heap, state.pending)
        _swap(csr, state, block, count)
        rows = _raise(block, rows, row, (before - after) / over)
    return False


@internal
def _shake(csr: Csr, state: State, block: Block, count: int, heat: float) -> None:
    for i in range(count):
        v = block.nodes[i]
        for c in range(csr.choices[v + 1] - csr.choices[v]):
            u = (draw(state.chance, 1 << 30) + 0.5) / (1 << 30)
            block.own[i * block.wide[0] + c] += heat * np.log(-np.log(u))


@internal
def _raise(block: Block, rows: int, row: int, price: float) -> int:
    for r in range(rows):
        if block.rows[r] == row:
            block.dearer[r] *= _BLOCK_DEARER
            return rows
    block.rows[rows], block.dearer[rows] = row, price
    return rows + 1


@compiled
def fill_field(csr: Csr, choice: Ints, field: Floats) -> None:
    """Fill in the cost of each choice of each node where all other nodes stay."""
    for v in range(len(csr.choices) - 1):
        first, width = csr.choices[v], csr.choices[v + 1] - csr.choices[v]
        for c in range(width):
            field[first + c] = csr.costs[first + c]
        for a in range(csr.arcs[v], csr.arcs[v + 1]):
            at = csr.tables[a] + choice[csr.ends[a]] * width
            for c in range(width):
                field[first + c] += csr.entries[at + c]


@internal
def _own_costs(csr: Csr, state: State, block: Block, count: int) -> None:
    """Each node's costs: its own, its bytes at their prices, its edges to what stays."""
    for i in range(count):
        v = block.nodes[i]
        first, width = csr.choices[v], csr.choices[v + 1] - csr.choices[v]
        own = i * block.wide[0]
        for c in range(width):
            block.own[own + c] = state.field[first + c]
        if block.parents[i] >= 0:
            arc, p = block.arcs[i], block.nodes[block.parents[i]]
            at = csr.tables[arc] + state.choice[p] * width
            for c in range(width):
                block.own[own + c] -= csr.entries[at + c]
            back = csr.back[arc]
            rows = csr.choices[p + 1] - csr.choices[p]
            at = csr.tables[back] + state.choice[v] * rows
            for c in range(rows):
                block.own[block.parents[i] * block.wide[0] + c] -= csr.entries[at + c]
        for h in range(csr.holdings[v], csr.holdings[v + 1]):
            price = state.running[csr.lasts[h]] - state.running[csr.firsts[h]]
            if price > 0.0:
                at = csr.nbytes_at[h]
                for c in range(width):
                    block.own[own + c] += price * csr.nbytes[at + c]


@internal
def _settle(csr: Csr, state: State, block: Block, count: int) -> None:
    """The neighbors' fields follow a block that was just exchanged; `found` holds the old."""
    for i in range(count):
        v, old = block.nodes[i], block.found[i]
        new = state.choice[v]
        if old == new:
            continue
        for a in range(csr.arcs[v], csr.arcs[v + 1]):
            w, back = csr.ends[a], csr.back[a]
            first, width = csr.choices[w], csr.choices[w + 1] - csr.choices[w]
            at, was = csr.tables[back] + new * width, csr.tables[back] + old * width
            for c in range(width):
                state.field[first + c] += csr.entries[at + c] - csr.entries[was + c]


@internal
def _solve(csr: Csr, block: Block, count: int, rows: int) -> None:
    """The best assignment of the block, into `found`."""
    for i in range(count):
        v, own = block.nodes[i], i * block.wide[0]
        width = csr.choices[v + 1] - csr.choices[v]
        for c in range(width):
            block.total[own + c] = block.own[own + c]
        for h in range(csr.holdings[v], csr.holdings[v + 1]):
            for r in range(rows):
                if csr.firsts[h] <= block.rows[r] < csr.lasts[h]:
                    at = csr.nbytes_at[h]
                    for c in range(width):
                        block.total[own + c] += block.dearer[r] * csr.nbytes[at + c]
    # From the leaves to the root, which is the first.
    for i in range(count - 1, 0, -1):
        own, up = i * block.wide[0], block.parents[i] * block.wide[0]
        v, p = block.nodes[i], block.nodes[block.parents[i]]
        width = csr.choices[v + 1] - csr.choices[v]
        total = block.total[own : own + width]
        for d in range(csr.choices[p + 1] - csr.choices[p]):
            at = csr.tables[block.arcs[i]] + d * width
            row = csr.entries[at : at + width]
            lowest = total[0] + row[0]
            for c in range(1, width):
                lowest = min(lowest, total[c] + row[c])
            block.total[up + d] += lowest
    # And back: what is best where the parent is set.
    for i in range(count):
        v, own = block.nodes[i], i * block.wide[0]
        width = csr.choices[v + 1] - csr.choices[v]
        total = block.total[own : own + width]
        if i:
            at = csr.tables[block.arcs[i]] + block.found[block.parents[i]] * width
            for c in range(width):
                total[c] += csr.entries[at + c]
        best = 0
        for c in range(1, width):
            if total[c] < total[best]:
                best = c
        block.found[i] = best


@internal
def _value(csr: Csr, block: Block, count: int) -> float:
    """The cost of `found` at the prices in force, with the edges inside the block."""
    cost = 0.0
    for i in range(count):
        cost += block.own[i * block.wide[0] + block.found[i]]
        if block.parents[i] >= 0:
            v = block.nodes[i]
            width = csr.choices[v + 1] - csr.choices[v]
            at = csr.tables[block.arcs[i]] + block.found[block.parents[i]] * width
            cost += csr.entries[at + block.found[i]]
    return float(cost)


@internal
def _swap(csr: Csr, state: State, block: Block, count: int) -> None:
    """Exchange the block's assignment with `found`; the rows follow. Twice is as before."""
    for i in range(count):
        v, new = block.nodes[i], block.found[i]
        old = state.choice[v]
        if old == new:
            continue
        for h in range(csr.holdings[v], csr.holdings[v + 1]):
            at = csr.nbytes_at[h]
            change = int(csr.nbytes[at + new] - csr.nbytes[at + old])
            if change:
                add(state.heap, state.pending, csr.firsts[h], csr.lasts[h], change)
        state.choice[v], block.found[i] = new, old
