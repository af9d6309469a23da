"""Moving a value between any two shardings: the cheapest sequence of steps, and its price.

Shardings are the nodes of a small graph whose edges are single steps; a move is a shortest
path. All pairs are solved at once (Floyd and Warshall) for the planner's cost tables, single
paths are read back for the program, from the same edge prices.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from autopar.cluster.chip import Platform
from autopar.cost.collective import SCATTER_TIE
from autopar.errors import GraphError
from autopar.ir.listing import COLLECTIVES, Collective, MoveStep
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.values import Value, item_bytes

Floats = npt.NDArray[np.float64]

# A local slice or mask touches memory once; priced so that no path takes one without need.
_LOCAL_SECONDS = 1e-8

_TableKey = tuple[tuple[int, ...], int, bool]  # shape, bytes an item, with partial sums
_RouteKey = tuple[tuple[int, ...], int, Sharding, Sharding]  # shape, bytes an item, from, to


class CollectivePrices(Protocol):
    """The price of a collective: kind, bytes of the full local buffer, mesh axes -> seconds."""

    @property
    def mesh(self) -> MeshShape:
        """The mesh that axes name."""
        ...

    @property
    def platform(self) -> Platform:
        """The platform for which a compiler makes kernels."""
        ...

    def joined(self, kind: str, nbytes: int, axes: tuple[str, ...]) -> float:
        """Seconds of one collective that another has started already."""
        ...

    def elementwise(self, nbytes: float) -> float:
        """Seconds of a local pass that moves so many bytes to and from memory."""
        ...

    @property
    def filling_blocks(self) -> float:
        """The number of a GPU's blocks that fill its memory's bandwidth."""
        ...

    def in_blocks(self, loaded: float, blocks: int, stored: float) -> float:
        """Seconds of a kernel that few blocks of a GPU run."""
        ...


@dataclass(frozen=True)
class Route:
    """A move's steps in order, the collectives among them, and its seconds."""

    steps: tuple[MoveStep, ...]
    collectives: tuple[Collective, ...]
    seconds: float


@dataclass(frozen=True)
class PriceTable:
    """Seconds between every two shardings that fit one shape."""

    index: dict[Sharding, int]
    seconds: Floats  # [from, to]
    following: npt.NDArray[np.int64]  # [from, to]: the node after `from` on the path


@dataclass
class Resharder:
    """Prices moves over one mesh, remembering tables by shape."""

    prices: CollectivePrices
    _tables: dict[_TableKey, PriceTable] = field(
        default_factory=lambda: dict[_TableKey, PriceTable]()
    )
    _routes: dict[_RouteKey, Route] = field(default_factory=lambda: dict[_RouteKey, Route]())
    _spaces: dict[tuple[int, bool], _Space] = field(
        default_factory=lambda: dict[tuple[int, bool], _Space]()
    )

    def table(self, value: Value, partial: bool) -> PriceTable:
        """Prices between all shardings of a value; with partial sums among them if asked."""
        size = item_bytes(value.dtype)
        key = (value.shape, size, partial)
        if key not in self._tables:
            space = self._space(len(value.shape), partial)
            self._tables[key] = _all_pairs(space, value.shape, size, self.prices)
        return self._tables[key]

    def seconds(self, value: Value, before: Sharding, after: Sharding) -> float:
        """The price of one move."""
        table = self.table(value, bool(before.partial or after.partial))
        return float(table.seconds[table.index[before], table.index[after]])

    def route(self, value: Value, before: Sharding, after: Sharding) -> Route:
        """The cheapest steps of one move; raises GraphError where the value cannot lie so."""
        key = value.shape, item_bytes(value.dtype), before, after
        if key not in self._routes:
            self._routes[key] = self._read_back(value, before, after)
        return self._routes[key]

    def _read_back(self, value: Value, before: Sharding, after: Sharding) -> Route:
        table = self.table(value, bool(before.partial or after.partial))
        if before not in table.index or after not in table.index:
            raise GraphError(f"{value} cannot go from {before} to {after} on ({self.prices.mesh})")
        states, size = list(table.index), item_bytes(value.dtype)
        here, goal = table.index[before], table.index[after]
        steps: list[MoveStep] = []
        moved: list[Collective] = []
        while here != goal:
            there, mesh = int(table.following[here, goal]), self.prices.mesh
            local = states[here].shard_shape(value.shape, mesh)
            found = [s for s, after in _steps_from(states[here], mesh) if after == states[there]]
            priced = ((s, _step_seconds(s, local, size, self.prices)) for s in found)
            step, seconds = min(priced, key=_seconds_of)
            steps.append(step)
            if step.kind in COLLECTIVES:
                nbytes = _full_bytes(step, local, size, mesh)
                moved.append(Collective(step.kind, _axes_of(step), nbytes, seconds))
            here = there
        return Route(tuple(steps), tuple(moved), float(table.seconds[table.index[before], goal]))

    def _space(self, rank: int, partial: bool) -> _Space:
        key = (rank, partial)
        if key not in self._spaces:
            self._spaces[key] = _Space.of(self.prices.mesh, rank, partial)
        return self._spaces[key]


