"""Every op has a home: backward with its forward, updates with their parameters, skips, SAM."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.batching import Batching
from autopar.ir.graph import Graph, Op
from autopar.ir.stages import LayerSequence
from autopar.passes.layer.fixed import Fixed
from autopar.passes.layer.min_cut import MinCut
from tests.frontend.tracing import traced, zoo_step
from tests.passes.driving import setting
from tests.passes.microbatch_reference import cut
from tests.zoo import cases

HERE = setting("a=1")
MODULES = ("gpt", "tied", "clip", "dropout", "moe", "moe_switch", "unet", "wide_resnet_gn", "vit")
PLAIN = ("mlp", "mlp_equinox", "mlp_nnx", "masked", "gqa_llama", "gpt_scan", "gpt_scan_raw", "lstm")


@cache
def layered(name: str) -> LayerSequence:
    """A model of the zoo in as many layers as it suggests."""
    return MinCut().run(Batching.whole(zoo_step(name).graph), HERE)


def _ops(sequence: LayerSequence, region: str) -> list[tuple[Op, int]]:
    pairs = zip(sequence.graph.ops, sequence.homes, strict=True)
    return [(op, home) for op, home in pairs if op.origin.region == region]


def _homes_of(sequence: LayerSequence, word: str) -> set[int]:
    """The homes of the state whose path has this word."""
    pairs = zip(sequence.graph.inputs, sequence.input_homes, strict=True)
    return {homes[0] for given, homes in pairs if word in given.path.split("/")}


# -- backward ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_backward_ops_are_with_the_module_that_they_belong_to(name: str) -> None:
    sequence = layered(name)
    forward: dict[str, set[int]] = {}
    for op, home in _ops(sequence, "forward"):
        if op.origin.module and home >= 0:
            forward.setdefault(op.origin.module, set()).add(home)
    known = [(o, h) for o, h in _ops(sequence, "backward") if o.origin.module in forward]
    right = sum(op.flops for op, home in known if home in forward[op.origin.module])
    assert len(sequence.layers) > 1
    assert right >= 0.999 * sum(op.flops for op, _ in known) > 0


@pytest.mark.parametrize("name", MODULES + PLAIN)
def test_values_flow_forward_in_the_forward_pass_and_back_in_the_backward_pass(name: str) -> None:
    sequence = layered(name)
    ops, homes = sequence.graph.ops, sequence.homes
    maker = {r.name: i for i, op in enumerate(ops) for r in op.results}
    for i, op in enumerate(ops):
        for source in (maker[n] for n in op.value_operands if n in maker):
            regions = ops[source].origin.region, op.origin.region
            if homes[i] >= 0 and homes[source] >= 0:
                assert regions != ("forward", "forward") or homes[source] <= homes[i]
                assert regions != ("backward", "backward") or homes[source] >= homes[i]


@pytest.mark.parametrize("name", MODULES + PLAIN)
def test_only_scalars_and_setup_have_no_home(name: str) -> None:
    sequence = layered(name)
    state = {i.value.name for i in sequence.graph.inputs if i.value.item_count > 2}
    for op, home in zip(sequence.graph.ops, sequence.homes, strict=True):
        small = all(r.item_count <= 4 for r in op.results)
        assert home >= 0 or small or state.isdisjoint(op.value_operands)


def _chain(widths: list[int]) -> tuple[Callable[..., Any], Any, Any]:
    """Dense layers, each its own module; the first width is the input's."""

    def loss(params: Any, batch: Any) -> jax.Array:
        h = batch["x"]
        for i, p in enumerate(params):
            with jax.named_scope(f"dense{i}"):
                h = jnp.tanh(h @ p["w"] + p["b"])
        return jnp.mean((h.sum(-1) - batch["y"]) ** 2)

    pairs = pairwise(widths)
    params = [{"w": np.ones(p, np.float32), "b": np.ones(p[1:], np.float32)} for p in pairs]
    batch = {"x": np.ones((16, widths[0]), np.float32), "y": np.ones(16, np.float32)}
    return loss, params, batch


def _modules_hold(sequence: LayerSequence) -> None:
    """Whether every op of a module is in the layer of that name."""
    names = [layer.name for layer in sequence.layers]
    for op, home in zip(sequence.graph.ops, sequence.homes, strict=True):
        if op.origin.module in names:
            assert home == names.index(op.origin.module), op


def test_the_gradient_of_a_bias_is_summed_where_the_bias_is() -> None:
    loss, params, batch = _chain([8, 8, 8, 8])

    def step(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, batch))

    sequence = MinCut().run(cut(step, (params, batch), 2).batching, HERE)
    _modules_hold(sequence)
    assert sequence.input_homes[:6] == ((0,), (0,), (1,), (1,), (2,), (2,))


def test_a_skip_goes_back_to_where_it_came_from() -> None:
    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            kept = h = jnp.sin(x @ ws[0])
            for w in ws[1:-1]:
                h = jnp.tanh(h @ w)
            return jnp.sum((jnp.cos(h + kept) @ ws[-1]) ** 2)

        return jax.tree.map(lambda p, g: p - g, ws, jax.grad(loss)(ws))

    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = traced(step, [square] * 4, square).graph
    starts = [i for i, op in enumerate(graph.ops) if op.kind == "dot_general"][1:4]
    sequence = Fixed(tuple(starts)).run(Batching.whole(graph), HERE)
    products = [home for op, home in _ops(sequence, "backward") if op.kind == "dot_general"]
    assert products == [3, 3, 2, 2, 1, 1, 0]


