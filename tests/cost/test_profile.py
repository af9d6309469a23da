"""Profiles by the cost model: which layers there are, and that nothing is lost or misplaced."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cluster import Cluster
from autopar.cost.profile import forward_pieces, profile_of, whole_seconds
from autopar.errors import InputError
from autopar.ir.graph import Graph
from autopar.ir.profile import Profile, ProfileLayer
from autopar.rules import attach_rules
from tests.frontend.tracing import shape, traced, zoo_step

CHIP = Cluster.parse("8xh100").chip
WIDTH, BATCH = 512, 2048
ITEM = 4


def graph_of(step: Callable[..., Any], *args: Any) -> Graph:
    return attach_rules(traced(step, *args).graph)


def sgd(loss: Callable[..., jax.Array]) -> Callable[[Any, Any], Any]:
    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    return step


def block(x: jax.Array, w: Any) -> jax.Array:
    hidden = jnp.tanh(x @ w["up"])
    return x + hidden @ w["down"]


def unrolled(
    one: Callable[..., jax.Array], cast: bool = False
) -> Callable[[Any, jax.Array], jax.Array]:
    def loss(state: Any, x: jax.Array) -> jax.Array:
        layers = jax.tree.map(lambda w: w.astype(jnp.bfloat16), state) if cast else state
        for w in layers:
            x = one(x, w)
        return jnp.mean(x**2)

    return loss


BLOCKS = [{"up": shape(WIDTH, 4 * WIDTH), "down": shape(4 * WIDTH, WIDTH)}] * 4


def products(profile: Profile) -> list[ProfileLayer]:
    """The layers that hold weights."""
    return [x for x in profile.layers if x.parameter_bytes]


def test_a_loop_in_python_has_a_layer_for_each_product() -> None:
    profile = profile_of(graph_of(sgd(unrolled(block)), BLOCKS, shape(BATCH, WIDTH)), CHIP)
    profile.verify()
    found = products(profile)
    assert [x.op.split()[0] for x in found] == ["dot_general"] * 8
    assert {x.parameter_bytes for x in found} == {ITEM * 4 * WIDTH * WIDTH}
    # What skips the block crosses the cut between its products too.
    up = profile.layers.index(found[0])
    hidden, skipped = 4 * ITEM * BATCH * WIDTH, ITEM * BATCH * WIDTH
    assert profile.chain().cut_bytes[up] == hidden  # the batch itself is nobody's output
    later = profile.layers.index(found[2])
    assert profile.chain().cut_bytes[later] == hidden + skipped


@pytest.mark.parametrize("cast", [False, True])
def test_backward_ops_go_to_the_products_that_they_differentiate(cast: bool) -> None:
    graph = graph_of(sgd(unrolled(block, cast)), BLOCKS, shape(BATCH, WIDTH))
    first, *others = products(profile_of(graph, CHIP))
    # The gradient of the batch is nobody's business.
    assert first.backward_ms == pytest.approx(first.forward_ms, rel=0.3)
    for layer in others:
        assert layer.backward_ms == pytest.approx(2 * layer.forward_ms, rel=0.3)


def test_what_a_block_recomputes_stays_in_the_block() -> None:
    remat = jax.checkpoint(block)
    graph = graph_of(sgd(unrolled(remat)), BLOCKS, shape(BATCH, WIDTH))
    found = products(profile_of(graph, CHIP))
    blocks = [(up, down) for up, down in zip(found[::2], found[1::2], strict=True)]
    for up, down in blocks[1:]:
        again = 3 * (up.forward_ms + down.forward_ms)
        assert up.backward_ms + down.backward_ms == pytest.approx(again, rel=0.3)


def test_a_scan_over_layers_is_a_layer_for_each_trip() -> None:
    def loss(state: Any, x: jax.Array) -> jax.Array:
        x, heads = jax.lax.scan(lambda x, w: (block(x, w), x.mean()), x, state["layers"])
        return jnp.mean((x @ state["head"]) ** 2) + heads.sum()

    stacked = {"up": shape(6, WIDTH, 4 * WIDTH), "down": shape(6, 4 * WIDTH, WIDTH)}
    state = {"layers": stacked, "head": shape(WIDTH, WIDTH)}
    profile = profile_of(graph_of(sgd(loss), state, shape(BATCH, WIDTH)), CHIP)
    profile.verify()
    trips = [x for x in profile.layers if x.name.endswith("]")]
    assert [x.name[-3:] for x in trips] == [f"[{k}]" for k in range(6)]
    assert {x.parameter_bytes for x in trips} == {ITEM * 8 * WIDTH * WIDTH}
    assert len({x.backward_ms for x in trips}) == 1
    # Each hands on its carry, and a part of what the scan stacks up for the sum.
    assert {x.activation_bytes for x in trips} == {ITEM * BATCH * WIDTH + ITEM}
    name = trips[0].name
    readers = [b for a, b in profile.edges if a == name]
    assert readers[0] == trips[1].name
    assert len(readers) == 2


def test_a_scan_through_time_is_one_layer() -> None:
    def loss(state: jax.Array, batch: jax.Array) -> jax.Array:
        start = jnp.zeros(batch.shape[1:])
        h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ state + x), None), start, batch)
        return jnp.mean(h**2)

    graph = graph_of(sgd(loss), shape(64, 64), shape(10, 32, 64))
    profile = profile_of(graph, CHIP)
    assert [x.op for x in profile.layers if x.parameter_bytes] == ["scan"]
    assert not any(x.name.endswith("]") for x in profile.layers)


def test_weights_that_two_layers_read_belong_to_the_first_and_are_not_sent() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        half = w.astype(jnp.bfloat16)
        hidden = jnp.tanh(x.astype(jnp.bfloat16) @ half)
        return jnp.mean((hidden @ half.T) ** 2)

    graph = graph_of(sgd(loss), shape(WIDTH, WIDTH), shape(BATCH, WIDTH))
    profile = profile_of(graph, CHIP)
    assert [x.parameter_bytes for x in products(profile)] == [ITEM * WIDTH * WIDTH]
    assert max(profile.chain().cut_bytes) == 2 * BATCH * WIDTH


def test_a_loop_over_microbatches_is_refused() -> None:
    def step(w: jax.Array, batches: jax.Array) -> jax.Array:
        def add(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), None

        return w - 0.1 * jax.lax.scan(add, jnp.zeros_like(w), batches)[0]

    with pytest.raises(InputError, match="Profile the step without its loop over microbatches"):
        profile_of(graph_of(step, shape(64, 64), shape(4, 32, 64)), CHIP)


@pytest.mark.parametrize("name", ["gpt", "gpt_scan", "tied", "unet", "lstm", "moe"])
def test_nothing_of_a_model_is_lost(name: str) -> None:
    graph = attach_rules(zoo_step(name).graph)
    profile = profile_of(graph, CHIP)
    profile.verify()
    assert len(profile.chain().layers) == len(profile.layers) >= 5
    whole = 1e3 * sum(
        whole_seconds(graph, op, CHIP) for op in graph.ops if op.origin.region != "update"
    )
    assert sum(x.compute_ms for x in profile.layers) == pytest.approx(whole, rel=1e-3)
    weights = sum(
        i.value.nbytes
        for i in graph.inputs
        if "params/" in i.path and not any(w in i.path for w in ("/mu/", "/nu/"))
    )
    assert sum(x.parameter_bytes for x in profile.layers) == weights


def test_depth_tells_blocks_from_what_is_in_them() -> None:
    graph = attach_rules(zoo_step("gpt").graph)
    names = [x.name for x in profile_of(graph, CHIP).layers]
    assert names[:-1] == ["Gpt/wte", "Gpt", "Gpt/h0", "Gpt/h1", "Gpt/ln_f", "Gpt/head"]
    deep = [x.name for x in profile_of(graph, CHIP, depth=3).layers]
    assert {"Gpt/h0/qkv", "Gpt/h1/down", "Gpt/h0 #2"} < set(deep)
    by_line = [p for p in forward_pieces(graph, CHIP) if not p.module]
    assert names[-1] == by_line[0].line
