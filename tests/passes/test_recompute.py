"""The cut is the cheapest of all choices, and no more is repeated than the limit asks for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.passes.shard.model.recompute import Cuts, Kept, Repeat, Tradeoff

NBYTES = st.integers(0, 20)
SECONDS = st.integers(0, 30)


@st.composite
def tradeoffs(draw: st.DrawFn) -> Tradeoff:
    """Up to seven values in a row, each made from earlier ones by an op, or by none."""
    count = draw(st.integers(1, 7))
    kept: list[Kept] = []
    repeats: list[Repeat] = []
    for i in range(count):
        maker = -1
        if draw(st.booleans()):
            maker = len(repeats)
            reads = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set[int]()
            names = (f"%{i}",)
            repeats.append(Repeat(names, float(draw(SECONDS)), tuple(sorted(reads))))
        seconds = float(draw(st.sampled_from([0, 0, 4, 20])))
        kept.append(Kept(f"%{i}", float(draw(NBYTES)), draw(st.booleans()), maker, i, seconds))
    return Tradeoff(tuple(kept), tuple(repeats))


def every_choice(given: Tradeoff) -> list[frozenset[int]]:
    numbers = range(len(given.repeats))
    sizes = range(len(given.repeats) + 1)
    return [frozenset(c) for n in sizes for c in itertools.combinations(numbers, n)]


def row(count: int, seconds: float = 1.0) -> Tradeoff:
    """Equal layers in a row: a stream that must wait, and a wider value made of it."""
    kept: list[Kept] = []
    repeats: list[Repeat] = []
    for i in range(count):
        kept.append(Kept(f"%s{i}", 1.0, True, -1, 2 * i))
        repeats.append(Repeat((f"%w{i}",), seconds, (2 * i,)))
        kept.append(Kept(f"%w{i}", 4.0, True, i, 2 * i + 1))
    return Tradeoff(tuple(kept), tuple(repeats))


@settings(max_examples=80)
@given(tradeoffs(), st.sampled_from([0.0, 0.1, 1.0, 5.0]))
def test_the_cut_is_the_cheapest_of_all_choices(given: Tradeoff, price: float) -> None:
    prices = [price] * len(given.kept)
    best = min(given.cost(again, prices) for again in every_choice(given))
    again = Cuts(given, lambda _: 0.0).cheapest(prices)
    assert given.cost(again, prices) == pytest.approx(best, abs=1e-6)


def test_no_more_layers_repeat_than_the_limit_asks_for_and_the_earliest_do() -> None:
    given = row(10)

    def peak(again: frozenset[int]) -> float:
        return 50.0 - 4.0 * len(again)

    level = Cuts(given, peak).within(40.0)
    assert level is not None
    assert level.again == {0, 1, 2}
    assert level.seconds == 3.0
    assert level.peak_bytes == 38.0


def test_a_cut_is_weighed_once_whatever_limits_are_asked_for() -> None:
    weighed: list[frozenset[int]] = []

    def peak(again: frozenset[int]) -> float:
        weighed.append(again)
        return 50.0 - 4.0 * len(again)

    cuts = Cuts(row(10), peak)
    for limit in (45.0, 40.0, 30.0, 40.0):
        found, alone = cuts.within(limit), Cuts(row(10), peak).within(limit)
        assert found == alone
    weighed.clear()
    assert cuts.within(40.0) is not None
    assert not weighed


def test_a_limit_out_of_reach_gives_all_of_the_way() -> None:
    given = row(4)
    found = Cuts(given, lambda again: 50.0 - 4.0 * len(again)).within(10.0)
    assert found is not None
    assert found.again == {0, 1, 2, 3}
    assert found.peak_bytes == 34.0


def test_nothing_is_answered_where_nothing_helps() -> None:
    assert Cuts(row(3), lambda again: 50.0 + len(again)).within(10.0) is None
    assert Cuts(Tradeoff((), ()), lambda again: 50.0).within(10.0) is None


def chain(count: int) -> Tradeoff:
    """Values that wait for the backward pass, each made from the one before by an op."""
    kept = tuple(Kept(f"%{i}", 1.0, True, i, i) for i in range(count))
    repeats = (Repeat((f"%{i}",), 1.0, (i - 1,) if i else ()) for i in range(count))
    return Tradeoff(kept, tuple(repeats))


def held_in_chain(count: int, again: frozenset[int]) -> float:
    """The most values held at once: the kept ones, and those made again until they were read."""
    kept = {i for i in range(count) if i not in again}
    made, most = set[int](), 0
    for read in reversed(range(count)):
        first = read
        while first in again and first not in made:
            made.add(first)
            first -= 1
        most = max(most, len(kept) + len(made))
        kept.discard(read)
        made.discard(read)
    return float(most)


@pytest.mark.parametrize(("count", "limit"), [(9, 6.0), (16, 8.0), (36, 12.0), (64, 18.0)])
def test_a_chain_is_cut_into_segments(count: int, limit: float) -> None:
    """At one price for all, all of a chain is kept, or all of it is made again at once."""
    given = chain(count)
    found = Cuts(given, lambda again: held_in_chain(count, again)).within(limit)
    assert found is not None
    assert found.peak_bytes == held_in_chain(count, found.again) <= limit
    assert 2 * count**0.5 - 1 <= found.peak_bytes  # no choice holds less
    assert found.seconds == len(found.again) < count


def test_segments_end_where_least_goes_on() -> None:
    """Three wide values a layer and a narrow one, of which the next layer is made."""
    kept: list[Kept] = []
    repeats: list[Repeat] = []
    for i in range(24):
        narrow = i % 4 == 3
        repeats.append(Repeat((f"%{i}",), 1.0, (i - 1,) if i else ()))
        kept.append(Kept(f"%{i}", 1.0 if narrow else 8.0, True, i, i))
    given = Tradeoff(tuple(kept), tuple(repeats))

    def peak(again: frozenset[int]) -> float:
        held = {i for i in range(24) if i not in again}
        made, most = set[int](), 0.0
        for read in reversed(range(24)):
            first = read
            while first in again and first not in made:
                made.add(first)
                first -= 1
            most = max(most, sum(kept[i].nbytes for i in held | made))
            held.discard(read)
            made.discard(read)
        return most

    found = Cuts(given, peak).within(36.0)
    assert found is not None
    assert found.peak_bytes <= 36.0
    # What the backward pass reads first need not be made again: the room is there.
    assert all(kept[i].nbytes == 1.0 for i in range(20) if i not in found.again)
