"""Every case of the zoo learns: its loss falls over a few plain steps on one batch."""

import jax
import numpy as np
import pytest

from tests.zoo import Optimizer, cases, of_each_kind

NAMES = sorted(cases("sgd"))


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", of_each_kind())
def test_the_loss_falls(name: str, optimizer: Optimizer) -> None:
    case = cases(optimizer)[name]
    step, batch = jax.jit(case.step), case.batch(0)
    state = jax.jit(case.create_state)(jax.random.key(0))
    losses = list[float]()
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.all(np.isfinite(losses))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_fixes_the_batch(name: str) -> None:
    case = cases("sgd")[name]
    first, again, other = case.batch(3), case.batch(3), case.batch(4)
    for field, value in first.items():
        np.testing.assert_array_equal(value, again[field])
    assert any(not np.array_equal(value, other[field]) for field, value in first.items())
