"""Inside JAX's transforms a parallel step is the plain one, laid out as its plan has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from autopar.errors import ArgumentError
from tests.api.calls import FORMS, assert_equal, batch_of, parallel, state_of, train_step

Step = Callable[..., Any]


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    """Twice as much, of which the gradient is said to be three."""
    return x * 2.0


doubled.defvjp(lambda x: (x * 2.0, None), lambda _, g: (g * 3.0,))


def step_with_rule(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    """A step whose derivative is the user's own."""
    return train_step({"a": doubled(state["a"]), "b": state["b"]}, batch)


BATCHES = np.stack([batch_of(seed) for seed in range(3)])
STATES = jax.tree.map(lambda *w: np.stack(w), *(state_of(seed) for seed in range(3)))
TRANSFORMS: dict[str, Callable[[Step], Any]] = {
    "jit": lambda f: jax.jit(f)(state_of(), BATCHES[0]),
    "jit by name": lambda f: jax.jit(lambda s, x: f(s, batch=x))(state_of(), BATCHES[0]),
    "jit of no argument": lambda f: jax.jit(lambda: f(state_of(), BATCHES[0]))(),
    "scan": lambda f: jax.lax.scan(f, state_of(), BATCHES),
    "fori_loop": lambda f: jax.lax.fori_loop(0, 2, lambda _, s: f(s, BATCHES[0])[0], state_of()),
    "vmap": lambda f: jax.vmap(f)(STATES, BATCHES),
    "vmap of the batch": lambda f: jax.vmap(f, in_axes=(None, 0))(state_of(), BATCHES),
    "grad": lambda f: jax.grad(lambda s: f(s, BATCHES[0])[1])(state_of()),
    "checkpoint": lambda f: jax.grad(lambda s: jax.checkpoint(f)(s, BATCHES[0])[1])(state_of()),
    "shapes": lambda f: jax.tree.map(
        lambda s: np.zeros(s.shape, s.dtype), jax.eval_shape(f, state_of(), BATCHES[0])
    ),
}


@pytest.fixture(scope="module", name="step")
def _step() -> Step:
    made: Step = parallel("one program", step_with_rule, mesh=(2, 4), method="fsdp")
    return made


@pytest.mark.smoke
@pytest.mark.parametrize("name", TRANSFORMS)
def test_it_is_the_plain_step(step: Step, name: str) -> None:
    assert_equal(TRANSFORMS[name](step), TRANSFORMS[name](step_with_rule))


@pytest.mark.parametrize("form", ["microbatches", "stages"])
def test_so_is_one_of_parts(form: str) -> None:
    step = parallel(form, step_with_rule)
    for name in ("jit", "grad"):
        assert_equal(TRANSFORMS[name](step), TRANSFORMS[name](step_with_rule))
    program = str(jax.make_jaxpr(step)(state_of(), BATCHES[0]))
    assert program.count("sharding_constraint[") == 5  # two weights, the batch, two new weights


def test_its_layouts_are_the_plans(step: Any) -> None:
    planned, _ = step(state_of(), BATCHES[0])
    inside, _ = jax.jit(step)(state_of(), BATCHES[0])
    for mine, other in zip(jax.tree.leaves(planned), jax.tree.leaves(inside), strict=True):
        assert mine.sharding.is_equivalent_to(other.sharding, mine.ndim)
        assert len(mine.addressable_shards[0].data) < len(mine)


def test_nothing_is_consumed(step: Any) -> None:
    state, _ = step(state_of(), BATCHES[0])
    jax.eval_shape(lambda: step(state, BATCHES[0]))
    once, _ = jax.jit(step)(state, BATCHES[0])
    again, _ = step(state, BATCHES[0])
    assert_equal(once, again)


@pytest.mark.parametrize("form", FORMS)
def test_a_parallel_step_may_call_another(form: str) -> None:
    """The outer plan is the plan: the inner one neither plans nor constrains."""
    inner = parallel("one program", mesh={"other": 8}, method="fsdp")

    def outer(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        state, loss = inner(state, batch)
        return state, 2 * loss

    step = parallel(form, outer)
    wanted, loss = jax.jit(train_step)(state_of(), BATCHES[0])
    assert_equal(step(state_of(), BATCHES[0]), (wanted, 2 * loss))
    with pytest.raises(Exception, match="has no plan yet"):
        _ = inner.plan
    if form == "one program":
        verdict = step.verify(state_of(), BATCHES[0], level="numerics", steps=1, devices=2)
        assert verdict.numerics is not None


def test_inside_shard_map_it_is_refused(step: Step, devices: list[jax.Device]) -> None:
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    each: Any = jax.shard_map(
        lambda s, x: step(s, x)[1][None], mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("x")),
        out_specs=PartitionSpec("x"), check_vma=False,
    )  # fmt: skip
    with pytest.raises(ArgumentError, match=r"inside jax\.shard_map .* step_with_rule\.__wrapped_"):
        each(state_of(), BATCHES[0])


def test_on_a_mesh_with_explicit_axes_it_is_refused(step: Step, devices: list[jax.Device]) -> None:
    mesh = jax.sharding.Mesh(np.array(devices), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        assert_equal(step(state_of(), BATCHES[0]), step_with_rule(state_of(), BATCHES[0]))
        with pytest.raises(ArgumentError, match=r"a mesh with explicit axes \('x',\)"):
            jax.jit(step)(state_of(), BATCHES[0])


def test_with_jit_disabled_it_runs_op_by_op() -> None:
    seen: list[bool] = []

    def looked_at(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen.append(bool((w > 0).all()))  # a traced value could not be asked
        return w + x.sum(), x.sum()

    with jax.disable_jit():
        parallel("one program", looked_at)(jnp.ones(8), jnp.ones((16, 8)))
    assert seen == [True]


def test_no_tracer_is_kept() -> None:
    with jax.checking_leaks():
        assert_equal(TRANSFORMS["jit"](parallel("microbatches")), TRANSFORMS["jit"](train_step))
