"""A step that fits neither in one program nor in stages is refused with both reasons."""

import jax
import pytest

import autopar
from autopar.errors import MemoryLimitError
from benchmarks.models import gpt


def test_a_refusal_of_one_program_says_why_there_are_no_stages_either() -> None:
    model = gpt(2, 256, 4, 1024, 64, 8)
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    with pytest.raises(MemoryLimitError) as caught:
        autopar.plan(
            model.step, state, model.example_batch,
            cluster="4xh100", stages="auto", microbatches="auto", memory_gb=0.005,
        )  # fmt: skip
    message = str(caught.value)
    assert "no plan on (data=4) fits" in message
    assert "In stages: no " in message
