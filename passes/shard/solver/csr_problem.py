"""A problem as flat arrays: choices of nodes, edges seen from both ends, memory rows.

Only times where the limit could be broken become rows, and of those only the ones that no
neighbor implies; bytes that are held whatever is chosen are taken off the limit beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.passes.shard.solver.problem import Floats, Ints, Problem, Usage

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
    """Lay a problem with finite costs out flat; two edges of one pair become one."""
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
    unit = _unit(problem)
    rows = _Rows(problem, unit)
    arrays = Csr(
        choices=starts(sizes),
        costs=_joined(problem.costs),
        arcs=starts([len(links) for links in near]),
        ends=np.array(ends, dtype=np.int64),
        back=np.array(back, dtype=np.int64),
        tables=starts([t.size for t in tables])[:-1],
        entries=_joined(tables),
        inbox=starts(sizes[owners])[:-1],
        **rows.arrays(len(sizes)),
    )
    return CsrForm(arrays, int(sizes[owners].sum()), rows.times, unit)


def starts(sizes: Sequence[int] | Ints) -> Ints:
    """The places where pieces of such sizes start in a row, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))]).astype(np.int64)


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
