"""Layers: the repeated blocks of a model, cheapest cuts under even work, cuts by hand."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import GraphError
from autopar.ir.batching import Batching
from autopar.ir.graph import Graph
from autopar.ir.record import parse_graph
from autopar.ir.stages import LayerSequence
from autopar.passes.base import Single
from autopar.passes.layer.fixed import Fixed
from autopar.passes.layer.forward_pass import forward_of
from autopar.passes.layer.min_cut import MinCut, Repeat, cheapest_cuts, find_repeats
from tests.frontend.tracing import graph_of, shape, zoo_step
from tests.passes.driving import setting

HERE = setting("a=1")


def layered(graph: Graph, layers: int | None = None) -> LayerSequence:
    """The layers of a whole step."""
    sequence = MinCut(layers).run(Batching.whole(graph), HERE)
    sequence.verify()
    return sequence


def _deep(count: int, width: int = 16, head: int = 0) -> Graph:
    """So many equal layers, with a wide head if one is asked for."""

    def step(ws: Any, w: Any, x: Any) -> Any:
        def loss(ws: Any, w: Any) -> Any:
            h = x
            for i in range(count):
                with jax.named_scope(f"layer{i}"):
                    h = h + jnp.tanh(h @ ws[i])
            with jax.named_scope("head"):
                return jnp.sum((h @ w if head else h) ** 2)

        grads = jax.grad(loss, argnums=(0, 1))(ws, w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, (ws, w), grads)

    ws = [shape(width, width)] * count
    return graph_of(step, ws, shape(width, max(head, 1)), shape(8, width))


# -- blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 7, 12])
def test_equal_layers_are_layers_and_priced_once(count: int) -> None:
    layers = layered(_deep(count)).layers
    assert [layer.name for layer in layers] == [f"layer{i}" for i in range(count)]
    # The first and the last may differ: one has no cotangent to give, the other has the loss.
    assert [layer.same_as for layer in layers[2:-1]] == [1] * max(0, count - 3)


def test_a_large_head_is_a_layer_of_its_own_and_a_small_one_is_not() -> None:
    assert [layer.name for layer in layered(_deep(4, head=64)).layers][-2:] == ["layer3", "head"]
    assert len(layered(_deep(4, width=64, head=2)).layers) == 4


def test_a_transformer_is_embedding_blocks_and_head() -> None:
    layers = layered(zoo_step("gpt").graph).layers
    assert [layer.name for layer in layers] == ["Gpt/wte", "Gpt/h0", "Gpt/h1", "Gpt/head"]
    assert [layer.same_as for layer in layers] == [-1, -1, 1, -1]
    assert len({layer.cut_bytes for layer in layers[:-1]}) == 1  # the residual stream alone


def test_a_layer_of_several_blocks_has_their_range() -> None:
    graph = zoo_step("gpt").graph
    ends = [layer.last + 1 for layer in layered(graph).layers]
    found = Fixed((ends[0], ends[2])).run(Batching.whole(graph), HERE).layers
    assert [layer.name for layer in found] == ["Gpt/wte", "Gpt/h0..1", "Gpt/head"]


def test_blocks_begin_where_a_cut_costs_least() -> None:
    forward = forward_of(Batching.whole(zoo_step("gpt").graph))
    (repeat,) = find_repeats(forward)
    assert repeat.count == 2
    inside = range(repeat.start, repeat.start + repeat.period)
    assert forward.crossing[repeat.start - 1] == min(forward.crossing[i] for i in inside)


def test_two_stacks_of_blocks_are_both_found() -> None:
    def step(a: Any, b: Any, x: Any) -> Any:
        def loss(a: Any, b: Any) -> Any:
            h = x
            for w in a:
                h = jnp.tanh(h @ w)
            h = h[:, :8]
            for w in b:
                h = jnp.sin(h @ w) * 2.0
            return jnp.sum(h)

        value, grads = jax.value_and_grad(loss, (0, 1))(a, b)
        return jax.tree.map(lambda p, g: p - g, (a, b), grads), value

    graph = graph_of(step, [shape(16, 16)] * 3, [shape(8, 8)] * 4, shape(4, 16))
    repeats = find_repeats(forward_of(Batching.whole(graph)))
    assert [r.count for r in repeats] == [3, 4]


def test_a_repeat_knows_its_bounds() -> None:
    assert list(Repeat(3, 4, 2).bounds) == [3, 7, 11]


# -- a given number of layers ------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_as_many_layers_as_asked_for(count: int) -> None:
    assert len(layered(zoo_step("unet").graph, count).layers) == count


def test_groups_of_blocks_are_even() -> None:
    flops = [layer.flops for layer in layered(_deep(12), 4).layers]
    assert max(flops) < 1.1 * min(flops)


@st.composite
def _chains(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int, float]:
    length = draw(st.integers(2, 8))
    numbers = st.lists(st.integers(0, 9), min_size=length, max_size=length)
    flops, crossing = draw(numbers), draw(numbers)
    places = sorted(draw(st.sets(st.integers(1, length - 1), min_size=1)))
    count = draw(st.integers(1, len(places) + 1))
    return flops, crossing, places, count, draw(st.sampled_from([0.0, 0.2, 0.5, 2.0]))


@given(_chains())
@settings(max_examples=300)
def test_the_cuts_equal_brute_force(
    chain: tuple[list[int], list[int], list[int], int, float],
) -> None:
    flops, crossing, places, count, balance = chain

    def work(cuts: tuple[int, ...]) -> list[int]:
        bounds = [0, *cuts, len(flops)]
        return [sum(flops[a:b]) for a, b in pairwise(bounds)]

    choices = list(combinations(places, count - 1))
    evenest = min(max(work(c)) for c in choices)
    limit = max((1 + balance) * sum(flops) / count, evenest)
    legal = [c for c in choices if max(work(c)) <= limit]

    def price(cuts: tuple[int, ...]) -> tuple[int, int]:
        return max((crossing[c - 1] for c in cuts), default=0), sum(w * w for w in work(cuts))

    arrays = np.array(flops, dtype=np.int64), np.array(crossing, dtype=np.int64)
    found = tuple(cheapest_cuts(*arrays, places, count, balance))
    assert found in legal
    assert price(found) == min(map(price, legal))


# -- what a cut costs --------------------------------------------------------------------------

SKIP = parse_graph("""
graph f(
  %x: f32[4,4] batch "x",
  %w: f32[4,4] state "w"
) {
  %0: f32[4,4] = dot_general(%x, %w)  flops=128
  %c: f32[4,4] = mul(%w, 2.0:f32)     flops=16
  %1: f32[4,2] = slice(%0)
  %2: f32[4,4] = tanh(%0)             flops=16
  %3: f32[4,4] = dot_general(%2, %c)  flops=128
  %4: f32[4,2] = slice(%3)
  %5: f32[4,2] = add(%1, %4)          flops=8
  return %5 "y", %w "w" <- %w
}""")


def test_a_cut_costs_every_value_that_is_alive_once() -> None:
    forward = forward_of(Batching.whole(SKIP))
    assert forward.positions == (0, 2, 3, 4, 5, 6)  # %c is computed once, for all microbatches
    assert forward.crossing.tolist() == [64, 96, 96, 96, 64, 0]


# -- by hand -----------------------------------------------------------------------------------


def test_cuts_by_hand() -> None:
    sequence = Fixed((3, 5)).run(Batching.whole(SKIP), HERE)
    sequence.verify()
    assert [(layer.first, layer.last) for layer in sequence.layers] == [(0, 2), (3, 4), (5, 6)]
    assert [layer.cut_bytes for layer in sequence.layers] == [96, 96, 0]


@pytest.mark.parametrize("cuts", [(0,), (3, 3), (5, 3), (1, 2), (7,)])
def test_cuts_that_leave_a_layer_empty_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(GraphError, match="without forward ops"):
        Fixed(cuts).run(Batching.whole(SKIP), HERE)


def test_a_single_layer_has_all_ops() -> None:
    sequence = Single().run(Batching.whole(SKIP), HERE)
    sequence.verify()
    assert [layer.op_count for layer in sequence.layers] == [7]


def test_a_step_without_a_forward_pass_is_one_layer() -> None:
    assert len(layered(parse_graph("graph f(%x: f32[4] state) {\n return %x\n}")).layers) == 0
