"""The sharding problem: pick one choice a node, pay nodes and edges, keep within memory.

Legend: x[v,c] is 1 where node v takes choice c; e[u,v,c,d] is 1 where u takes c and v takes d.

    minimize    sum x[v,c] cost[v,c]  +  sum e[u,v,c,d] table[u,v,c,d]
    subject to  sum_c x[v,c] = 1                          for every node
                sum_d e[u,v,c,d] = x[u,c], likewise for v  for every edge
                sum of x[v,c] usage[v,c] live at t <= limit  for every time t

It is the form of the IOPDDL contest problems (google/iopddl). `Csr` is the same as flat arrays, for
the parts of the solver that run as machine code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Edge:
    """Seconds for every pair of choices of two nodes."""

    left: int
    right: int
    table: Floats  # [choices of left, choices of right]


@dataclass(frozen=True)
class Usage:
    """Bytes that a node's choice holds from time `first` to time `last`, both included."""

    node: int
    first: int
    last: int
    nbytes: Floats  # [choices]


@dataclass(frozen=True)
class Copy:
    """Bytes that a move between two nodes' choices holds from time `first` to `last`, included.

    No memory row counts them, as it takes both nodes to know. What holds little is looked for with
    them.
    """

    left: int
    right: int
    first: int
    last: int
    seconds: Floats  # [choices of left, choices of right] of the move: 0 where nothing moves
    nbytes: Floats  # that a move holds, as `seconds` or of one choice at one of the ends

    @cached_property
    def held(self) -> Floats:
        """[choices of left, choices of right] bytes."""
        return np.where(np.isfinite(self.seconds) & (self.seconds > 0), self.nbytes, 0.0)


@dataclass(frozen=True)
class Problem:
    """Nodes with choice costs in seconds, edges, memory use over time, and the limit in bytes."""

    costs: tuple[Floats, ...]  # per node [choices]
    edges: tuple[Edge, ...]
    usages: tuple[Usage, ...] = ()
    limit_bytes: float = float("inf")

    @cached_property
    def horizon(self) -> int:
        """The last time at which anything is held, plus one."""
        return max((u.last for u in self.usages), default=-1) + 1

    def seconds(self, choice: Sequence[int]) -> float:
        """The objective of a full assignment."""
        nodes = sum(float(c[i]) for c, i in zip(self.costs, choice, strict=True))
        return nodes + sum(float(e.table[choice[e.left], choice[e.right]]) for e in self.edges)

    def over_time(self, nbytes: Callable[[Usage], float]) -> Floats:
        """Bytes held at each time, by those of each usage."""
        change = np.zeros(self.horizon + 1)
        for usage in self.usages:
            held = nbytes(usage)
            change[usage.first] += held
            change[usage.last + 1] -= held
        return np.cumsum(change)[:-1]

    def held_bytes(self, choice: Sequence[int]) -> Floats:
        """Bytes held at each time under an assignment."""
        return self.over_time(lambda u: u.nbytes[choice[u.node]])

    @cached_property
    def needed_bytes(self) -> float:
        """A bound on the peak of any assignment: at each time every node at its smallest."""
        return float(self.over_time(lambda u: float(u.nbytes.min())).max(initial=0.0))

    @property
    def most_bytes(self) -> float:
        """The limit, up to rounding."""
        return self.limit_bytes * (1 + 1e-9)

    @property
    def fits_nowhere(self) -> bool:
        """True if no assignment keeps the limit, by the bound alone."""
        return self.needed_bytes > self.most_bytes

    def peak_bytes(self, choice: Sequence[int]) -> float:
        """The most that is ever held."""
        held = self.held_bytes(choice)
        return float(held.max()) if held.size else 0.0

    def fits(self, choice: Sequence[int]) -> bool:
        """True if the limit is kept, up to rounding."""
        return self.peak_bytes(choice) <= self.most_bytes

    def worst_times(self, choice: Sequence[int]) -> list[int]:
        """The worst time of each quarter of the step that is over the limit."""
        held = self.held_bytes(choice)
        parts = [part for part in np.array_split(np.arange(len(held)), 4) if len(part)]
        worst = [int(part[held[part].argmax()]) for part in parts]
        return [t for t in worst if held[t] > self.most_bytes]


