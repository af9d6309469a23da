"""JAX's versions: what a plan names once is handed to each under its own name."""

from __future__ import annotations

import jax
import pytest

from autopar.frontend import compat
from autopar.ir.compiler_options import LATENCY_HIDING, PIPELINED


@pytest.mark.smoke
@pytest.mark.parametrize("switch", [True, False])
def test_this_xla_takes_the_options_that_plans_have(switch: bool) -> None:
    options = compat.compiler_options((n, switch) for n in (LATENCY_HIDING, *PIPELINED.values()))
    compiled = jax.jit(lambda x: x + 1, compiler_options=options)
    assert compiled(1) == 2  # an XLA that does not know one refuses them all


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.10.2", {"xla_a": 1, PIPELINED["all-gather"]: True, PIPELINED["all-reduce"]: False}),
        (
            "0.11.1",
            {
                "xla_a": 1,
                "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
                "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_DEFAULT",
            },
        ),
        ("0.12.0.1", {"xla_a": 1, "xla_gpu_pipeline_reduce_scatter": "mine"}),
    ],
)
def test_pipelining_is_a_mode_since_0_11_1(
    version: str, expected: dict[str, bool | int | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, bool | int | str] = {"xla_a": 1}
    if "xla_gpu_pipeline_reduce_scatter" in expected:
        given["xla_gpu_pipeline_reduce_scatter"] = "mine"
    else:
        given |= {PIPELINED["all-gather"]: True, PIPELINED["all-reduce"]: False}
    monkeypatch.setattr(compat, "jaxlib_version", version)
    assert compat.compiler_options(given.items()) == expected
