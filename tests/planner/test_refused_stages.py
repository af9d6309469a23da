"""A step that fits neither in one program nor in stages is refused with both reasons."""

import pytest

import autopar
from autopar.errors import MemoryLimitError
from tests.planner.layers import arguments, train_step


def test_a_refusal_of_one_program_says_why_there_are_no_stages_either() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        autopar.plan(
            train_step, *arguments(layers=4, width=64, rows=16),
            cluster="4xh100", stages="auto", microbatches="auto", memory_gb=1e-5,
        )  # fmt: skip
    message = str(caught.value)
    assert "no plan on (data=4) fits" in message
    assert "In stages: no stages fit the 10.5 KiB of a device" in message
