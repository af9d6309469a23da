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


def test_an_op_belongs_to_the_module_whose_parameters_its_line_reads() -> None:
    modules = {module.path: module for module in autopar.inspect(planned()).modules}
    assert list(modules) == ["", "first", "blocks", "blocks/*", "last + norm"]
    assert modules["blocks/*"].parameter_bytes == 2 * (64 * 64 + 64) * 4
    # Forward, and the gradients of the weights and of what came in.
    assert modules["blocks/*"].flops == pytest.approx(2 * 3 * 2 * 64 * 64 * 64, rel=0.1)
    assert modules["last + norm"].flops < modules["first"].flops < modules["blocks/*"].flops


def test_a_parameter_and_its_optimizer_state_are_one_row() -> None:
    rows = {row.path: [m.path for m in mirrors] for row, *mirrors in mirrored(planned())}
    assert rows["net/blocks/*/kernel/value"] == [
        "optimizer/opt_state/0/mu/blocks/*/kernel/value",
        "optimizer/opt_state/0/nu/blocks/*/kernel/value",
    ]
    assert rows["optimizer/step/value"] == []
