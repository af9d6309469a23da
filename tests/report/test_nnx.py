"""A plan of a flax nnx step, which has no named scopes: its modules and its optimizer's state."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import autopar
from autopar.report.html.data import mirrored


class Net(nnx.Module):
    """Two layers that are alike, between two that are not."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 64, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.last = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.first(x))
        for block in self.blocks:
            x = x + nnx.relu(block(x))
        return self.last(self.norm(x))


def create() -> tuple[Net, nnx.Optimizer[Net]]:
    net = Net(nnx.Rngs(0))
    return net, nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)


def train(net: Net, optimizer: nnx.Optimizer[Net], batch: dict[str, Any]) -> jax.Array:
    def loss_of(net: Net) -> jax.Array:
        return jnp.mean((net(batch["x"]) - batch["y"]) ** 2)

    loss, slopes = nnx.value_and_grad(loss_of)(net)
    optimizer.update(net, slopes)
    return loss


@functools.cache
def planned() -> autopar.Plan:
    batch = {name: jax.ShapeDtypeStruct((64, n), jnp.float32) for name, n in (("x", 16), ("y", 4))}
    return autopar.plan(train, *nnx.eval_shape(create), batch, cluster="8xh100", method="fsdp")


def test_an_op_belongs_to_the_module_whose_parameters_it_reads_or_is_within() -> None:
    modules = {module.path: module for module in autopar.inspect(planned()).modules}
    assert set(modules) == {
        "", "first", "blocks", "blocks/0", "blocks/1", "norm", "last", "(step)", "(update)"
    }  # fmt: skip
    for block in ("blocks/0", "blocks/1"):
        assert modules[block].parameter_bytes == (64 * 64 + 64) * 4
        # Forward, and the gradients of the weights and of what came in.
        assert modules[block].flops == pytest.approx(3 * 2 * 64 * 64 * 64, rel=0.1)
    assert modules["norm"].flops < modules["last"].flops < modules["first"].flops
    roots = [m for path, m in modules.items() if path and "/" not in path]
    for figure in ("flops", "seconds", "parameter_bytes"):
        whole = sum(getattr(m, figure) for m in roots)
        assert whole == pytest.approx(getattr(modules[""], figure))


class Attention(nnx.Module):
    """Layers as lists of their parts, and attention between them in the model itself."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.q, self.k, self.v, self.o = (
            nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(3)]) for _ in range(4)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for i in range(3):
            q, k, v = (part[i](x) for part in (self.q, self.k, self.v))
            weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k))
            seen = jnp.einsum("bts,bsd->btd", weights, v)
            x = x + self.o[i](seen)
        return x


def test_attention_between_modules_is_of_what_they_are_in() -> None:
    def step(net: Attention, x: jax.Array) -> jax.Array:
        loss, slopes = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
        nnx.update(net, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(net), slopes))
        return loss

    net = nnx.eval_shape(lambda: Attention(nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((8, 32, 64), jnp.float32)
    found = autopar.inspect(autopar.plan(step, net, x, cluster="8xh100")).modules
    modules = {module.path: module for module in found}
    product = 2 * 8 * 32 * 64 * 64
    for name in ("q", "k", "v", "o"):
        assert modules[name].flops == pytest.approx(3 * 3 * product, rel=0.05)
    assert max(len(path) for path in modules) < 20
    attention = 3 * 3 * 2 * (2 * 8 * 32 * 32 * 64)
    assert modules["(step)"].flops == pytest.approx(attention, rel=0.1)


def test_a_parameter_and_its_optimizer_state_are_one_row() -> None:
    rows = {row.path: [m.path for m in mirrors] for row, *mirrors in mirrored(planned())}
    assert rows["net/blocks/*/kernel/value"] == [
        "optimizer/opt_state/0/mu/blocks/*/kernel/value",
        "optimizer/opt_state/0/nu/blocks/*/kernel/value",
    ]
    assert rows["optimizer/step/value"] == []
