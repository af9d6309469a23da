"""libtpu's estimates of kernels add up by trips, and elementwise ones are held to their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import ClusterError
from autopar.hlo.clock import clock_of, read_cycles

_RECORDED = Path(__file__).parent / "recorded"
_CLOCK, _STREAM = 1e9, 1e12


def _cycles(count: int, model: str = "INVALID") -> str:
    return (
        f'backend_config={{"window_config":{{"estimated_cycles":"{count}",'
        f'"cost_model_type":"COST_MODEL_TYPE_{model}"}}}}'
    )


def _program(*lines: str, more: str = "") -> str:
    head = ["HloModule m, num_partitions=8", more, "ENTRY %main (x: f32[1000]) -> f32[1000] {"]
    x = "  %x = f32[1000]{0} parameter(0)"
    return "\n".join([*head, x, *(f"  {line}" for line in lines), "}", ""])


def test_a_matmul_takes_its_cycles_and_an_elementwise_op_at_most_its_bytes() -> None:
    text = _program(
        f"%dot = f32[1000]{{0}} fusion(%x), kind=kOutput, calls=%f, {_cycles(700, 'CLASSIC')}",
        f"%slow = f32[1000]{{0}} fusion(%dot), kind=kLoop, calls=%f, {_cycles(30)}",
        f"ROOT %quick = f32[1000]{{0}} fusion(%slow), kind=kLoop, calls=%f, {_cycles(5)}",
    )
    found = read_cycles(text, _CLOCK, _STREAM)
    assert found is not None
    assert found.matmul_seconds == pytest.approx(700e-9)
    # 8000 bytes stream in 8 ns, which is less than 30 cycles and more than 5.
    assert found.other_seconds == pytest.approx(8e-9 + 5e-9)
    assert found.seconds == found.matmul_seconds + found.other_seconds


def test_estimates_that_are_none_and_kernels_of_the_user_count_nothing() -> None:
    text = _program(
        f"%odd = f32[1000]{{0}} convert(%x), {_cycles(2**63 - 1)}",
        '%own = f32[1000]{0} custom-call(%odd), custom_call_target="tpu_custom_call"',
        f"ROOT %some = f32[1000]{{0}} negate(%own), {_cycles(4)}",
    )
    found = read_cycles(text, _CLOCK, _STREAM)
    assert found is not None
    assert found.seconds == pytest.approx(4e-9)
    assert found.unpriced == ("own",)


def test_a_program_without_estimates_has_no_time() -> None:
    assert read_cycles(_program("ROOT %y = f32[1000]{0} negate(%x)"), _CLOCK, _STREAM) is None


def test_recorded_nested_loops_on_v5e() -> None:
    text = (_RECORDED / "nested_v5e.hlo.txt").read_text()
    found = read_cycles(text, clock_of("v5e"), 810e9)
    assert found is not None
    # 3 x 4 matmuls of the inner loop, and of the two branches the longer.
    assert found.matmul_seconds == pytest.approx((12 * 16568 + 17214) / 1.5e9)


def test_no_other_clock_is_made_up() -> None:
    with pytest.raises(ClusterError, match="no clock of 'h100'"):
        clock_of("h100")