@dataclass(frozen=True)
class Narrowed:
    """The problem over the choices that are left, and for each node which old ones they are."""

    problem: Problem
    left: tuple[Ints, ...]

    def restore(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The same assignment in the old numbering."""
        return tuple(int(keep[c]) for keep, c in zip(self.left, choice, strict=True))


def narrow(problem: Problem, left: Sequence[Ints]) -> Narrowed:
    """Keep only the choices listed for each node."""
    costs = tuple(c[k] for c, k in zip(problem.costs, left, strict=True))
    edges = tuple(
        Edge(e.left, e.right, e.table.take(left[e.left], 0).take(left[e.right], 1))
        for e in problem.edges
    )
    usages = tuple(Usage(u.node, u.first, u.last, u.nbytes[left[u.node]]) for u in problem.usages)
    return Narrowed(replace(problem, costs=costs, edges=edges, usages=usages), tuple(left))


# -- the same as flat arrays -----------------------------------------------------------------------
#
# Choices of nodes, edges seen from both ends, memory rows. Only times where the limit could be
# broken become rows, and of those only the ones that no neighbor implies; bytes that are held
# whatever is chosen are taken off the limit beforehand.


_UNITS = 2.0**50  # what the limit becomes where bytes are not whole numbers


class Csr(NamedTuple):
    """The arrays; letters: v node, a arc (an edge seen from one end), h holding (a usage)."""

    choices: Ints  # [v + 1] where each node's choices start in `costs`
    costs: Floats
    arcs: Ints  # [v + 1] where each node's arcs start
    ends: Ints  # [a] the other node
    back: Ints  # [a] the same edge seen from there
    tables: Ints  # [a] where the table starts in `entries`, as [other's choice, own choice]
    entries: Floats
    inbox: Ints  # [a] where the message from the other node starts, one number an own choice
    holdings: Ints  # [v + 1] where each node's holdings start
    firsts: Ints  # [h] first row
    lasts: Ints  # [h] one more than the last row
    nbytes_at: Ints  # [h] where the bytes of each choice start in `nbytes`
    nbytes: Ints
    slack: Ints  # [row] bytes that choices may hold beyond their least


class CsrForm(NamedTuple):
    """The arrays, the number of messages, the time of each row, and what rounding there was."""

    arrays: Csr
    message_count: int
    times: Ints
    bytes_per_unit: float

    @property
    def fits_nowhere(self) -> bool:
        """True if the least bytes of all nodes together already break the limit."""
        return bool((self.arrays.slack < 0).any())


def to_csr(problem: Problem) -> CsrForm:
    """Lay a problem out flat, what is forbidden at a finite cost; edges of one pair become one."""
    sizes = np.array([len(c) for c in problem.costs], dtype=np.int64)
    near: list[dict[int, Floats]] = [{} for _ in problem.costs]
    for e in problem.edges:
        held = near[e.left].get(e.right)
        table = e.table if held is None else held + e.table
        near[e.left][e.right], near[e.right][e.left] = table, table.T
    ends = [w for links in near for w in links]
    owners = [v for v, links in enumerate(near) for _ in links]
    where = {pair: a for a, pair in enumerate(zip(owners, ends, strict=True))}
    back = [where[w, v] for v, w in zip(owners, ends, strict=True)]
    tables = [table.T.ravel() for links in near for table in links.values()]
    costs, entries = _joined(problem.costs), _joined(tables)
    forbidden = forbidden_cost(costs, entries, len(problem.costs) + len(problem.edges))
    unit = _unit(problem)
    rows = _Rows(problem, unit)
    arrays = Csr(
        choices=starts(sizes),
        costs=np.where(np.isinf(costs), forbidden, costs),
        arcs=starts([len(links) for links in near]),
        ends=np.array(ends, dtype=np.int64),
        back=np.array(back, dtype=np.int64),
        tables=starts([t.size for t in tables])[:-1],
        entries=np.where(np.isinf(entries), forbidden, entries),
        inbox=starts(sizes[owners])[:-1],
        **rows.arrays(len(sizes)),
    )
    return CsrForm(arrays, int(sizes[owners].sum()), rows.times, unit)


def starts(sizes: Sequence[int] | Ints) -> Ints:
    """The places where pieces of such sizes start in a row, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))]).astype(np.int64)


