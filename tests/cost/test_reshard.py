"""Prices of moves: against a search of its own, and the laws that any price of moving obeys."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder
from autopar.ir.sharding import MeshShape, Sharding, replicated
from autopar.ir.values import Value
from tests.toys import Tolls

LOCAL = 1e-8  # what a slice or a mask costs
CASES = (
    ("2", (8,)),
    ("2", (8, 6)),
    ("4", (4, 8)),
    ("2,2", (8,)),
    ("2,4", (8, 16)),
    ("4,2", (2, 8)),
    ("2,3", (6, 5)),
    ("2,2,2", (8, 4)),
    ("1,8", (8, 8)),
)


def tolls(mesh: str) -> Resharder:
    return Resharder(Tolls(MeshShape.of(mesh)))


def cluster_prices(mesh: str, cluster: str) -> Resharder:
    return Resharder(Prices(Cluster.parse(cluster), MeshShape.of(mesh)))


# -- a search that shares nothing with the code under test -------------------------------------

State = tuple[tuple[tuple[str, ...], ...], frozenset[str]]  # axes of each dim, partial axes


def subsets(axes: frozenset[str], order: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations([a for a in order if a in axes], count)


def neighbors(state: State, prices: Tolls, whole: int) -> Iterator[tuple[State, float]]:
    """Where one step leads, and its price; shapes that do not divide are sorted out later."""
    dims, partial = state
    mesh = prices.mesh
    local = whole // mesh.size([a for d in dims for a in d])
    free = [a for a in mesh.names if a not in partial and all(a not in d for d in dims)]
    for a in free:
        yield (dims, partial | {a}), LOCAL
    for some in subsets(partial, mesh.names):
        reduced = prices.joined("all-reduce", local, some)
        yield (dims, partial - set(some)), reduced
    for d, axes in enumerate(dims):

        def at(new: tuple[str, ...], d: int = d) -> tuple[tuple[str, ...], ...]:
            return (*dims[:d], new, *dims[d + 1 :])

        for a in free:
            yield (at((*axes, a)), partial), LOCAL
        for some in subsets(partial, mesh.names):
            price = prices.joined("reduce-scatter", local, some)
            yield (at((*axes, *some)), partial - set(some)), price
        for cut in range(len(axes)):
            head, tail = axes[:cut], axes[cut:]
            gathered = prices.joined("all-gather", local * mesh.size(tail), tail)
            yield (at(head), partial), gathered
            for to, others in enumerate(dims):
                if to != d:
                    new = [*at(head)]
                    new[to] = (*others, *tail)
                    price = prices.joined("all-to-all", local, tail)
                    yield (tuple(new), partial), price
        for order in itertools.permutations(axes):
            price = prices.joined("collective-permute", local, axes)
            yield (at(order), partial), price
        for i, b in itertools.product(range(len(axes)), free):
            if mesh.size((b,)) == mesh.size((axes[i],)):
                spanned = tuple(sorted({*axes, b}))
                price = prices.joined("collective-permute", local, spanned)
                yield (at((*axes[:i], b, *axes[i + 1 :])), partial), price


def cheapest(start: Sharding, shape: tuple[int, ...], prices: Tolls) -> dict[State, float]:
    """Dijkstra from one sharding to all."""
    whole = 4 * int(np.prod(shape))
    first: State = (start.dims, frozenset(start.partial))
    done: dict[State, float] = {}
    queue: list[tuple[float, int, State]] = [(0.0, 0, first)]
    count = itertools.count(1)
    while queue:
        so_far, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done[state] = so_far
        for after, price in neighbors(state, prices, whole):
            fits = all(n % prices.mesh.size(a) == 0 for n, a in zip(shape, after[0], strict=True))
            if fits and after not in done:
                heapq.heappush(queue, (so_far + price, next(count), after))
    return done


@pytest.mark.parametrize(("mesh", "shape"), CASES)
def test_prices_equal_a_search_of_their_own(mesh: str, shape: tuple[int, ...]) -> None:
    prices = Tolls(MeshShape.of(mesh))
    value = Value("%0", shape, "f32")
    table = Resharder(prices).table(value, True)
    rng = np.random.default_rng(0)
    states = list(table.index)
    for i in rng.choice(len(states), min(len(states), 12), replace=False):
        found = cheapest(states[i], shape, prices)
        assert len(found) == len(states)
        for after, j in table.index.items():
            expected = found[after.dims, frozenset(after.partial)]
            assert table.seconds[i, j] == pytest.approx(expected, rel=1e-9, abs=1e-15)


# -- laws --------------------------------------------------------------------------------------

REAL = (("8", "8xh100"), ("2,4", "v5e:2x4"), ("2,2,2", "8xcpu"), ("2,4", "2x4xh100"))


@pytest.mark.parametrize(("mesh", "cluster"), REAL)
def test_staying_is_free_and_detours_never_pay(mesh: str, cluster: str) -> None:
    value = Value("%0", (16, 8), "bf16")
    for partial in (False, True):
        seconds = cluster_prices(mesh, cluster).table(value, partial).seconds
        assert np.all(np.diagonal(seconds) == 0)
        assert np.all(np.isfinite(seconds))
        off = seconds[~np.eye(len(seconds), dtype=bool)]
        assert np.all(off > 0)
        for k in range(len(seconds)):
            detour = seconds[:, k, None] + seconds[None, k, :]
            assert np.all(seconds <= detour * (1 + 1e-12))


@pytest.mark.parametrize(("mesh", "cluster"), REAL)
def test_a_route_is_its_price_and_leads_there(mesh: str, cluster: str) -> None:
    prices = cluster_prices(mesh, cluster)
    value = Value("%0", (16, 8), "f32")
    states = list(prices.table(value, True).index)
    rng = np.random.default_rng(3)
    for _ in range(80):
        before, after = (states[int(rng.integers(len(states)))] for _ in range(2))
        route = prices.route(value, before, after)
        talk = sum(c.seconds for c in route.collectives)
        quiet = LOCAL * (len(route.steps) - len(route.collectives))
        assert route.seconds == pytest.approx(talk + quiet, rel=1e-9)
        assert route.seconds == prices.seconds(value, before, after)
        assert bool(route.steps) == (before != after)


def test_partial_sums_open_no_shortcut_between_whole_values() -> None:
    """The small table, which leaves partial sums out, has the same prices."""
    value = Value("%0", (8, 8), "f32")
    for mesh in ("8", "2,4", "2,2,2"):
        small = tolls(mesh).table(value, False)
        large = tolls(mesh).table(value, True)
        for a, b in itertools.product(small.index, repeat=2):
            narrow = small.seconds[small.index[a], small.index[b]]
            wide = large.seconds[large.index[a], large.index[b]]
            assert wide == pytest.approx(narrow, rel=1e-9)


# -- known answers -----------------------------------------------------------------------------

KNOWN = (
    ("[-, -] partial(data)", "[data, -]", ["reduce-scatter"]),
    ("[-, -] partial(data)", "[-, -]", ["all-reduce"]),
    ("[data, -]", "[-, -]", ["all-gather"]),
    ("[data, -]", "[-, data]", ["all-to-all"]),
    ("[-, -]", "[-, data]", ["slice"]),
    ("[-, -]", "[-, -] partial(data)", ["mask"]),
)


@pytest.mark.smoke
@pytest.mark.parametrize(("before", "after", "kinds"), KNOWN)
def test_textbook_moves(before: str, after: str, kinds: list[str]) -> None:
    value = Value("%0", (1024, 1024), "f32")
    prices = cluster_prices("8", "8xh100")
    named = {str(s): s for s in prices.table(value, True).index}
    route = prices.route(value, named[before], named[after])
    assert [s.kind for s in route.steps] == kinds


def test_bytes_are_of_the_whole_local_buffer() -> None:
    """4096 x 4096 floats are 64 MiB; over data=2 x model=4 a device holds 8 MiB."""
    value, prices = Value("%0", (4096, 4096), "f32"), cluster_prices("2,4", "8xh100")
    lies = Sharding((("data",), ("model",)))
    gathered = prices.route(value, lies, Sharding((("data",), ())))
    assert [(c.kind, c.nbytes, c.axes) for c in gathered.collectives] == [
        ("all-gather", 32 << 20, ("model",))
    ]
    summed = prices.route(value, Sharding(((), ("model",)), ("data",)), Sharding(((), ("model",))))
    assert [(c.kind, c.nbytes) for c in summed.collectives] == [("all-reduce", 16 << 20)]
    turned = prices.route(value, lies, Sharding((("data", "model"), ())))
    assert [(c.kind, c.nbytes) for c in turned.collectives] == [("all-to-all", 8 << 20)]


def test_keys_and_scalars_have_tables_too() -> None:
    prices = tolls("2,4")
    assert set(prices.table(Value("%0", (), "key<fry>"), False).index) == {replicated(0)}
    scalar = prices.table(Value("%0", (), "f32"), True)
    assert len(scalar.index) == 4
