"""Every op is forward, backward or update, and knows its module and its line."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.frontend.trace.graph import module_path
from autopar.ir.graph import Graph, Op
from tests.frontend.tracing import X, checked, graph_of, shape, zoo_step

W = {"w1": shape(8, 8), "w2": shape(8, 8)}


def _loss(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)


def _updated(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def _regions(graph: Graph, kind: str) -> list[str]:
    return [op.origin.region for op in graph.ops if op.kind == kind]


def _makers(graph: Graph) -> dict[str, Op]:
    return {v.name: op for op in graph.ops for v in op.results}


def _all(graph: Graph, kind: str) -> Iterator[Op]:
    return (op for op in graph.walk() if op.kind == kind)


def test_a_plain_step() -> None:
    def step(params: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(params, x)
        return _updated(params, grads), loss

    graph = graph_of(step, W, X)
    # Two products forward; backward one for each weight and one for the hidden values.
    assert _regions(graph, "dot_general") == ["forward"] * 2 + ["backward"] * 3
    assert {op.origin.region for op in graph.ops[-4:]} == {"update"}


@pytest.mark.parametrize("name", ["gpt", "tied", "clip", "dropout", "wide_resnet_bn"])
def test_models_of_the_zoo(name: str) -> None:
    graph = checked(zoo_step(name))
    kind = "conv_general_dilated" if "resnet" in name else "dot_general"
    regions = _regions(graph, kind)
    forward = regions.count("forward")
    assert regions == ["forward"] * forward + ["backward"] * (len(regions) - forward)
    assert 2 * forward - 1 <= len(regions) - forward <= 2 * forward
    makers = _makers(graph)
    for o, i in graph.donated:
        path, made = graph.inputs[i].path, makers[str(graph.outputs[o])]
        if path == "state/rng":  # splits into the next step's key and this forward pass's
            continue
        # What a step learns from the batch as it goes, it learns in the forward pass.
        wanted = "forward" if "batch_stats" in path else "update"
        assert made.origin.region == wanted, path


def test_moments_that_decay_are_update_and_metrics_are_not() -> None:
    graph = checked(zoo_step("gpt"))
    decays = [op for op in graph.ops if op.kind == "mul" and "0.8999999761581421" in str(op)]
    assert {op.origin.region for op in decays} == {"update"}
    loss = _makers(graph)[str(graph.outputs[graph.output_paths.index("1/loss")])]
    assert loss.origin.region == "forward"


@pytest.mark.parametrize("name", ["gpt_scan", "gpt_scan_raw"])
def test_scanned_layers(name: str) -> None:
    graph = checked(zoo_step(name))
    assert _regions(graph, "scan") == ["forward", "backward"]
    for scan in graph.ops:
        for body in scan.graphs:
            assert {op.origin.region for op in body.walk()} == {scan.origin.region}
    assert not any(op.origin.region == "update" for op in _all(graph, "dot_general"))


def test_gradients_gathered_in_a_loop() -> None:
    def step(params: Any, xs: Any) -> Any:
        def one(total: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(_loss)(params, x)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return _updated(params, lax.scan(one, zeros, xs)[0])

    graph = graph_of(step, W, shape(4, 16, 8))
    (scan,) = _all(graph, "scan")
    assert scan.origin.region == "backward"
    assert _regions(scan.graphs[0], "dot_general") == ["forward"] * 2 + ["backward"] * 3
    assert graph.ops[-1].origin.region == "update"


def test_two_gradient_passes_leave_nothing_forward_between_them() -> None:
    def step(params: Any, x: Any) -> Any:
        first = jax.grad(_loss)(params, x)
        moved = jax.tree.map(lambda p, g: p + 0.05 * g, params, first)
        return _updated(params, jax.grad(_loss)(moved, x))

    graph = graph_of(step, W, X)
    regions = [op.origin.region for op in graph.ops]
    first = regions.index("backward")
    assert "forward" not in regions[first:]
    assert "backward" not in regions[regions.index("update") :]
    assert _regions(graph, "dot_general").count("backward") == 3 + 2 + 3


def test_a_hand_written_gradient_is_forward() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * x.T @ (x @ w)

    assert {op.origin.region for op in graph_of(step, shape(8, 3), X).ops} == {"forward"}


@pytest.mark.parametrize(
    ("stack", "path"),
    [
        ("transpose(jvp(GPT))/Block_0/Dense_1", "GPT/Block_0/Dense_1"),
        ("jvp(Gpt)/rematted_computation/h0/bqhd,bkhd->bhqk", "Gpt/h0"),
        ("vmap(jvp())/head", "head"),
        ("", ""),
    ],
)
def test_module_paths(stack: str, path: str) -> None:
    assert module_path(stack) == path


def test_modules_and_lines_are_the_users_own() -> None:
    graph = checked(zoo_step("gpt"))
    dots = list(_all(graph, "dot_general"))
    modules = [op.origin.module for op in dots if op.origin.region == "forward"]
    attention = ["qkv", "", "", "out", "up", "down"]
    layers = [f"Gpt/h{i}/{part}".rstrip("/") for i in range(2) for part in attention]
    assert modules == [*layers, "Gpt/head"]
    assert {op.origin.line.split(":")[0] for op in dots} == {"gpt.py"}
    assert all(op.origin.line for op in graph.ops)


def test_a_line_within_a_jitted_library_function_is_the_callers() -> None:
    graph = graph_of(lambda x: jax.nn.relu(x), X)
    line = test_a_line_within_a_jitted_library_function_is_the_callers.__code__.co_firstlineno + 1
    assert {op.origin.line for op in graph.ops} == {f"test_regions.py:{line}"}
