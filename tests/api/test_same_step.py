"""A step whose arguments hold other functions that do the same is planned and compiled once."""

from __future__ import annotations

import logging
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar

X, Y = jnp.ones((16, 4)), jnp.arange(16.0).reshape(16, 1)


def _make(rate: float = 1e-2) -> tuple[nnx.Linear, nnx.Optimizer[Any]]:
    net = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    return net, nnx.Optimizer(net, optax.adamw(rate), wrt=nnx.Param)


def _step(net: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda n: jnp.mean((n(x) - y) ** 2))(net)
    optimizer.update(net, grads)
    return {"loss": loss}


def _told(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def test_an_optimizer_made_anew_is_no_other_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autopar")
    step: Any = autopar.parallelize(_step, cluster="8xcpu", mesh=8)
    plan = step.plan_for(*jax.eval_shape(_make), X, Y)
    for _ in range(2):  # a state made anew, as on a restart
        net, optimizer = _make()
        twin, other = _make()
        for _ in range(3):
            wanted = float(nnx.jit(_step)(twin, other, X, Y)["loss"])
            loss = float(step(net, optimizer, X, Y)["loss"])
            assert loss == pytest.approx(wanted, rel=1e-5)
        np.testing.assert_allclose(net.kernel[...], twin.kernel[...], rtol=1e-5)
        assert step.plan is plan
        tx = optimizer.tx
        step(net, optimizer, X, Y)
        assert optimizer.tx is tx  # its own, not the first one's
    assert _told(caplog, "mesh 1 of 1 tried") == 1
    assert _told(caplog, "1 of 1 done, compiling") == 1
    assert step.shardings.args[0] is not None


def test_another_learning_rate_is_another_step_and_the_warning_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step: Any = autopar.parallelize(_step, cluster="8xcpu", mesh=8)
    losses = []
    for rate in (1e-2, 1e-1):
        net, optimizer = _make(rate)
        step(net, optimizer, X, Y)
        losses.append(float(step(net, optimizer, X, Y)["loss"]))
    assert losses[0] != losses[1]
    (told,) = caplog.records
    assert "* optimizer/tx is another GradientTransformationExtraArgs object" in told.getMessage()
    assert "Make such objects once" in told.getMessage()
    assert "partial batch" not in told.getMessage()


def test_evaluation_mode_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def predict(net: Any, x: Any) -> Any:
        return net(x)

    net = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    step: Any = autopar.parallelize(predict, cluster="8xcpu", mesh=8, method="dp")
    step(net, X)
    net.eval()
    np.testing.assert_array_equal(step(net, X), X)
    assert "* net/deterministic is True and was False" in caplog.records[0].getMessage()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_lambda_in_a_model_is_told_by_what_it_does(microbatches: int) -> None:
    def descend(model: Any, x: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -g, grads)), loss

    def model(act: Any) -> Any:
        return eqx.nn.Sequential(
            [eqx.nn.Linear(4, 4, key=jax.random.key(0)), eqx.nn.Lambda(act)],
        )

    acts = [lambda v, s=s: jnp.tanh(v) * s for s in (1.0, 1.0, 2.0)]
    step: Any = autopar.parallelize(
        descend, cluster="8xcpu", method="dp", mesh=8, microbatches=microbatches
    )
    losses, plans = [], []
    for act in acts:
        made, loss = step(model(act), X)
        assert made.layers[1].fn is act
        np.testing.assert_allclose(loss, eqx.filter_jit(descend)(model(act), X)[1], rtol=1e-6)
        losses.append(float(loss))
        plans.append(step.plan)
    assert plans[0] is plans[1]
    assert plans[2] is not plans[0]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("value", [jnp.ones(3), 1.0])
def test_constants_that_a_step_closes_over_are_told_apart(value: Any) -> None:
    def scaled(fun: Any, x: Any) -> Any:
        return fun(x)

    step: Any = autopar.parallelize(scaled, cluster="8xcpu", mesh=8, static_argnames="fun")
    x = jnp.arange(24.0).reshape(8, 3)
    for factor in (value, value + 0, value * 3):
        np.testing.assert_array_equal(step(lambda v, f=factor: v * f, x), x * factor)
