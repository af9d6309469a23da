"""Several threads may call one step: they take turns, and each gets its own numbers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from autopar.api import Watcher
from tests.api.calls import FORMS, batch_of, parallel, state_of, train_step

THREADS, STEPS = 3, 4


def trained(step: Callable[..., Any], state: Any, seed: int) -> float:
    loss: Any = None
    for _ in range(STEPS):
        state, loss = step(state, batch_of(seed))
    return float(loss)


@pytest.mark.smoke
@pytest.mark.parametrize("form", FORMS)
def test_threads_get_what_they_would_get_alone(form: str) -> None:
    """The first calls among them, which plan and compile, and states that are born in threads."""
    plain = [trained(jax.jit(train_step), state_of(seed), seed) for seed in range(THREADS)]
    step = parallel(form)

    def run(seed: int) -> float:
        return trained(
            step, step.init(lambda: jax.tree.map(jax.numpy.asarray, state_of(seed))), seed
        )

    for _ in range(3):
        with ThreadPoolExecutor(THREADS) as pool:
            assert list(pool.map(run, range(THREADS))) == pytest.approx(plain, rel=1e-4)


def test_threads_plan_once() -> None:
    planned: list[str] = []
    watcher = Watcher(lambda slot, *_: planned.append(slot))
    step = parallel("one program")

    def plan(_: int) -> Any:
        return step.watched([watcher], state_of(), batch_of()).plan

    with ThreadPoolExecutor(THREADS) as pool:
        plans = list(pool.map(plan, range(THREADS)))
    assert all(p is plans[0] for p in plans)
    assert planned.count("trace") == 1
