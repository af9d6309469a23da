"""Any legal plan computes the same numbers: the best one, and many that nobody would choose."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest

from autopar.passes.shard.optimal import Optimal
from tests.passes.corners import CORNERS
from tests.passes.driving import (
    Traced,
    largest_error,
    lowered,
    random_plan,
    run_listing,
    setting,
    traced,
)

MESHES = ("8", "2,4", "2,2,2")
TOLERANCE = 2e-5


@functools.cache
def corner(name: str) -> tuple[Traced, Any]:
    """A corner, traced, and what plain jit gives."""
    fun, args = CORNERS[name]
    return traced(fun, *args), jax.jit(fun)(*args)


def check(name: str, mesh: str, seed: int | None, scale: float = 1.0) -> None:
    """Compare plain jit with the best plan, or with one that is random."""
    step, expected = corner(name)
    given = setting(mesh)
    if seed is None:
        plan = Optimal().run(step.graph, given)
    else:
        plan = random_plan(step.graph, given, seed, scale)
    got = run_listing(step, lowered(step.graph, plan, given), given)
    assert largest_error(got, expected) < TOLERANCE, f"{name} on ({mesh}), seed {seed}:\n{plan}"


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["mlp_decay", "partial_joins", "scan_literal"])
def test_a_sample(name: str, devices: list[jax.Device]) -> None:
    check(name, "2,4", 1)


@pytest.mark.parametrize("name", CORNERS)
def test_the_best_plan_is_exact(name: str, devices: list[jax.Device]) -> None:
    check(name, "2,4", None)


@pytest.mark.parametrize(("number", "name"), list(enumerate(CORNERS)))
def test_random_plans_are_exact(number: int, name: str, devices: list[jax.Device]) -> None:
    check(name, MESHES[1 + number % 2], number)


def test_single_writes_survive_a_slice(devices: list[jax.Device]) -> None:
    """Several plans, as it takes a slice just before the write to make XLA stumble."""
    for seed in range(6):
        check("written_once", "2,4", seed)


# Small random costs leave some sense in a plan, large ones none.
@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-5, 1.0])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CORNERS)
def test_many_random_plans_are_exact(
    name: str, mesh: str, seed: int, scale: float, devices: list[jax.Device]
) -> None:
    check(name, mesh, seed, scale)