class _Step(NamedTuple):
    """A single step from a sharding, with all of its price that no shape changes."""

    after: int  # the number of the sharding that it leads to
    step: MoveStep
    kind: int  # the same for steps that cost the same where they send as many bytes
    whole: int  # times the local buffer, what it sends; 0 where it sends nothing
    dims: tuple[int, ...]  # a buffer with more than one piece before one of these is copied


@dataclass(frozen=True)
class _Space:
    """The shardings of values of one rank, and the single steps from each that stay among them.

    `counts` say into how many pieces each sharding cuts each dim.
    """

    states: tuple[Sharding, ...]
    counts: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[_Step, ...], ...]

    @classmethod
    def of(cls, mesh: MeshShape, rank: int, partial: bool) -> _Space:
        """The shardings over a mesh, with partial sums if asked."""
        states = tuple(_shardings(mesh.names, rank, partial))
        number = {s: i for i, s in enumerate(states)}
        kinds: dict[tuple[object, ...], int] = {}

        def read(step: MoveStep, after: Sharding) -> _Step:
            kind = kinds.setdefault((step.kind, step.axes, step.to_axes), len(kinds))
            sends = step.kind in COLLECTIVES
            return _Step(
                number[after], step, kind, sends * _whole(step, mesh), _between(step, rank)
            )

        return cls(
            states,
            tuple(tuple(map(mesh.size, s.dims)) for s in states),
            tuple(
                tuple(read(step, s) for step, s in _steps_from(state, mesh) if s in number)
                for state in states
            ),
        )


def _shardings(axes: Sequence[str], rank: int, partial: bool) -> Iterator[Sharding]:
    """The ways to give axes to dims, in each order within a dim, or to leave partial sums."""
    places = [-1, *range(rank)] + ([-2] if partial else [])
    for given in itertools.product(places, repeat=len(axes)):
        held = [[a for a, p in zip(axes, given, strict=True) if p == d] for d in range(rank)]
        left = tuple(a for a, p in zip(axes, given, strict=True) if p == -2)
        for orders in itertools.product(*(itertools.permutations(h) for h in held)):
            yield Sharding(tuple(orders), left)


