"""A companion of a step on nnx objects: evaluation mode, and what it changes in place."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar

X = jnp.linspace(-1.0, 1.0, 64).reshape(16, 4)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.norm(self.dense(x)))


def _loss(net: Any, x: Any) -> Any:
    return jnp.mean(net(x) ** 2)


def _quiet(net: Any, x: Any) -> Any:
    net.eval()
    return _loss(net, x)


def _descend(net: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(_loss)(net, x)
    optimizer.update(net, grads)
    return loss


@pytest.fixture(scope="module")
def trained() -> Any:
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)
    step: Any = autopar.parallelize(_descend, cluster="8xcpu", mesh=8, method="dp")
    step(net, optimizer, X)
    return step, net


def test_evaluation_mode_reads_the_state_and_says_nothing(
    trained: Any, caplog: pytest.LogCaptureFixture
) -> None:
    step, net = trained
    before = np.asarray(net.norm.mean[...])
    net.eval()
    found = step.companion(_loss)(net, X)
    np.testing.assert_allclose(found, nnx.jit(_loss)(net, X), rtol=1e-6)
    net.train()
    np.testing.assert_array_equal(net.norm.mean[...], before)
    assert not caplog.records


def test_a_companion_in_training_mode_is_told_what_it_writes(
    trained: Any, caplog: pytest.LogCaptureFixture
) -> None:
    step, net = trained
    evaluate = step.companion(_loss)
    for _ in range(2):
        evaluate(net, X)
    (told,) = caplog.records
    assert "_loss runs beside a step and writes what both share: net/" in told.getMessage()
    assert "and 2 more" in told.getMessage()  # the mean and the variance
    assert "call .eval() on the model before the call" in told.getMessage()


def test_a_mode_that_a_companion_sets_is_told_of(
    trained: Any, caplog: pytest.LogCaptureFixture
) -> None:
    step, net = trained
    step.companion(_quiet)(net, X)
    (told,) = caplog.records
    assert "_quiet sets net/drop/deterministic, net/norm/use_running_average" in told.getMessage()
    net.train()
