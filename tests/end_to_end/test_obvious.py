"""The obvious answers come out by themselves: what the textbooks say, read off the compiled HLO.

Nothing here runs: the steps are as big as they have to be, and are compiled on shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.hlo.collectives import read_collectives
from autopar.hlo.tensors import HloCollective
from benchmarks import models

Tree = Any
SCALARS = 64  # bytes: the loss, a count, a norm


def mlp(width: int, hidden: int, layers: int, batch: int) -> tuple[Callable[..., Any], Tree, Tree]:
    """A residual MLP under Adam: its step, its state and its batch as shapes."""
    tx = optax.adam(1e-3)

    def step(state: Tree, data: Tree) -> tuple[Tree, jax.Array]:
        def loss_fn(params: Tree) -> jax.Array:
            h = data["x"]
            for layer in params:
                h = h + jax.nn.gelu(h @ layer["up"]) @ layer["down"]
            return jnp.mean((h - data["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }, loss

    up, down = _shape(width, hidden), _shape(hidden, width)
    params = [{"up": up, "down": down} for _ in range(layers)]
    state = jax.eval_shape(lambda p: {"params": p, "opt_state": tx.init(p)}, params)
    return step, state, {"x": _shape(batch, width), "y": _shape(batch, width)}


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


class Answer:
    """A step planned by `auto` and compiled: where its weights lie, and its collectives."""

    def __init__(self, step: Callable[..., Any], *args: Any, **options: Any) -> None:
        parallel = autopar.parallelize(step, mesh=(8,), **options)
        self.plan = parallel.plan_for(*args)
        every = read_collectives(parallel.compile(*args).as_text())
        self.collectives = tuple(c for c in every if c.nbytes > SCALARS)

    def lies(self, path: str) -> str:
        """How an argument lies, as text."""
        (found,) = [a.sharding for a in self.plan.arguments if a.path == path]
        return str(found)

    def counts(self) -> Counter[str]:
        """Collectives by kind; those of a few numbers are left out."""
        return Counter(c.kind for c in self.collectives)


@pytest.mark.parametrize("cluster", ["8xh100", "8xa100-80gb"])  # on v5e fsdp is predicted faster
def test_small_weights_and_a_large_batch_give_data_parallelism(cluster: str) -> None:
    answer = Answer(*mlp(width=64, hidden=256, layers=2, batch=65536), cluster=cluster)
    lies = {a.path: str(a.sharding) for a in answer.plan.arguments}
    assert {lies["data/x"], lies["data/y"]} == {"[data, -]"}
    assert {text for path, text in lies.items() if path.startswith("state/")} == {"[-, -]", "[]"}
    # One combined all-reduce of all four gradients, the loss perhaps with them.
    (found,) = answer.collectives
    assert found.kind == "all-reduce"
    assert 0 <= found.nbytes - 4 * 64 * 256 * 4 <= SCALARS


@pytest.mark.parametrize("cluster", ["8xh100", "v5e:2x4"])
def test_large_weights_and_a_small_batch_give_megatron_pairs(cluster: str) -> None:
    layers, batch, width = 3, 64, 8192
    answer = Answer(*mlp(width, hidden=32768, layers=layers, batch=batch), cluster=cluster)
    for i in range(layers):
        assert answer.lies(f"state/params/{i}/up") == "[-, data]"
        assert answer.lies(f"state/params/{i}/down") == "[data, -]"
    # g forward and f backward for each pair; nothing asks for the first layer's input gradient.
    assert set(answer.counts()) == {"all-reduce"}
    reduced = sum(c.nbytes // (batch * width * 4) for c in answer.collectives)
    assert reduced == 2 * layers - 1


def blocks(width: int, heads: int, layers: int, batch: int, length: int) -> tuple[Any, Tree, Tree]:
    """Transformer blocks without norms under plain gradient descent, for inputs and targets."""

    def block(x: jax.Array, layer: Tree) -> jax.Array:
        b, t, d = x.shape
        q, k, v = ((x @ layer[n]).reshape(b, t, heads, d // heads) for n in ("q", "k", "v"))
        shares = jax.nn.softmax(jnp.einsum("bqhc,bkhc->bhqk", q, k))
        x = x + jnp.einsum("bhqk,bkhc->bqhc", shares, v).reshape(b, t, d) @ layer["out"]
        return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]

    def step(params: Tree, data: Tree) -> tuple[Tree, jax.Array]:
        def loss_fn(layers: Tree) -> jax.Array:
            x = data["x"]
            for layer in layers:
                x = block(x, layer)
            return jnp.mean((x - data["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), loss

    square = dict.fromkeys(("q", "k", "v", "out"), _shape(width, width))
    layer = {**square, "up": _shape(width, 4 * width), "down": _shape(4 * width, width)}
    given = _shape(batch, length, width)
    return step, [layer] * layers, {"x": given, "y": given}


@pytest.mark.parametrize("cluster", ["8xh100", "v5e:2x4"])
@pytest.mark.parametrize("layers", [1, pytest.param(3, marks=pytest.mark.ci)])
def test_transformer_blocks_of_large_weights_give_megatron_pairs(layers: int, cluster: str) -> None:
    width, batch, length = 8192, 2, 64
    answer = Answer(*blocks(width, 64, layers, batch, length), cluster=cluster)
    for i in range(layers):
        for name in ("q", "k", "v", "up"):
            assert answer.lies(f"params/{i}/{name}") == "[-, data]"
        for name in ("out", "down"):
            assert answer.lies(f"params/{i}/{name}") == "[data, -]"
    # Attention and MLP of each layer: one forward, one backward; the first needs none backward.
    assert set(answer.counts()) == {"all-reduce"}
    reduced = sum(c.nbytes // (batch * length * width * 4) for c in answer.collectives)
    assert reduced == 4 * layers - 1


def test_a_tight_memory_limit_gives_zero_3() -> None:
    step, state, batch = mlp(width=2048, hidden=8192, layers=4, batch=32768)
    sharded = autopar.parallelize(step, cluster="8xh100", mesh=(8,), method="fsdp")
    limit = sharded.plan_for(state, batch).prediction.peak_bytes
    tight = (limit + 1) / 2**30
    answer = Answer(step, state, batch, cluster="8xh100", memory_gb=tight, remat=False)
    roomy = Answer(step, state, batch, cluster="8xh100")
    assert roomy.plan.prediction.peak_bytes >= limit >= answer.plan.prediction.peak_bytes
    for a in answer.plan.arguments:
        assert a.sharding.shard_shape(a.shape, answer.plan.mesh) != a.shape or a.shape == ()
    # Weights are gathered forward and again backward, gradients reduce-scattered.
    weight = 2048 * 8192 * 4
    assert set(answer.counts()) == {"all-gather", "reduce-scatter"}
    assert _runs(answer.collectives, "reduce-scatter", weight) == 8
    assert 8 <= _runs(answer.collectives, "all-gather", weight) <= 16


def _runs(found: tuple[HloCollective, ...], kind: str, nbytes: int) -> int:
    """How many tensors of a size move by a kind of collective, combined or not."""
    return sum(c.nbytes // nbytes for c in found if c.kind == kind)


@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param("8xh100", marks=pytest.mark.ci),
        pytest.param("v5e:2x4", marks=pytest.mark.slow),
    ],
)
def test_a_mixture_of_experts_gives_expert_parallelism(cluster: str) -> None:
    layers = 2
    model = models.moe(
        layers=layers, width=1024, heads=16, experts=8, hidden=16384, vocab=1024, sequence=1024,
        batch=32, optimizer="sgd", dtype="float32",
    )  # fmt: skip
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    answer = Answer(model.step, state, model.example_batch, cluster=cluster)
    assert answer.lies("batch/tokens") == "[data, -]"
    for i in range(layers):
        for name in ("up", "down"):
            assert answer.lies(f"state/params/layer{i}/experts/{name}") == "[data, -, -]"
        assert answer.lies(f"state/params/layer{i}/attention/out/kernel") == "[-, -]"
    # Dispatch and combine, forward and backward.
    assert answer.counts()["all-to-all"] == 4 * layers