def _all_pairs(
    space: _Space, shape: Sequence[int], size: int, prices: CollectivePrices
) -> PriceTable:
    sizes = tuple(shape)
    fitting = [
        i for i, counts in enumerate(space.counts)
        if not any(n % c for n, c in zip(sizes, counts, strict=True))
    ]  # fmt: skip
    place = {i: n for n, i in enumerate(fitting)}
    index = {space.states[i]: n for n, i in enumerate(fitting)}
    count = len(fitting)
    best = np.full((count, count), np.inf)
    following = np.tile(np.arange(count), (count, 1))
    np.fill_diagonal(best, 0.0)
    known: dict[tuple[int, int, bool], float] = {}  # most steps send as many bytes as others do
    for i, n in place.items():
        local = [m // c for m, c in zip(sizes, space.counts[i], strict=True)]
        before = [m > 1 for m in itertools.accumulate(local, operator.mul, initial=1)]
        local_bytes = size * math.prod(local)
        row = dict.fromkeys((n,), 0.0)
        for after, step, kind, whole, dims in space.steps[i]:
            if (j := place.get(after)) is None:
                continue
            seconds = _LOCAL_SECONDS
            if whole:
                nbytes, rearranged = whole * local_bytes, any(before[d] for d in dims)
                key = kind, nbytes, rearranged
                if key not in known:
                    known[key] = _sending_seconds(step, nbytes, rearranged, prices)
                seconds = known[key]
            row[j] = min(row.get(j, math.inf), seconds)
        best[n, [*row]] = [*row.values()]
    through, shorter = np.empty_like(best), np.empty(best.shape, dtype=np.bool_)
    for k in range(count):
        np.add(best[:, k, None], best[k], out=through)
        np.less(through, best, out=shorter)
        if shorter.any():
            np.copyto(best, through, where=shorter)
            np.copyto(following, following[:, k, None].copy(), where=shorter)
    return PriceTable(index, best, following)


def _step_seconds(
    step: MoveStep, local: Sequence[int], size: int, prices: CollectivePrices
) -> float:
    """The seconds of a single step from a device's piece of the shape `local`."""
    if step.kind not in COLLECTIVES:
        return _LOCAL_SECONDS
    nbytes = _full_bytes(step, local, size, prices.mesh)
    rearranged = any(math.prod(local[:d]) > 1 for d in _between(step, len(local)))
    return _sending_seconds(step, nbytes, rearranged, prices)


def _sending_seconds(
    step: MoveStep, nbytes: int, rearranged: bool, prices: CollectivePrices
) -> float:
    """The seconds of a step that sends so many bytes, of a buffer that is copied or not."""
    seconds = prices.joined(step.kind, nbytes, _axes_of(step))
    if rearranged:
        seconds += prices.elementwise(2 * nbytes)
        if step.kind == "reduce-scatter":
            # It is also what compilers make of an all-reduce that is sliced at once.
            reduced = prices.joined("all-reduce", nbytes, step.axes)
            seconds = min(seconds, SCATTER_TIE * reduced)
    return seconds


def _between(step: MoveStep, rank: int) -> tuple[int, ...]:
    """The dims for which the buffer is copied, so that the devices' parts lie one after the other.

    Where there is more than one piece before a dim that lies between others, that is. Compilers
    choose layouts in which the first or the last dim is outermost for nothing, as matrix products
    read either; a dim between others that are really there costs a pass through memory.
    """
    if step.kind in ("all-reduce", "collective-permute"):
        return ()
    return tuple(d for d in (step.dim, step.to_dim) if 0 < d < rank - 1)


def _seconds_of(priced: tuple[MoveStep, float]) -> float:
    return priced[1]


def _axes_of(step: MoveStep) -> tuple[str, ...]:
    """The axes that a collective spans."""
    return tuple(sorted({*step.axes, *step.to_axes})) if step.to_axes else step.axes


def _full_bytes(step: MoveStep, local: Sequence[int], size: int, mesh: MeshShape) -> int:
    """Bytes of the local buffer, whole over the step's axes: gathered, or not yet scattered."""
    return size * math.prod(local) * _whole(step, mesh)


def _whole(step: MoveStep, mesh: MeshShape) -> int:
    """Times the local buffer, what a collective's whole one is."""
    return mesh.size(step.axes) if step.kind == "all-gather" else 1


def _steps_from(state: Sharding, mesh: MeshShape) -> Iterator[tuple[MoveStep, Sharding]]:
    """The single steps from a sharding, with the sharding that each leads to."""
    used = set(state.axes())
    free = [a for a in mesh.names if a not in used]
    for d, axes in enumerate(state.dims):
        yield from _gathers(state, d, axes)
        for a in free:
            yield MoveStep("slice", (a,), d), _with(state, d, (*axes, a))
        for some in _some(state.partial):
            left = tuple(p for p in state.partial if p not in some)
            scattered = Sharding(_with(state, d, (*axes, *some)).dims, left)
            yield MoveStep("reduce-scatter", some, d), scattered
        yield from _exchanges(state, d, axes)
        if axes:
            yield from _permutes(state, d, axes, free, mesh)
    for some in _some(state.partial):
        left = tuple(p for p in state.partial if p not in some)
        yield MoveStep("all-reduce", some), Sharding(state.dims, left)
    for a in free:
        partial = tuple(n for n in mesh.names if n in {*state.partial, a})
        yield MoveStep("mask", (a,)), Sharding(state.dims, partial)


def _some(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The non-empty subsets of some axes, in mesh order."""
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


def _with(state: Sharding, d: int, axes: tuple[str, ...]) -> Sharding:
    return Sharding((*state.dims[:d], axes, *state.dims[d + 1 :]), state.partial)


def _gathers(state: Sharding, d: int, axes: tuple[str, ...]) -> Iterator[tuple[MoveStep, Sharding]]:
    for start in range(len(axes)):
        yield MoveStep("all-gather", axes[start:], d), _with(state, d, axes[:start])


def _exchanges(
    state: Sharding, d: int, axes: tuple[str, ...]
) -> Iterator[tuple[MoveStep, Sharding]]:
    for start in range(len(axes)):
        for to in range(len(state.dims)):
            if to != d:
                fewer = _with(state, d, axes[:start])
                moved = axes[start:]
                yield MoveStep("all-to-all", moved, d, to), _with(fewer, to, state.dims[to] + moved)


def _permutes(
    state: Sharding, d: int, axes: tuple[str, ...], free: Sequence[str], mesh: MeshShape
) -> Iterator[tuple[MoveStep, Sharding]]:
    for order in itertools.permutations(axes):
        if order != axes:
            yield MoveStep("collective-permute", axes, d, -1, order), _with(state, d, order)
    for position, a in enumerate(axes):
        for b in free:
            if mesh.size((a,)) == mesh.size((b,)):
                other = (*axes[:position], b, *axes[position + 1 :])
                step = MoveStep("collective-permute", axes, d, -1, other)
                yield step, _with(state, d, other)
