"""Memory, streams and bars drawn: heights and lengths in proportion, few shapes."""

import pytest

from autopar.ir.inspection import KernelSpan, MemoryCurve, MemoryLevel, Spot
from autopar.ir.peak import HeldKind
from autopar.report.svg.bars import Bar, bars_svg
from autopar.report.svg.memory import memory_svg
from autopar.report.svg.streams import streams_svg
from tests.report.svg.reading import element_count, said, titled

GIB = 2**30


def level(seconds: float, parameters: int, activations: int) -> MemoryLevel:
    kinds = ((HeldKind.PARAMETER, parameters), (HeldKind.ACTIVATION, activations))
    return MemoryLevel(seconds, f"dot <{seconds}>", kinds)


def test_what_is_held_is_stacked_under_the_limit() -> None:
    levels = (level(0.0, 8 * GIB, 0), level(1.0, 8 * GIB, 24 * GIB), level(2.0, 8 * GIB, 4 * GIB))
    svg = memory_svg(MemoryCurve(0, levels, 48 * GIB))
    assert said(svg)[0] == "at most 32.0 GiB of 48.0 GiB (67%) at 1.00 s, in dot <1.0>"
    assert {"limit 48.0 GiB", "peak 32.0 GiB", "16 GiB", "1 s", "parameter", "activation"} <= set(
        said(svg)
    )
    (parameters,) = titled(svg, "parameter: at most 8.00 GiB")
    (activations,) = titled(svg, "activation: at most 24.0 GiB")
    base = float(parameters.d.split()[1].split("V")[0])
    tops = [
        base - min(float(v.split("H")[0].rstrip("z")) for v in shape.d.split("V")[1:])
        for shape in (parameters, activations)
    ]
    assert tops[1] == pytest.approx(4 * tops[0], abs=0.3)  # with the parameters under them
    (peak,) = titled(svg, "peak 32.0 GiB: activation 24.0 GiB; parameter 8.00 GiB")
    assert peak.name == "path"


def test_a_spike_between_columns_is_not_lost() -> None:
    levels = [level(i / 10_000, 8 * GIB, 2 * GIB) for i in range(10_000)]
    levels[4321] = level(0.4321, 8 * GIB, 30 * GIB)
    svg = memory_svg(MemoryCurve(0, tuple(levels), 95 * GIB))
    assert titled(svg, "activation: at most 30.0 GiB")
    assert element_count(svg) < 60
    assert len(svg) < 10_000


def span(stream: str, start: float, end: float, region: str = "forward") -> KernelSpan:
    return KernelSpan(stream, start, end, "dot", Spot(region, "mlp", "a.py:1"))


def test_work_waits_where_only_the_wires_are_busy() -> None:
    """Work 0-1, 1.5-3 and 3-3.2; wires 1-1.5 and 2-2.5: half a second is exposed."""
    spans = (
        span("work", 0, 1), span("wires", 1, 1.5), span("work", 1.5, 3, "backward"),
        span("wires", 2, 2.5), span("work", 3, 3.2, "update"),
    )  # fmt: skip
    svg = streams_svg(spans)
    assert (
        said(svg)[0] == "predicted step 3.20 s on one device: computes 2.70 s, communicates 1.00 s"
    )
    (wait,) = titled(svg, "waits 500 ms from 1.00 s")
    (first,) = [s for s in titled(svg, "from 0 s") if s.name == "rect"]
    assert (wait.x, wait.width) == pytest.approx((first.x + first.width, first.width / 2), abs=0.11)
    assert [s.css.split()[0] for s in titled(svg, "dot")] == ["c1", "c3", "c4", "c5", "c5"]


def test_what_overlap_costs_is_exposed_at_the_end_of_the_predicted_step() -> None:
    spans = span("work", 0, 2), span("wires", 1, 2)
    (slower,) = titled(streams_svg(spans, 2.5), "500 ms in all")
    (work,) = titled(streams_svg(spans, 2.5), "from 0 s")
    assert slower.x == pytest.approx(work.x + work.width, abs=0.11)
    assert slower.width == pytest.approx(work.width / 4, abs=0.11)


@pytest.mark.parametrize("regions", [("forward",), ("forward", "backward")])
def test_a_step_of_many_kernels_is_few_shapes(regions: tuple[str, ...]) -> None:
    spans = [
        shape
        for i in range(20_000)
        for shape in (
            span("work", i * 2.0, i * 2.0 + 1, regions[i % len(regions)]),
            span("wires", i * 2.0 + 1, i * 2.0 + 2),
        )
    ]
    svg = streams_svg(spans)
    assert element_count(svg) <= 5_000
    assert "communicates 20000 s" in said(svg)[0]


def test_a_step_of_nothing_is_drawn() -> None:
    assert said(streams_svg(()))[0].startswith("predicted step 0 s on one device")
    assert "at most 0 B of 1.00 GiB" in said(memory_svg(MemoryCurve(0, (), GIB)))[0]


def test_bars_are_sorted_and_in_two_parts() -> None:
    sizes = {"small": (1e-3, 0.0), "<big>": (1e-3, 3e-3), "none": (0.0, 0.0), "mid": (0.0, 2e-3)}
    svg = bars_svg([Bar(name, *parts) for name, parts in sizes.items()], "collectives")
    assert [w for w in said(svg) if w in sizes] == ["<big>", "mid", "small", "none"]
    big, rest = titled(svg, "<big>: 4.00 ms, 1.00 ms of it exposed")
    assert (big.css, rest.css) == ("c6", "c5")
    assert rest.width == pytest.approx(3 * big.width, abs=0.2)
    assert rest.x == pytest.approx(big.x + big.width, abs=0.11)
    assert said(svg)[-2:] == ["exposed", "hidden"]
    assert said(bars_svg([Bar("all", 1.0)], "x"))[-1] == "exposed"
