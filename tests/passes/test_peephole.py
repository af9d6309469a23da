"""Rewrites of a listing: what they make of moves, and what they leave alone."""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder, Route
from autopar.ir.listing import Collective, ListingStep, LocalOp, Move, MoveStep
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.values import Value
from autopar.passes.lower.listing import combine_once, merge_scatters, move_once

MESH = MeshShape.of("data=2,model=4")
RESHARDER = Resharder(Prices(Cluster.parse("8xh100"), MESH))
SHAPE = (64, 64)
PARTIAL = Sharding(((), ()), ("model",))
ROWS, COLUMNS = Sharding((("model",), ())), Sharding(((), ("model",)))
SUMS = {(9,), (10,)}


def moved(
    source: str, result: str, before: Sharding = PARTIAL, after: Sharding = ROWS, by: str = "sum"
) -> Move:
    value = Value(result, SHAPE, "f32")
    route = RESHARDER.route(value, before, after)
    return Move(value, source, result, before, after, route.steps, by, route.collectives)


def added(one: str, other: str, result: str, at: int = 9, lies: Sharding = ROWS) -> LocalOp:
    return LocalOp((at,), (one, other), (result,), (lies, lies), (lies,))


def shown(steps: list[ListingStep]) -> list[str]:
    """Each instruction as "results <- sources: kinds"."""
    return [
        f"{s.result} <- {s.source}: {' '.join(step.kind for step in s.steps)}"
        if isinstance(s, Move)
        else f"{' '.join(s.results)} <- {' '.join(str(o) for o in s.operands)}"
        for s in steps
        if isinstance(s, Move | LocalOp)
    ]


def test_sums_that_are_only_added_are_combined_once() -> None:
    one = moved("a.raw", "a")
    steps: list[ListingStep] = [
        one, moved("b.raw", "b"), added("a", "b", "c"),
        moved("d.raw", "d"), added("c", "d", "e", at=10),
    ]  # fmt: skip
    found = combine_once(steps, ("e",), SUMS)
    assert shown(found) == [
        "c.partial <- a.raw b.raw",
        "e.partial <- c.partial d.raw",
        "e <- e.partial: reduce-scatter",
    ]
    (run, _, last) = found
    assert isinstance(run, LocalOp)
    assert isinstance(last, Move)
    assert run.operand_shardings == (PARTIAL, PARTIAL)
    assert run.result_shardings == (last.before,) == (PARTIAL,)
    assert (last.after, last.value.name, last.collectives) == (ROWS, "e", one.collectives)


def test_other_sums_stay() -> None:
    pair = [moved("a.raw", "a"), moved("b.raw", "b")]
    total = added("a", "b", "c")
    cases: list[tuple[list[ListingStep], tuple[str, ...], set[tuple[int]]]] = [
        ([*pair, total], ("c", "a"), SUMS),  # another reads one of them
        ([*pair, total, added("b", "c", "d", at=3)], ("d",), SUMS),
        ([*pair, total], ("c",), {(8,)}),  # no op that adds
        ([pair[0], moved("b.raw", "b", ROWS, ROWS), total], ("c",), SUMS),  # one is no partial sum
        ([pair[0], moved("b.raw", "b", by="max"), total], ("c",), SUMS),
        ([pair[0], added("a", "a", "c")], ("c",), SUMS),  # one value, twice
        ([*pair, added("a", "b", "c", lies=COLUMNS)], ("c",), SUMS),
    ]
    for steps, outputs, sums in cases:
        assert combine_once(steps, outputs, sums) == steps


def test_what_is_moved_on_goes_there_at_once() -> None:
    whole = Sharding(((), ()))
    steps: list[ListingStep] = [
        moved("a.raw", "a", after=whole), added("x", "y", "z"), moved("a", "a@1", whole, COLUMNS)
    ]  # fmt: skip
    found = move_once(steps, ("a@1",), MESH, RESHARDER)
    assert shown(found) == ["a@1 <- a.raw: reduce-scatter", "z <- x y"]
    assert isinstance(found[0], Move)
    assert (found[0].before, found[0].after) == (PARTIAL, COLUMNS)
    # Not where another wants it on its way, or where the larger piece would be held from then on.
    assert move_once(steps, ("a@1", "a"), MESH, RESHARDER) == steps
    grown: list[ListingStep] = [moved("a.raw", "a"), moved("a", "a@1", ROWS, whole)]
    assert move_once(grown, ("a@1",), MESH, RESHARDER) == grown


def test_an_all_reduce_that_is_sliced_is_a_reduce_scatter() -> None:
    both = ("data", "model")
    reduce = MoveStep("all-reduce", both)
    sent = Collective("all-reduce", both, 64, 1.0)
    rows = [MoveStep("slice", (axis,), 0) for axis in both]
    columns = MoveStep("slice", ("model",), 1)
    gather = MoveStep("all-gather", ("model",), 1)
    more = Collective("all-gather", ("model",), 32, 0.5)
    route = Route((gather, reduce, *rows), (more, sent), 1.5)
    assert merge_scatters(route) == Route(
        (gather, MoveStep("reduce-scatter", both, 0)),
        (more, Collective("reduce-scatter", both, 64, 1.0)),
        1.5,
    )
    for steps in ((reduce, rows[1], rows[0]), (reduce, rows[0]), (reduce, rows[0], columns)):
        kept = Route(steps, (sent,), 1.0)
        assert merge_scatters(kept) == kept
