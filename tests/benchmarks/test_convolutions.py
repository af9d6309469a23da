"""The compiler's timeline with the time of convolutions in it."""

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.ir.compiled import Compiled, Span
from benchmarks.zoo.convolutions import Convolution, convolutions, with_convolutions

CALL = 'custom-call({}), window={{size=3x3}}, dim_labels=b01f_o01i->b01f, custom_call_target="{}"'
FORWARD = CALL.format("%x, %w", "__cudnn$convForward")
BACK_INPUT = CALL.format("%y, %w", "__cudnn$convBackwardInput")
BACK_FILTER = CALL.format("%x, %y", "__cudnn$convBackwardFilter")
HLO = f"""
  %x = bf16[2,8,8,64]{{3,2,1,0}} parameter(0)
  %w = bf16[32,3,3,64]{{3,2,1,0}} parameter(1)
  %y = bf16[2,8,8,32]{{3,2,1,0}} parameter(2)
  %gather-start = (bf16[4], bf16[32]) all-gather-start(%z), channel_id=1
  %conv.1 = (bf16[2,8,8,32]{{3,2,1,0}}, u8[0]{{0}}) {FORWARD}
  %gather-done = bf16[32] all-gather-done(%gather-start)
  %conv.2 = (bf16[2,8,8,64]{{3,2,1,0}}, u8[0]{{0}}) {BACK_INPUT}
  ROOT %conv.3 = (bf16[32,3,3,64]{{3,2,1,0}}, u8[0]{{0}}) {BACK_FILTER}
"""
FLOPS = 2 * (2 * 8 * 8) * 32 * (3 * 3 * 64)


def span(name: str, start: float, end: float) -> Span:
    return Span(name, "", start * 1e-6, end * 1e-6, "main", 1)


# The gather takes from 1 to 31 us: a convolution hides 10 of them, the rest is waited for.
SPANS = (
    span("gather-start", 0, 1),
    span("conv.1", 1, 11),
    span("gather-done", 31, 32),
    span("conv.2", 32, 42),
    span("conv.3", 42, 52),
)
COMPILED = Compiled("8xh100", "", 0, 0, (), 52e-6, 20e-6, spans=SPANS, hlo=HLO)
CHIP = Cluster.parse("8xh100").chip


def timed(microseconds: float, compiled: Compiled = COMPILED) -> Compiled:
    """The timeline on a chip that takes so long for each of the convolutions."""
    rate = FLOPS / 0.95 / ((microseconds - 3) * 1e-6)  # any of them takes 3 us beside its work
    chip = replace(
        CHIP, peak_flops=(("bf16", rate),), compute_efficiency=1.0, half_flops=1e-9,
        launch_seconds=1e-12,
    )  # fmt: skip
    return with_convolutions(compiled, chip)


def test_gradients_cost_what_their_convolution_does() -> None:
    image, made, taps = 2 * 8 * 8 * 64, 2 * 8 * 8 * 32, 32 * 3 * 3 * 64
    one = Convolution(FLOPS, 2 * (image + made + taps), "bf16", 64, of_filter=False)
    gradient = replace(one, of_filter=True)
    assert convolutions(HLO) == {"conv.1": one, "conv.2": one, "conv.3": gradient}
    grouped = HLO.replace("->b01f,", "->b01f, feature_group_count=4,")
    assert {c.features for c in convolutions(grouped).values()} == {None}


@pytest.mark.parametrize(
    ("microseconds", "makespan", "exposed"),
    [(10, 52, 20), (5, 42, 25), (25, 82, 5), (40, 122, 0)],
)
def test_work_hides_what_it_can(microseconds: float, makespan: float, exposed: float) -> None:
    found = timed(microseconds)
    assert found.seconds == pytest.approx(makespan * 1e-6)
    assert found.exposed_seconds == pytest.approx(exposed * 1e-6, abs=1e-11)


def test_what_a_loop_runs_counts_each_time() -> None:
    around = Span("add", "", 0, 4e-6, "entry", 1)
    body = tuple(replace(s, computation="body", runs=8) for s in SPANS)
    looped = replace(
        COMPILED, seconds=(4 + 8 * 52) * 1e-6, exposed_seconds=8 * 20e-6, spans=(around, *body)
    )
    found = timed(25, looped)
    assert found.seconds == pytest.approx((4 + 8 * 82) * 1e-6)
    assert found.exposed_seconds == pytest.approx(8 * 5e-6)


def test_without_convolutions_nothing_changes() -> None:
    plain = replace(COMPILED, hlo="%x = bf16[2] parameter(0)")
    assert with_convolutions(plain, CHIP) is plain
