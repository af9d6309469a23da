"""Passes as text in place of options: the same plan, and the text that a plan prints makes it."""

from typing import Any

import jax
import pytest

import autopar
from autopar.errors import ArgumentError, InputError
from tests.zoo.mlp import mlp

CASE = mlp("sgd")
ARGS = (jax.eval_shape(CASE.create_state, jax.random.key(0)), CASE.batch(0))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("shard{recipe=fsdp},lower", {"method": "fsdp"}),
        (
            "batch=exact,layer=min-cut,stage=search{stages=2,microbatches=4,schedule=gpipe},shard,lower",
            {"stages": 2, "microbatches": 4, "schedule": "gpipe"},
        ),
        (
            "batch=exact{barrier=false},layer=min-cut,"
            "stage=search{stages=2,microbatches=4,schedule=1f1b},shard,lower",
            {"stages": 2, "microbatches": 4, "schedule": "1f1b"},
        ),
    ],
)
def test_a_plan_is_made_again_from_the_passes_that_it_prints(
    text: str, options: dict[str, Any]
) -> None:
    planned = autopar.parallelize(CASE.step, cluster="8xh100", **options).planned(*ARGS)
    assert str(planned.request.passes) == text
    again = autopar.parallelize(CASE.step, cluster="8xh100", passes=text).planned(*ARGS)
    assert again.plan == planned.plan
    assert again.request.passes == planned.request.passes


def test_layers_may_be_cut_by_number() -> None:
    text = "batch=exact,layer=min-cut{layers=2},stage=search{stages=2,microbatches=2},shard,lower"
    plan = autopar.plan(CASE.step, *ARGS, cluster="8xh100", passes=text)
    assert [stage.layers for stage in plan.stages] == [1, 1]


def test_what_passes_say_is_not_said_twice() -> None:
    with pytest.raises(ArgumentError, match=r"leave those options out, or write passes='shard\{re"):
        autopar.parallelize(CASE.step, method="fsdp", passes="shard,lower")
    with pytest.raises(InputError, match="stage=search needs batch=exact"):
        autopar.parallelize(CASE.step, passes="stage=search")
    with pytest.raises(InputError, match="stage=one is for batch=whole and layer=single"):
        autopar.parallelize(CASE.step, passes="layer=min-cut")
