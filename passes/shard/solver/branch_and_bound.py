"""Branch and bound over the elimination order: the best assignment of a narrow graph that fits.

1. **Tables.** At prices p >= 0 on the bytes of the memory rows, elimination leaves of every node v
   a table: what v and all that went before it cost at best, by v's choice and by those of the
   nodes that v then touched. A table that would be too large is split, and its parts take v's
   choice one by one: less than it costs, so still a bound (mini-buckets; Dechter and Rish, 2003).
2. **Prices.** One price on the rows that the cheapest assignment breaks is sought by halving, then
   each row's is moved by how far it is over or under its limit.
3. **Labels.** Back over the order, nodes are set one by one. A label is a start of an assignment;
   the tables tell what its best end costs:

       cost |  o       o   o            o  a label: its bound, as the rest costs at best
            |    o   o
            | ______x_________ known    x  what lies above the known answer goes
            |
            |____________________ bytes held so far

   A label goes that breaks a row even if all others hold their least, or that another with the same
   choices at the nodes still touched matches or beats in cost and in bytes (labels of the shortest
   path under resources; Irnich and Desaulniers, 2005). Bytes count only in so far as they can still
   break a row.
4. Where labels are too many the cheapest stay, and the bound is that of the best one that went;
   then all again with more of them, as long as there is work left.

Numpy alone: small problems do not wait for machine code.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from autopar.passes.shard.solver.problem import CsrForm, Floats, Ints, Problem, to_csr

Scope = tuple[int, ...]

_WIDEST = (70_000, 3_000_000)  # entries of a table while prices are sought, and then
_MOST_TABLES = 20  # of that size
_MOST_DIMS = 12
_AT_ONCE = 50_000  # entries
_FIRST_SHARE = 0.25  # of the cost, what the limits of the broken rows are worth at the first price
_DEARER = 4.0  # times the price while rows are broken
_HALVINGS, _MOVES = 5, 4
_POWER, _SLOWER, _PATIENCE = 0.5, 0.7, 3
_FAINT = 1e-3  # of the highest price, what every row's is at least before it moves
LABELS = (300, 1_000, 3_000, 10_000, 30_000)  # at once
_NEIGHBORS = 40  # cheaper labels that each is compared with
_ROWS_AT_ONCE = 8  # of their bytes
_CLOSE = 1e-9  # of the cost, what does not make an answer better
_BINDS = 1e-6  # share of the bound that a row's price must be worth to count
_LARGEST = 2**62  # that a number of a row may be: an int64 holds it
_MOST_WORK = 15_000_000  # with a count of labels, after which no more are tried: some 0.3 seconds


@dataclass(frozen=True)
class Bounded:
    """The best assignment found, () for none, and what any that fits costs at least.

    It is `proven` that there is none better, or none at all. The price is that of a byte at all
    binding times together; `work` is about how many numbers were looked at.
    """

    choice: tuple[int, ...] = ()
    bound_seconds: float = -float("inf")
    proven: bool = False
    seconds_per_byte: float = 0.0
    binding_times: tuple[int, ...] = ()
    work: int = 0


def branch_and_bound(
    problem: Problem, widest: tuple[int, int] = _WIDEST, labels: Sequence[int] = LABELS
) -> Bounded:
    """The best assignment of a graph that is not too wide, else nothing; exact with few labels."""
    buckets = _buckets(problem, widest[0])
    if buckets is None:
        return Bounded()
    search = _Search(problem, to_csr(problem), buckets)
    search.raise_bound()
    if buckets.split:
        search.use(_buckets(problem, widest[1]) or buckets)
    search.branch(labels)
    return search.bounded()


@dataclass(frozen=True)
class _Table:
    """A table of a node by its own choice and those of the nodes in `scope`, which go later.

    It is the sum of `edges`, shaped as it is. What is left when its node goes is added to the table
    `into`, its dims in the order `dims` and shaped as there; without a scope it is a number.
    """

    node: int
    scope: Scope
    edges: tuple[Floats, ...]
    into: int = -1
    dims: Scope = ()
    shape: Scope = ()


@dataclass(frozen=True)
class _Part:
    """A table, or an edge, that is to go into one of the tables of each node in its scope."""

    scope: Scope
    edge: Floats | None = None
    table: int = -1


def _buckets(problem: Problem, widest: int) -> _Buckets | None:
    """Step 1: which tables there will be, the node of the smallest first; None if too large."""
    sizes = [len(c) for c in problem.costs]
    parts: list[list[_Part]] = [[] for _ in sizes]
    for e in problem.edges:
        pair = (e.left, e.right) if e.left < e.right else (e.right, e.left)
        part = _Part(pair, e.table if e.left < e.right else e.table.T)
        for v in pair:
            parts[v].append(part)
    tables: list[_Table] = []
    entries = 0
    touched = [_near(own, v) for v, own in enumerate(parts)]
    joint = [_joint(sizes, (v, *near)) for v, near in enumerate(touched)]
    queue = [(size, v) for v, size in enumerate(joint)]
    heapq.heapify(queue)
    gone = [False] * len(sizes)
    while queue:
        size, v = heapq.heappop(queue)
        if gone[v] or size != joint[v]:
            continue  # an entry from before its neighbors changed
        gone[v] = True
        for group in _groups(parts[v], sizes, widest):
            scope = _near(group, v)
            entries += _joint(sizes, (v, *scope))
            if entries > _MOST_TABLES * widest:
                return None
            edges: list[Floats] = []
            for part in group:
                dims = tuple(part.scope.index(w) for w in (v, *scope) if w in part.scope)
                shape = tuple(sizes[w] if w in part.scope else 1 for w in (v, *scope))
                if part.edge is not None:
                    edges.append(part.edge.transpose(dims).reshape(shape))
                else:
                    left = tables[part.table]
                    tables[part.table] = replace(left, into=len(tables), dims=dims, shape=shape)
            for w in scope:
                parts[w].append(_Part(scope, table=len(tables)))
            tables.append(_Table(v, scope, tuple(edges)))
        for w in touched[v]:
            parts[w] = [part for part in parts[w] if v not in part.scope]
            touched[w] = _near(parts[w], w)
            joint[w] = _joint(sizes, (w, *touched[w]))
            heapq.heappush(queue, (joint[w], w))
    return _Buckets(sizes, tables, entries)


def _near(parts: Sequence[_Part], v: int) -> Scope:
    return tuple(sorted({w for part in parts for w in part.scope} - {v}))


def _joint(sizes: Sequence[int], scope: Scope) -> int:
    return math.prod(sizes[w] for w in scope)


def _groups(parts: Sequence[_Part], sizes: Sequence[int], widest: int) -> list[list[_Part]]:
    """The parts of a node, in as few tables as may be, the largest first."""
    groups: list[tuple[set[int], list[_Part]]] = []
    for part in sorted(parts, key=lambda p: -_joint(sizes, p.scope)):
        for scope, members in groups:
            joined = scope.union(part.scope)
            if _joint(sizes, tuple(joined)) <= widest and len(joined) <= _MOST_DIMS:
                scope |= joined
                members.append(part)
                break
        else:
            groups.append((set(part.scope), [part]))
    return [members for _, members in groups] or [[]]


class _Buckets:
    """The tables, filled anew for other costs of the nodes."""

    def __init__(self, sizes: Sequence[int], tables: Sequence[_Table], entries: int) -> None:
        self.sizes, self.tables, self.entries = tuple(sizes), tuple(tables), entries
        self.of_node: list[list[int]] = [[] for _ in sizes]
        for i, table in enumerate(tables):
            self.of_node[table.node].append(i)
        self._last_first = [*dict.fromkeys(table.node for table in reversed(tables))]
        self._parts: list[list[Floats]] = []  # that each table is the sum of: [own, others']
        self._least: list[Floats] = []  # by the choices of the others

    @property
    def split(self) -> bool:
        """True if a node's table was too large."""
        return len(self.tables) > len(self.sizes)

    def fill(self, costs: Sequence[Floats]) -> tuple[float, tuple[int, ...]]:
        """The bound under these costs of the nodes, and the assignment that is read off."""
        parts = [list(table.edges) for table in self.tables]
        self._parts, self._least = parts, []
        total = 0.0
        for i, table in enumerate(self.tables):
            own = costs[table.node] if i == self.of_node[table.node][0] else np.zeros(1)
            parts[i].append(own.reshape(-1, *(1,) * len(table.scope)))
            parts[i].sort(key=np.size)
            least = self._minimum(i)
            self._least.append(least)
            if table.scope:
                parts[table.into].append(least.transpose(table.dims).reshape(table.shape))
            else:
                total += float(least)
        choice: dict[int, int] = {}
        for v in self._last_first:
            choice[v] = int(self.regret(v, choice).argmin())
        return total, tuple(choice[v] for v in range(len(self.sizes)))

    def _minimum(self, i: int) -> Floats:
        """The least of a table over its own choices, some at a time: more would leave the cache."""
        table = self.tables[i]
        count, least = self.sizes[table.node], np.asarray(np.inf)
        step = max(1, _AT_ONCE // _joint(self.sizes, table.scope))
        for first in range(0, count, step):
            rows = [p[first : first + step] if len(p) > 1 else p for p in self._parts[i]]
            least = np.minimum(least, reduce(np.add, rows).min(axis=0))
        return least

    def regret(self, v: int, choices: Mapping[int, Ints] | Mapping[int, int]) -> Floats:
        """By how much each choice of a node lifts the bound: [choices of those after it, own]."""
        total = np.zeros((1, self.sizes[v]))
        for i in self.of_node[v]:
            at = [choices[w] for w in self.tables[i].scope]
            for part in self._parts[i]:
                lying = part.transpose(*range(1, part.ndim), 0)  # [others', own]
                own = [c if n > 1 else c * 0 for c, n in zip(at, lying.shape[:-1], strict=True)]
                total = total + lying[tuple(own)]
            total = total - np.expand_dims(self._least[i][tuple(at)], -1)
        return total


class _Rows:
    """The memory rows, and the bytes of each node's choices in them beyond its least."""

    def __init__(self, problem: Problem, form: CsrForm) -> None:
        csr = form.arrays
        self.slack = csr.slack.astype(np.float64)
        self.room = np.maximum(self.slack, 1.0)
        self.held = [np.zeros((len(c), len(self.slack))) for c in problem.costs]
        for v, held in enumerate(self.held):
            for h in range(csr.holdings[v], csr.holdings[v + 1]):
                at = csr.nbytes_at[h]
                nbytes = csr.nbytes[at : at + len(held)]
                held[:, csr.firsts[h] : csr.lasts[h]] += nbytes[:, None]

    def over(self, choice: Sequence[int]) -> Floats:
        """By how much of its room each row is over its limit under an assignment."""
        held = [h[c] for h, c in zip(self.held, choice, strict=True)]
        over: Floats = (np.sum(held, axis=0) - self.slack) / self.room
        return over


@dataclass(frozen=True)
class _Step:
    """A node to be set, and the nodes that tables of others still ask for once it is.

    Labels whose bytes are within the `room` may become answers that fit; bytes up to `sure` cannot
    break a row any more.
    """

    node: int
    touched: Scope
    room: Floats
    sure: Floats


@dataclass(frozen=True)
class _Labels:
    """Starts of assignments, one a row: their bounds, bytes, and choices at nodes still touched.

    Each goes on from a label of the step before, `origins`, with a choice of the step's node.
    """

    bounds: Floats
    held: Floats  # [label, row]
    touched: Mapping[int, Ints]
    origins: Ints
    choices: Ints

    def where(self, kept: Ints) -> _Labels:
        """Some of the labels."""
        touched = {w: column[kept] for w, column in self.touched.items()}
        return _Labels(
            self.bounds[kept], self.held[kept], touched, self.origins[kept], self.choices[kept]
        )


class _Search:
    """Steps 2 and 3: the best answer, the bound and the prices so far."""

    def __init__(self, problem: Problem, form: CsrForm, buckets: _Buckets) -> None:
        self._problem, self._form, self._buckets = problem, form, buckets
        self._rows = _Rows(problem, form)
        self._choice: tuple[int, ...] = ()
        self._seconds = float("inf")
        self._bound = self._root = -float("inf")
        self._prices = np.zeros(len(self._rows.slack))
        self._over = self._prices
        self._work = 0

    def _closed(self) -> bool:
        return self._bound >= self._worth

    @property
    def _worth(self) -> float:
        """The cost below which an answer is better than the best so far."""
        return self._seconds - _CLOSE * abs(self._seconds) if self._choice else float("inf")

    def offer(self, choice: tuple[int, ...]) -> None:
        """Keep an assignment if it fits and is the cheapest."""
        seconds = self._problem.seconds(choice)
        if seconds < self._seconds and self._problem.fits(choice):
            self._choice, self._seconds = choice, seconds

    def bounded(self) -> Bounded:
        """The answer, its bound, and the price of a byte."""
        worth = self._prices * self._rows.slack
        dear = worth > _BINDS * max(abs(self._bound), 1e-30)
        price = float(self._prices[dear].sum()) / self._form.bytes_per_unit
        times = tuple(int(t) for t in self._form.times[dear])
        bound = min(self._bound, self._seconds)
        return Bounded(self._choice, bound, self._closed(), price, times, self._work)

    # -- 2. Prices ---------------------------------------------------------------------------

    def raise_bound(self) -> None:
        """Halve one price for the rows that are broken without any; then each moves by itself."""
        self._ask(self._prices)
        broken = self._over > 0
        if self._closed() or not broken.any():
            return
        unit = broken / broken.sum() * abs(self._bound) / self._rows.room
        low, high, share = 0.0, float("inf"), _FIRST_SHARE
        for _ in range(_HALVINGS):
            if (self._ask(share * unit)[broken]).sum() > 0:
                low = share
            else:
                high = share
            share = _between(low, high)
        prices, over = self._faintest(), self._over
        average, power, stale = over, _POWER, 0
        for _ in range(_MOVES):
            if self._closed():
                return
            prices = prices * np.exp(power * np.clip(average, -1, 1))
            before = self._bound
            average = 0.5 * average + 0.5 * self._ask(prices)
            stale = 0 if self._bound > before else stale + 1
            if stale > _PATIENCE:
                prices, average, power, stale = self._faintest(), self._over, _SLOWER * power, 0

    def _faintest(self) -> Floats:
        faint: Floats = np.maximum(self._prices, _FAINT * self._prices.max())
        return faint

    def _ask(self, prices: Floats) -> Floats:
        """The tables at these prices; by how much the assignment that they tell is over."""
        total, choice = self._buckets.fill(self._priced(prices))
        self._work += self._buckets.entries
        over = self._rows.over(choice)
        self._root = total - float(prices @ self._rows.slack)
        if self._root > self._bound:
            self._bound, self._prices, self._over = self._root, prices, over
        self.offer(choice)
        return over

    def _priced(self, prices: Floats) -> list[Floats]:
        pairs = zip(self._problem.costs, self._rows.held, strict=True)
        return [cost + held @ prices for cost, held in pairs]

    def use(self, buckets: _Buckets) -> None:
        """Go on with other tables."""
        self._buckets = buckets

    # -- 3. Labels ---------------------------------------------------------------------------

    def branch(self, counts: Sequence[int]) -> None:
        """Set all nodes, with few labels and then with more, until the bound meets the answer."""
        self._ask(self._prices)  # the tables may be of other prices
        if self._closed():
            return
        steps = tuple(self._steps())
        for count in counts:
            before = self._work
            self._branch(steps, count)
            if self._closed() or self._work - before > _MOST_WORK:
                return

    def _steps(self) -> Iterator[_Step]:
        """The nodes in an order in which few are touched at once."""
        sizes, buckets = self._buckets.sizes, self._buckets
        scopes = [
            {w for i in tables for w in buckets.tables[i].scope} for tables in buckets.of_node
        ]
        needs = [len(scope) for scope in scopes]
        later: list[set[int]] = [set() for _ in sizes]  # the nodes that have each in their scope
        for v, scope in enumerate(scopes):
            for w in scope:
                later[w].add(v)
        touched, order = frozenset[int](), list[tuple[int, frozenset[int]]]()
        ready = {v for v, n in enumerate(needs) if not n}
        while ready:
            # What is touched is left when the last node goes that has it in its scope.
            left: dict[int, list[int]] = {}
            for w in touched:
                if len(later[w]) == 1:
                    left.setdefault(min(later[w]), []).append(w)
            joint = _joint(sizes, tuple(touched))
            widths = {
                v: joint * (sizes[v] if later[v] else 1) // _joint(sizes, tuple(left.get(v, ())))
                for v in ready
            }
            v = min(ready, key=lambda v: (widths[v], v))
            touched = frozenset(w for w in (*touched, v) if later[w] - {v})
            order.append((v, touched))
            ready.remove(v)
            for w in scopes[v]:
                later[w].discard(v)
            for w in later[v]:
                needs[w] -= 1
                if not needs[w]:
                    ready.add(w)
        held = [self._rows.held[v] for v, _ in order]
        least = np.sum([h.min(axis=0) for h in held], axis=0)
        most = np.sum([h.max(axis=0) for h in held], axis=0)
        for (v, touched), own in zip(order, held, strict=True):
            least, most = least - own.min(axis=0), most - own.max(axis=0)
            yield _Step(
                v, tuple(sorted(touched)), self._rows.slack - least, self._rows.slack - most
            )

    def _branch(self, steps: Sequence[_Step], count: int) -> None:
        """Step 3 with so many labels."""
        none = np.zeros(1, dtype=np.int64)
        held = np.zeros((1, len(self._rows.slack)))
        labels = _Labels(np.array([self._root]), held, {}, none, none)
        grown: list[_Labels] = []
        lost = float("inf")
        for step in steps:
            labels = self._extended(labels, step)
            self._work += len(labels.bounds) * (_NEIGHBORS + held.size)
            labels = labels.where(self._undominated(labels, step))
            if len(labels.bounds) > count:
                order = np.argsort(labels.bounds, kind="stable")
                lost = min(lost, float(labels.bounds[order[count]]))
                labels = labels.where(np.sort(order[:count]))
            self._work += len(labels.bounds) * max(self._buckets.sizes)
            grown.append(labels)
        if len(labels.bounds):
            at = int((labels.bounds - labels.held @ self._prices).argmin())
            choice = [0] * len(steps)
            for step, before in zip(reversed(steps), reversed(grown), strict=True):
                choice[step.node] = int(before.choices[at])
                at = int(before.origins[at])
            self.offer(tuple(choice))
        self._bound = max(self._bound, min(lost, self._seconds))

    def _extended(self, labels: _Labels, step: _Step) -> _Labels:
        """The labels with the choices of one more node that may lead to a better answer."""
        v = step.node
        bounds = labels.bounds[:, None] + self._buckets.regret(v, labels.touched)
        origins, choices = np.nonzero(bounds < self._worth)
        held = labels.held[origins] + self._rows.held[v][choices]
        fits = (held <= step.room).all(axis=1)
        origins, choices = origins[fits], choices[fits]
        return _Labels(
            bounds[origins, choices],
            held[fits],
            {w: choices if w == v else labels.touched[w][origins] for w in step.touched},
            origins,
            choices,
        )

    def _undominated(self, labels: _Labels, step: _Step) -> Ints:
        """The labels that none of the cheaper ones next to them matches or beats in bytes."""
        cost = labels.bounds - labels.held @ self._prices
        held = np.where(labels.held > step.sure, labels.held, 0.0)
        held = held[:, held.any(axis=0)]
        alike = _numbered([labels.touched[w] for w in step.touched], cost.size)
        # The cheapest of those that hold the same, and then each against those before it.
        order = np.lexsort((cost, *held.T, alike))
        again = np.diff(alike[order], prepend=-1) == 0
        again[1:] &= (held[order][1:] == held[order][:-1]).all(axis=1)
        order = order[~again]
        order = order[np.lexsort((cost[order], alike[order]))]
        alike, held = alike[order], held[order]
        # Most that do not beat another show it in their first rows: no more of them are compared.
        starts = range(0, held.shape[1], _ROWS_AT_ONCE)
        parts = [held[:, i : i + _ROWS_AT_ONCE].copy() for i in starts]
        beaten = np.zeros(order.size, dtype=np.bool_)
        for d in range(1, min(_NEIGHBORS, order.size - 1) + 1):
            near = np.flatnonzero(alike[d:] == alike[:-d])
            if not near.size:
                break
            near = near[~beaten[near + d]]
            for part in parts:
                near = near[(part[near] <= part[near + d]).all(axis=1)]
            beaten[near + d] = True
        kept: Ints = order[~beaten]
        return kept


def _between(low: float, high: float) -> float:
    """A price to try where `low` is too cheap and `high`, if it is finite, dear enough."""
    if math.isinf(high):
        return low * _DEARER
    return math.sqrt(low * high) if low else high / _DEARER


def _numbered(columns: Sequence[Ints], count: int) -> Ints:
    """A number for each row of some columns, the same for rows that are alike.

    Numbers that would be too large for the next column are counted through first.
    """
    numbers, kinds = np.zeros(count, dtype=np.int64), 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        if kinds * size >= _LARGEST:
            found, numbers = np.unique(numbers, return_inverse=True)
            kinds = found.size
        numbers, kinds = numbers * size + column, kinds * size
    return numbers