def test_a_cotangent_made_of_nothing_is_made_where_it_is_read() -> None:
    sequence = layered("moe")
    spread = [
        (home, sequence.layers[home].name)
        for op, home in _ops(sequence, "backward")
        if op.kind == "broadcast_in_dim" and op.origin.module == "Model/experts0"
    ]
    assert spread
    assert {name for _, name in spread} == {"Model/experts0"}


# -- update and state --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "clip", "dropout"])
def test_parameters_and_moments_are_at_home_with_their_block(name: str) -> None:
    sequence = layered(name)
    names = [layer.name for layer in sequence.layers]
    for word in ("h0", "h1"):
        assert _homes_of(sequence, word) == {names.index(f"Gpt/{word}")}
    assert _homes_of(sequence, "wte") == {0}
    assert _homes_of(sequence, "head") == {len(names) - 1}


def test_tied_weights_are_updated_where_they_are_read_first() -> None:
    sequence = layered("tied")
    pairs = zip(sequence.graph.inputs, sequence.input_homes, strict=True)
    tables = {given.path: homes for given, homes in pairs if "wte" in given.path}
    last = len(sequence.layers) - 1
    assert [h for p, h in tables.items() if "opt_state" not in p] == [(0, last)]
    assert all(h == (0,) for p, h in tables.items() if "opt_state" in p)
    # Each of its uses has a gradient of its own, where the use is.
    table = next(i.value for i in sequence.graph.inputs if "wte" in i.path)
    made = {
        home
        for op, home in _ops(sequence, "backward")
        if op.kind in ("scatter-add", "dot_general")
        and op.results[0].shape in (table.shape, table.shape[::-1])
    }
    assert made == {0, last}


def test_the_global_norm_is_a_sum_of_each_layers_own() -> None:
    sequence = layered("clip")
    sums = [(op, h) for op, h in _ops(sequence, "update") if op.kind == "reduce_sum"]
    assert {home for _, home in sums} == set(range(len(sequence.layers)))
    roots = [
        h for op, h in _ops(sequence, "update") if op.kind == "sqrt" and not op.results[0].shape
    ]
    assert roots == [-1]


def test_a_counter_is_needed_wherever_its_schedule_is_read() -> None:
    sequence = layered("gpt")
    pairs = zip(sequence.graph.inputs, sequence.input_homes, strict=True)
    counters = [homes for given, homes in pairs if given.path.endswith("count")]
    assert counters == [tuple(range(len(sequence.layers)))]


def test_a_cast_parameter_is_available_where_its_cast_is_read() -> None:
    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            h = x.astype(jnp.bfloat16)
            for w in jax.tree.map(lambda w: w.astype(jnp.bfloat16), ws):
                h = jnp.tanh(h @ w)
            return jnp.sum(h.astype(jnp.float32))

        return jax.tree.map(lambda p, g: p - g, ws, jax.grad(loss)(ws))

    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = traced(step, [square] * 3, square).graph
    sequence = MinCut().run(Batching.whole(graph), HERE)
    assert sequence.input_homes[:3] == ((0,), (1,), (2,))


# -- loops -------------------------------------------------------------------------------------


def test_the_second_pass_of_sam_has_the_homes_of_the_first() -> None:
    loss, params, batch = _chain([8, 8, 8, 8, 8])

    def step(params: Any, batch: Any) -> Any:
        first = jax.grad(loss)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(first)))
        beside = jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, first)
        value, second = jax.value_and_grad(loss)(beside, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, second), value

    batching = cut(step, (params, batch), 2).batching
    sequence = MinCut().run(batching, HERE)
    assert batching.loops == 2
    assert [layer.name for layer in sequence.layers] == [f"dense{i}" for i in range(4)]
    _modules_hold(sequence)
    assert sequence.input_homes[:8] == ((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,))


@pytest.mark.parametrize("name", ["gpt", "dropout", "moe_switch"])
def test_cut_into_microbatches_a_model_has_the_same_layers_and_homes(name: str) -> None:
    case = cases("adam")[name]
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    batching = cut(case.step, (state, case.batch(0)), 4).batching
    found, whole = MinCut().run(batching, HERE), layered(name)
    assert [layer.name for layer in found.layers] == [layer.name for layer in whole.layers]
    forward: dict[str, set[int]] = {}
    for op, home in _ops(whole, "forward"):
        if op.origin.module and home >= 0:
            forward.setdefault(op.origin.module, set()).add(home)
    for op, home in [*_ops(found, "forward"), *_ops(found, "backward")]:
        assert home < 0 or home in forward.get(op.origin.module, {home}), op


def test_what_is_made_of_nothing_for_several_layers_is_made_on_each() -> None:
    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            h = x
            mask = jnp.broadcast_to(jnp.tril(jnp.ones((8, 8))), (len(x), 8, 8))
            for w in ws:
                h = jnp.tanh((h @ w) * mask)
            return jnp.mean(h**2)

        return jax.tree.map(lambda p, g: p - g, ws, jax.grad(loss)(ws))

    ws, x = [np.ones((8, 8), np.float32)] * 3, np.ones((4, 8, 8), np.float32)
    sequence = MinCut().run(cut(step, (ws, x), 2).batching, HERE)
    masks = [
        h
        for op, h in _ops(sequence, "forward")
        if op.results[0].shape == (2, 8, 8) and op.kind == "broadcast_in_dim"
    ]
    assert masks == [-1]
    assert [layer.cut_bytes for layer in sequence.layers] == [2 * 8 * 8 * 4] * 2 + [0]


def test_an_empty_graph_has_no_homes() -> None:
    sequence = MinCut().run(Batching.whole(Graph("f", (), (), ())), HERE)
    assert sequence.homes == ()