def forbidden_cost(costs: Floats, entries: Floats, parts: int) -> float:
    """A finite cost in place of infinity: above any allowed one of so many nodes and edges.

    What is added up from infinities, as searches do, is no number.
    """
    finite = (np.abs(a[np.isfinite(a)]).max(initial=0.0) for a in (costs, entries))
    return 2.0 * parts * float(sum(finite)) or 1.0


def _joined(parts: Sequence[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *parts])


def _unit(problem: Problem) -> float:
    whole = all((u.nbytes == np.rint(u.nbytes)).all() for u in problem.usages)
    return 1.0 if whole or not np.isfinite(problem.limit_bytes) else problem.limit_bytes / _UNITS


class _Rows:
    """The times that are rows, and the bytes of each holding there beyond its least."""

    def __init__(self, problem: Problem, unit: float) -> None:
        self._unit = unit
        self.times = np.zeros(0, dtype=np.int64)
        self._slack = np.zeros(0, dtype=np.int64)
        self._held: list[tuple[Usage, Ints]] = []
        if problem.usages and np.isfinite(problem.limit_bytes):
            self._build(problem)

    def _build(self, problem: Problem) -> None:
        # The tolerance of `Problem.fits` decides what still counts as within the limit.
        limit = int(np.floor(problem.limit_bytes / self._unit * (1 + 1e-9)))
        horizon = problem.horizon
        base, spread = np.zeros((2, horizon + 1), dtype=np.int64)
        for u in problem.usages:
            units = np.ceil(u.nbytes / self._unit).astype(np.int64)
            extra = units - units.min()
            for row, held in ((base, units.min()), (spread, extra.max())):
                row[u.first] += held
                row[u.last + 1] -= held
            if extra.any():
                self._held.append((u, extra))
        slack = limit - np.cumsum(base)[:-1]
        binding = np.cumsum(spread)[:-1] > slack
        opens, closes = np.zeros((2, horizon + 1), dtype=np.bool_)
        for u, _ in self._held:
            opens[u.first] = closes[u.last + 1] = True
        self.times = _undominated(slack, binding, opens, closes)
        self._slack = slack[self.times]

    def arrays(self, node_count: int) -> dict[str, Ints]:
        """Holdings by node; those of one node over the same rows are one."""
        of: list[dict[tuple[int, int], Ints]] = [{} for _ in range(node_count)]
        for u, extra in self._held:
            first = int(np.searchsorted(self.times, u.first))
            last = int(np.searchsorted(self.times, u.last, side="right"))
            if first < last:
                held = of[u.node].get((first, last))
                of[u.node][first, last] = extra if held is None else held + extra
        spans = [span for links in of for span in links]
        weights = [extra for links in of for extra in links.values()]
        return {
            "holdings": starts([len(links) for links in of]),
            "firsts": np.array([s[0] for s in spans], dtype=np.int64),
            "lasts": np.array([s[1] for s in spans], dtype=np.int64),
            "nbytes_at": starts([w.size for w in weights])[:-1],
            "nbytes": np.concatenate([np.zeros(0, dtype=np.int64), *weights]),
            "slack": self._slack,
        }


def _undominated(
    slack: Ints,
    binding: npt.NDArray[np.bool_],
    opens: npt.NDArray[np.bool_],
    closes: npt.NDArray[np.bool_],
) -> Ints:
    """Times that could break the limit and that no later or earlier row implies.

    Between two rows, what is live only grows where nothing closes, and only shrinks where nothing
    opens; the row with less is implied where its slack is no smaller.
    """
    opened, closed = np.cumsum(opens), np.cumsum(closes)
    kept: list[int] = []
    for t in np.flatnonzero(binding):
        implied = False
        while kept:
            last = kept[-1]
            grows = closed[t] == closed[last]
            shrinks = opened[t] == opened[last]
            if shrinks and slack[t] >= slack[last]:
                implied = True
                break
            if not (grows and slack[last] >= slack[t]):
                break
            kept.pop()
        if not implied:
            kept.append(int(t))
    return np.array(kept, dtype=np.int64)
