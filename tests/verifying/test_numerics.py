"""The planned step beside the plain one: right plans agree, wrong ones do not."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError, PlanMismatchError, VerifyError
from autopar.ir.codec import Item
from autopar.ir.compiled import CheckLevel
from autopar.ir.listing import Fence
from autopar.ir.verification import check_verification, verification_data
from autopar.verifying.verify import Inquiry
from tests.end_to_end.running import EAGER
from tests.verifying.asking import SHAPES, asked, planned_for, train_step, without_reduction
from tests.zoo import cases

NUMERICS = Inquiry(CheckLevel.NUMERICS)


def test_a_model_of_the_zoo_agrees() -> None:
    case = cases("adam")["mlp"]
    step = autopar.parallelize(case.step, cluster=EAGER, mesh=(2, 4))
    state = case.create_state(jax.random.key(0))
    found = step.verify(state, case.batch(0), level="numerics", steps=2)
    assert found.agrees, str(found)
    numbers = found.numerics
    assert numbers is not None
    assert (numbers.steps, numbers.devices, numbers.where) == (2, 8, "data=2, model=4")
    assert numbers.notes == ()  # nothing was drawn
    assert {o.path for o in numbers.outputs} > {"1/loss", "state/params/layer0/w"}
    check_verification(Item(json.loads(json.dumps(verification_data(found)))))
    title, *rows = str(found).splitlines()
    assert title.endswith("level numerics: agrees")
    assert [r.split()[0] for r in rows] == [o.path for o in numbers.worst]
    assert 0 < max(o.error for o in numbers.outputs) < 1e-4  # sums in another order do round


def test_filters_that_are_updated_behind_a_fence_are_the_same() -> None:
    case = cases("sgd")["unet"]
    state = case.create_state(jax.random.key(0))
    step = autopar.parallelize(case.step, cluster="8xh100", mesh=8, method="dp")
    program = step.planned(state, case.batch(0)).program.parts[0].listing.block
    assert any(isinstance(instruction, Fence) for instruction in program.instructions)
    found = step.verify(state, case.batch(0), level="numerics", steps=2)
    assert found.agrees, str(found)


@pytest.mark.parametrize("method", ["dp", "zero2", "megatron"])
def test_arguments_may_be_shapes(method: str) -> None:
    found = asked(planned_for("8xh100", method), NUMERICS)
    assert found.agrees, str(found)
    assert found.numerics is not None
    assert found.numerics.notes == (
        "2 arrays of state were random numbers, not trained or initialized ones",
        "batches were random numbers",
    )


def test_a_program_that_forgets_a_sum_differs() -> None:
    planned = planned_for("8xh100")
    (part,) = planned.program.parts
    forgetful = replace(part, listing=without_reduction(part.listing))
    program = replace(planned.program, parts=(forgetful,))
    broken = replace(planned, programs=replace(planned.programs, program=program))
    found = asked(broken, NUMERICS)
    assert not found.agrees
    assert found.numerics is not None
    wrong = {o.path for o in found.numerics.outputs if not o.agrees}
    assert wrong & {"state/up", "state/down", "1"}
    assert found.numerics.worst[0].error > 1e-3


def test_narrow_floats_have_their_own_rounding() -> None:
    def step_of(state: Any, batch: Any) -> Any:
        def loss_of(w: Any) -> jax.Array:
            low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)
            made = jnp.tanh(batch.astype(jnp.bfloat16) @ low["up"]) @ low["down"]
            return jnp.mean(made.astype(jnp.float32) ** 2)

        loss, grad = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grad), loss

    step = autopar.parallelize(step_of, cluster="8xh100", method="fsdp")
    found = step.verify(*SHAPES, level="numerics")
    assert found.agrees, str(found)
    assert found.numerics is not None
    assert found.numerics.rounding == 2.0**-7


def test_stages_agree() -> None:
    step = autopar.parallelize(
        train_step, cluster="8xcpu", stages=2, microbatches=4, schedule="1f1b"
    )
    found = step.verify(*SHAPES, level="numerics", steps=2)
    assert found.agrees, str(found)
    assert found.numerics is not None
    assert found.numerics.where.startswith("mesh0 (")
    with pytest.raises(VerifyError, match="submeshes are not shrunk"):
        step.verify(*SHAPES, level="numerics", devices=4)


@pytest.mark.parametrize("method", ["dp", "hsdp"])
def test_a_plan_of_many_devices_is_shrunk(method: str) -> None:
    planned = planned_for("8x8xh100", method, (8, 8))
    found = asked(planned, replace(NUMERICS, devices=8))
    assert found.agrees, str(found)
    assert found.numerics is not None
    assert found.numerics.where == "data=2, model=4"
    note = "shrunk from mesh (data=8, model=8) to (data=2, model=4) with 32 rows of the batch"
    assert found.numerics.notes[0].startswith(note)


def test_stages_run_in_this_process_or_not_at_all() -> None:
    step = autopar.parallelize(
        train_step, cluster="16xcpu", stages=2, microbatches=2, schedule="1f1b"
    )
    with pytest.raises(VerifyError, match="needs 16 CPU devices and this process has 8"):
        step.verify(*SHAPES, level="numerics")


def test_second_moments_are_not_drawn_below_zero() -> None:
    def rooted(state: Any, batch: Any) -> Any:
        return {"w": state["w"] + jnp.sqrt(state["nu"]) * batch.mean(), "nu": 0.9 * state["nu"]}

    kind = jax.ShapeDtypeStruct((64,), jnp.float32)
    step = autopar.parallelize(rooted, cluster="8xcpu", mesh=(8,))
    found = step.verify({"w": kind, "nu": kind}, kind, level="numerics")
    assert found.agrees, str(found)
    assert found.numerics is not None
    assert "positive random numbers" in found.numerics.notes[0]


def keyed(key: jax.Array, x: Any, *, rate: float) -> jax.Array:
    return x * jax.random.bernoulli(key, 1 - rate, x.shape)


def test_keys_static_and_named_arguments_are_drawn_or_kept() -> None:
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    step = autopar.parallelize(keyed, cluster="8xcpu", mesh=(8,), static_argnames="rate")
    found = step.verify(key, x, rate=0.5, level="numerics")
    assert found.agrees, str(found)


def test_a_saved_plan_is_verified_for_its_step(tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    autopar.save(planned_for("8xh100").plan, path)
    plan = autopar.load(path)
    found = autopar.verify(plan, train_step, *SHAPES, level="numerics", steps=1)
    assert found.agrees


def test_a_plan_of_another_step_is_refused() -> None:
    state, batch = SHAPES
    wider = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    plan = planned_for("8xh100").plan
    with pytest.raises(PlanMismatchError, match=r"argument batch is f32\[256, 64\] in the plan"):
        autopar.verify(plan, train_step, state, wider, level="numerics")
    with pytest.raises(PlanMismatchError, match="operations differ"):
        autopar.verify(plan, lambda state, batch: train_step(state, batch + 1), state, batch)


def test_an_unknown_level_is_told() -> None:
    with pytest.raises(ArgumentError, match=r"'numbers'; write numerics, collectives, memory"):
        autopar.verify(planned_for("8xh100").plan, train_step, *SHAPES, level="numbers")


def test_the_users_arrays_are_left_alone() -> None:
    state = jax.tree.map(lambda s: jnp.ones(s.shape), SHAPES[0])
    batch = np.ones(SHAPES[1].shape, np.float32)
    step = autopar.parallelize(train_step, cluster="8xcpu", mesh=(8,))
    assert step.verify(state, batch, level="numerics", steps=2).agrees
    assert not state["up"].is_deleted()
    assert (np.asarray(state["up"]) == 1).all()
