"""The demo's verdicts: what counts as equal, and on which devices it runs."""

from dataclasses import replace

import jax
import pytest

from autopar import demo
from autopar.demo.run import Difference
from autopar.errors import InputError


def compared(parallel: Difference) -> demo.Comparison:
    rounding = Difference(1e-5, 1e-5, 1e-3)
    return demo.Comparison((1.0,), (1.0,), parallel, rounding)


def test_rounding_holds_and_anything_more_does_not() -> None:
    small = Difference(1e-4, 1e-4, 1e-2)
    assert compared(small).holds
    for worse in ({"loss": 0.01}, {"parameters": 0.01}, {"mean_gradient": 0.5}):
        assert not compared(replace(small, **worse)).holds


def test_a_process_that_started_with_other_devices_is_told(devices: list[jax.Device]) -> None:
    del devices  # asking for them starts JAX
    with pytest.raises(InputError, match="needs 3 CPU devices, but JAX has started with 8"):
        demo.open_devices(3)


def test_the_demo_is_planned_from_shapes_alone() -> None:
    state, batch = demo.example_args(demo.QUICK)
    assert batch["tokens"].shape == (demo.QUICK.batch, demo.QUICK.sequence)
    assert state.params["tokens"]["embedding"].shape == (256, demo.QUICK.width)
