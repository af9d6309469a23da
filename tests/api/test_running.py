"""What a parallel step takes and gives back: arguments of every sort, born-sharded state, plans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autopar
from autopar.api import Watcher
from autopar.errors import PlanMismatchError
from autopar.ir.plan_file import plan_to_json
from tests.zoo import cases

ROOT = Path(__file__).parents[2]
WIDTH, BATCH = 64, 16


def create(key: jax.Array) -> dict[str, Any]:
    one, two = jax.random.split(key)
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) / 8 for k in (one, two)]
    return {"weights": weights, "steps": jnp.zeros((), jnp.int32), "rng": jax.random.key(1)}


def step(state: dict[str, Any], batch: dict[str, Any], rate: Any = 0.1) -> tuple[Any, Any]:
    def loss_fn(weights: list[jax.Array]) -> jax.Array:
        h = jnp.tanh(batch["x"] @ weights[0]) @ weights[1]
        return jnp.mean((h - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["weights"])
    weights = [w - rate * g for w, g in zip(state["weights"], grads, strict=True)]
    rng = jax.random.split(state["rng"])[0]
    return {"weights": weights, "steps": state["steps"] + 1, "rng": rng}, {"loss": loss}


def batch_of(size: int = BATCH, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal((size, WIDTH), dtype=np.float32) for n in "xy"}


def parallel(fun: Any = step, **options: Any) -> autopar.ParallelStep[..., Any]:
    given: dict[str, Any] = {"cluster": "8xcpu", "mesh": (2, 4), "method": "fsdp", **options}
    made = autopar.parallelize(fun, **given)
    return made


def assert_equal(got: Any, expected: Any) -> None:
    for mine, plain in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if jax.dtypes.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, plain = jax.random.key_data(mine), jax.random.key_data(plain)
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)


def pieces(leaf: jax.Array) -> set[tuple[int, ...]]:
    """Shapes of what each device holds of a leaf."""
    return {shard.data.shape for shard in leaf.addressable_shards}


# -- state that is born sharded ----------------------------------------------------------------


def test_state_is_cut_up_before_there_is_a_plan(key: jax.Array) -> None:
    state = parallel().init(create, key)
    for weight in state["weights"]:
        assert pieces(weight) == {(WIDTH // 8, WIDTH)}
        assert len(weight.sharding.device_set) == 8
    assert_equal(state, create(key))


def test_state_lies_as_the_plan_wants_it(key: jax.Array) -> None:
    sharded = parallel()
    plan = sharded.plan_for(jax.eval_shape(create, key), batch_of())
    state = sharded.init(create, key)
    planned = [a for a in plan.arguments if a.role == "state"]
    for leaf, argument in zip(jax.tree.leaves(state), planned, strict=True):
        assert pieces(leaf) == {argument.sharding.shard_shape(argument.shape, plan.mesh)}
    assert pieces(state["weights"][0]) != {(WIDTH, WIDTH)}
    new, _ = sharded(state, batch_of())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    for leaf, argument in zip(jax.tree.leaves(new), planned, strict=True):
        assert pieces(leaf) == {argument.sharding.shard_shape(argument.shape, plan.mesh)}


@pytest.mark.smoke
def test_state_moves_once_where_it_was_born_before_the_plan(key: jax.Array) -> None:
    sharded = parallel()
    state, plain = sharded.init(create, key), create(key)
    for i in range(2):
        state, metrics = sharded(state, batch_of(seed=i))
        plain, expected = jax.jit(step)(plain, batch_of(seed=i))
        assert_equal((state, metrics), (plain, expected))


def test_state_of_another_shape_is_told_apart(key: jax.Array) -> None:
    sharded = parallel()
    sharded.plan_for(jax.eval_shape(create, key), batch_of())
    with pytest.raises(PlanMismatchError, match=r"weights/0 is \[64, 64\] in the plan and \[8"):
        sharded.init(lambda: {"weights": [jnp.ones((8, 8))] * 2, "steps": 0, "rng": 0})


# -- arguments ---------------------------------------------------------------------------------


def test_what_is_given_from_one_device_or_the_host_is_left_alone(key: jax.Array) -> None:
    sharded, state, batch = parallel(method="dp"), create(key), batch_of()
    before, kept = create(key), {n: x.copy() for n, x in batch.items()}
    sharded(state, batch)
    new, _ = sharded(state, batch)
    assert_equal(state, before)
    assert_equal(batch, kept)
    assert_equal(new, jax.jit(step)(before, kept)[0])


def test_batches_on_devices_are_moved_into_place(key: jax.Array) -> None:
    sharded, expected = parallel(donate=False), jax.jit(step)(create(key), batch_of())
    state, devices = sharded.init(create, key), jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    across = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    for place in (devices[0], devices[5], across):
        assert_equal(sharded(state, jax.device_put(batch_of(), place)), expected)


def test_without_donation_the_old_state_lives_on(key: jax.Array) -> None:
    sharded = parallel(donate=False)
    state = sharded.init(create, key)
    one, _ = sharded(state, batch_of())
    two, _ = sharded(state, batch_of())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert_equal(one, two)
    memory = sharded.compile(state, batch_of()).memory_analysis()
    assert memory.alias_size_in_bytes == 0


def test_arguments_by_name_and_python_numbers(key: jax.Array) -> None:
    sharded, plain = parallel(donate=False), jax.jit(step)
    state = create(key)
    for rate in (0.1, 0.5, np.float32(0.5)):
        expected = plain(state, batch_of(), rate=rate)
        assert_equal(sharded(state, batch=batch_of(), rate=rate), expected)
        assert_equal(sharded(state, batch_of(), rate), expected)


def test_a_count_that_starts_as_a_python_number_plans_once() -> None:
    def count(state: Any, x: Any) -> Any:
        return {"n": state["n"] + 1, "w": state["w"] + x.sum()}

    planned: list[str] = []
    watcher = Watcher(lambda slot, *_: planned.append(slot))
    sharded = parallel(count, method="auto")
    state: Any = {"n": 0, "w": jnp.zeros(8)}
    sharded.watched([watcher], state, np.ones(8))
    for _ in range(3):
        state = sharded(state, np.ones(8))
        sharded.watched([watcher], state, np.ones(8))
    assert planned.count("shard") == 1
    assert int(state["n"]) == 3


def test_arguments_may_have_the_names_that_autopar_uses() -> None:
    def scaled(state: Any, x: Any, *, self: Any, watchers: Any, args: Any) -> Any:
        return state * self, (watchers + args * x).sum()

    given = {"self": np.float32(2), "watchers": np.float32(3), "args": np.float32(4)}
    step = parallel(scaled, method="auto", donate=False)
    plan = step.plan_for(np.ones(8, np.float32), np.ones(8, np.float32), **given)
    assert step.planned(np.ones(8, np.float32), np.ones(8, np.float32), **given).plan == plan
    state, told = step(np.ones(8, np.float32), np.ones(8, np.float32), **given)
    assert_equal((state, told), (np.full(8, 2, np.float32), np.float32(8 * 7)))


@pytest.mark.parametrize("by", ["number", "name", "the user's own jit"])
def test_static_arguments(by: str) -> None:
    def power(x: jax.Array, n: int) -> jax.Array:
        return x if n == 0 else power(x, n - 1) * x

    jitted = jax.jit(power, static_argnums=1)
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "number": (power, {"static_argnums": 1}),
        "name": (power, {"static_argnames": "n"}),
        "the user's own jit": (jitted, {"static_argnums": 1}),
    }
    fun, options = ways[by]
    sharded = parallel(fun, method="auto", **options)
    x = np.full(8, 2.0, np.float32)
    for n in (0, 1, 3):
        np.testing.assert_array_equal(sharded(x, n), power(jnp.asarray(x), n))


def test_equal_numbers_static_and_not_are_told_apart() -> None:
    sharded = parallel(lambda x, n: x * n, static_argnums=1, method="auto")
    assert [int(sharded(n, n)) for n in (3, 4, 3)] == [9, 16, 9]


def test_a_users_own_donation_is_kept(key: jax.Array) -> None:
    @partial(jax.jit, donate_argnums=0)
    def own(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x @ w, x.sum()

    sharded = parallel(own, method="auto")
    w, x = jax.random.normal(key, (WIDTH, WIDTH)), batch_of(WIDTH)["x"]
    first, _ = sharded(w, x)
    second, _ = sharded(first, x)
    assert first.is_deleted()
    np.testing.assert_allclose(second, x @ (x @ w), rtol=1e-4, atol=1e-4)


def test_every_batch_shape_has_its_plan(key: jax.Array) -> None:
    sharded, state = parallel(donate=False), create(key)
    for size in (16, 32, 16):
        assert_equal(sharded(state, batch_of(size)), jax.jit(step)(state, batch_of(size)))
        (x,) = [a for a in sharded.plan.arguments if a.path == "batch/x"]
        assert x.shape == (size, WIDTH)


def test_as_a_decorator() -> None:
    decorator: Any = autopar.parallelize(cluster="8xcpu", mesh=8)

    @decorator  # type: ignore[untyped-decorator]
    def double(x: jax.Array) -> jax.Array:
        """Twice as much."""
        return 2 * x

    assert isinstance(double, autopar.ParallelStep)
    np.testing.assert_array_equal(double(np.arange(8.0)), 2 * np.arange(8.0))


# -- plans that were made before ---------------------------------------------------------------


@pytest.mark.smoke
def test_a_loaded_plan_runs_and_solves_nothing(
    key: jax.Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases("adam")["mlp"]
    state, batch = jax.eval_shape(case.create_state, key), case.batch(0)
    parallel(case.step, method="zero2").plan_for(state, batch).save(tmp_path / "plan.json")

    def solved(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was solved")

    monkeypatch.setattr("autopar.passes.shard.optimal.solve", solved)
    monkeypatch.setattr("autopar.passes.pipeline.PassPipeline.shard_graph", solved)
    plan = autopar.load(tmp_path / "plan.json")
    loaded = autopar.parallelize(case.step, plan=plan)
    assert loaded.plan is plan
    mine, plain = loaded.init(case.create_state, key), case.create_state(key)
    planned = {a.shape: a.sharding for a in plan.arguments if a.role == "state"}
    for leaf in jax.tree.leaves(mine):
        assert pieces(leaf) == {planned[leaf.shape].shard_shape(leaf.shape, plan.mesh)} or leaf.ndim
    for i in range(2):
        mine, _ = loaded(mine, case.batch(i))
        plain, _ = jax.jit(case.step)(plain, case.batch(i))
    assert_equal(mine, plain)


def test_a_plan_of_another_jax_is_refused(key: jax.Array) -> None:
    state = jax.eval_shape(create, key)
    plan = parallel().plan_for(state, batch_of())
    old = replace(plan, origin=replace(plan.origin, jax_minor="0.4"))
    with pytest.raises(PlanMismatchError, match=r"made with JAX 0\.4, this is JAX \d+\.\d+"):
        parallel(plan=old, mesh=None, method="auto").plan_for(state, batch_of())


def test_another_batch_does_not_fit_a_given_plan(key: jax.Array) -> None:
    state = jax.eval_shape(create, key)
    plan = parallel().plan_for(state, batch_of())
    given = parallel(plan=plan)
    with pytest.raises(PlanMismatchError, match=r"batch/x is f32\[16, 64\] in the plan and f32"):
        given.plan_for(state, batch_of(32))


def three_plans() -> list[str]:
    """Plans of a network, of a small step, and of it where memory is short, as their files."""

    def planned(name: str, **options: Any) -> autopar.Plan:
        case = cases("adam")[name]
        state = jax.eval_shape(case.create_state, jax.random.key(0))
        return autopar.plan(
            case.step, state, case.batch(0), cluster="8xh100", mesh=(2, 4), **options
        )

    roomy = planned("mlp")
    tight = planned("mlp", memory_gb=0.6 * roomy.prediction.peak_bytes / 2**30)
    return [plan_to_json(plan) for plan in (planned("gpt"), roomy, tight)]


_OTHER = """
import json
from tests.api.test_running import three_plans
print(json.dumps(three_plans()))
"""


@pytest.mark.ci
def test_two_processes_make_the_same_bytes() -> None:
    """This process, which has planned other things before, and one with another hash seed."""
    other = subprocess.Popen(
        [sys.executable, "-c", _OTHER], stdout=subprocess.PIPE, text=True,
        cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "1"},
    )  # fmt: skip
    own = three_plans()
    text, _ = other.communicate()
    assert json.loads(text.splitlines()[-1]) == own


# -- primitives of other packages --------------------------------------------------------------


def test_a_primitive_that_compiles_as_a_function_is_planned_as_it_unless_it_has_a_rule() -> None:
    halved = Primitive("halved_tanh")
    halved.def_impl(lambda x: jnp.tanh(x) / 2)
    halved.def_abstract_eval(lambda x: x)
    mlir.register_lowering(halved, mlir.lower_fun(halved.impl, multiple_results=False))
    x = np.linspace(0, 1, 32, dtype=np.float32)
    made = autopar.parallelize(lambda x: halved.bind(x), cluster="8xcpu", mesh=(8,))
    ruled = autopar.parallelize(made, rules=autopar.RuleBook({"halved_tanh": "a -> a"}),
                                cluster="8xcpu", mesh=(8,))  # fmt: skip
    for parallel_step, name in ((made, "tanh("), (ruled, "halved_tanh(")):
        np.testing.assert_allclose(parallel_step(x), np.tanh(x) / 2, rtol=1e-6)
        record = parallel_step.plan.record
        assert record is not None
        assert f"= {name}" in record.graph
