"""Plans of our own that are kept: a change of any decision in them is made on purpose."""

from typing import Any

import jax
import pytest

import autopar
from autopar.golden import Golden
from benchmarks.models import gpt
from tests.zoo.gpt import gpt as zoo_gpt
from tests.zoo.mlp import mlp

OPTIONS: dict[str, dict[str, Any]] = {
    "mlp": {"method": "fsdp"},
    "zoo-gpt": {"mesh": "data=2,model=4"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_zoo(name: str, autopar_golden: Golden) -> None:
    case = {"mlp": mlp, "zoo-gpt": zoo_gpt}[name]("adam")
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    autopar_golden(autopar.plan(case.step, state, case.batch(0), cluster="8xh100", **OPTIONS[name]))


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "data=4,model=2", "method": "megatron"},
        {"stages": 2, "microbatches": 4, "schedule": "1f1b"},
    ],
    ids=["megatron", "stages"],
)
def test_gpt(options: dict[str, Any], autopar_golden: Golden) -> None:
    model = gpt(2, 512, 8, 4096, 256, 32)
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    autopar_golden(
        autopar.plan(model.step, state, model.example_batch, cluster="8xh100", **options)
    )
