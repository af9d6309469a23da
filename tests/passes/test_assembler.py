"""One assembler poses the problems of every limit as if each was posed alone."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.cost.prices import Prices
from autopar.passes.shard.model.assemble import Assembled, Assembler, assemble
from autopar.passes.shard.model.choices import MeshChoices
from autopar.passes.shard.model.costs import ReshardCosts
from autopar.passes.shard.model.merge_isomorphic import unmerged
from autopar.passes.shard.model.read import read_graph
from tests.passes.driving import ROOMY, setting, traced
from tests.toys import TOYS

LIMITS = (ROOMY, 40_000, 1, 3_000, ROOMY)


def same(found: Assembled, alone: Assembled) -> bool:
    mine, other = found.problem, alone.problem
    edges = list(zip(mine.edges, other.edges, strict=True))
    usages = list(zip(mine.usages, other.usages, strict=True))
    arrays = [
        *zip(mine.costs, other.costs, strict=True),
        *((a.table, b.table) for a, b in edges),
        *((a.nbytes, b.nbytes) for a, b in usages),
    ]
    return (
        found.choices == alone.choices
        and dict(found.uses) == dict(alone.uses)
        and mine.limit_bytes == other.limit_bytes
        and all((a.left, a.right) == (b.left, b.right) for a, b in edges)
        and all((a.node, a.first, a.last) == (b.node, b.first, b.last) for a, b in usages)
        and all(np.array_equal(a, b) for a, b in arrays)
    )


@pytest.mark.parametrize("name", TOYS)
def test_every_limit_has_the_problem_that_it_has_alone(name: str) -> None:
    fun, args = TOYS[name]
    given = setting((2, 2), "v5p:2x2x1")
    reading = read_graph(unmerged(traced(fun, *args).graph))
    choices = MeshChoices(given.mesh).of(reading)
    moves = ReshardCosts(Prices(given.cluster, given.mesh))
    shared = Assembler(reading, choices, moves)
    for limit in LIMITS:
        for exposed in (False, True):
            alone = assemble(reading, choices, moves, limit, all_exposed=exposed)
            assert same(shared.within(limit, exposed), alone)


def test_graphs_that_share_prices_have_the_problems_that_they_have_alone() -> None:
    """What is known of one graph's choices, by their ids, is no other graph's."""
    given = setting((2, 2), "v5p:2x2x1")
    prices = Prices(given.cluster, given.mesh)
    shared = ReshardCosts(prices)
    for fun, args in TOYS.values():
        reading = read_graph(unmerged(traced(fun, *args).graph))
        for limit in (ROOMY, 3_000):
            known = assemble(reading, shared.choices.of(reading), shared, limit)
            fresh = ReshardCosts(prices)
            assert same(known, assemble(reading, fresh.choices.of(reading), fresh, limit))


@pytest.mark.parametrize("name", TOYS)
def test_nothing_costs_less_where_every_move_is_waited_for(name: str) -> None:
    fun, args = TOYS[name]
    given = setting((2, 2), "v5p:2x2x1")
    reading = read_graph(unmerged(traced(fun, *args).graph))
    moves = ReshardCosts(Prices(given.cluster, given.mesh))
    assembler = Assembler(reading, MeshChoices(given.mesh).of(reading), moves)
    beside, waits = assembler.within(1).problem, assembler.within(1, True).problem
    for few, most in zip(beside.costs, waits.costs, strict=True):
        assert (few <= most).all()
    for edge, waiting in zip(beside.edges, waits.edges, strict=True):
        assert (edge.table <= waiting.table).all()


def test_choices_live_as_long_as_what_is_kept_by_their_ids() -> None:
    """Of a step that is priced again: the next tuple would get the id of one that is gone."""
    fun, args = TOYS["joined"]
    given = setting((2, 2), "v5p:2x2x1")
    reading = read_graph(unmerged(traced(fun, *args).graph))
    moves = ReshardCosts(Prices(given.cluster, given.mesh))
    assembler = Assembler(reading, MeshChoices(given.mesh).of(reading), moves)
    first = assembler.within(ROOMY)
    again = assembler.reusing_gathered().within(ROOMY)
    shared = first.uses.keys() & again.uses.keys()
    assert shared
    assert all(first.choices[first.uses[k]] is again.choices[again.uses[k]] for k in shared)
