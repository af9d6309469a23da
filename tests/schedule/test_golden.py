"""Golden numbers of every schedule, worked by hand: makespans, bubbles, peaks, latencies."""

import pytest

from autopar.schedule.simulate import Simulation, simulate
from autopar.schedule.table import SCHEDULES, make_grid
from autopar.schedule.times import even_times


def simulated(
    name: str, p: int, m: int, v: int, latency: float = 0.0, i: float = 1.0, w: float = 1.0
) -> Simulation:
    times = even_times(p, v, forward=1.0, input_gradient=i, weight_gradient=w, latency=latency)
    return simulate(make_grid(name, p, m, v), times)


# F=I=W=1 a device unless said otherwise; peaks are in chunks, by device.
GOLDEN = [
    # name, p, m, v, I, W, makespan, makespan bubble, span bubble, peaks
    ("gpipe", 4, 8, 1, 1.0, 1.0, 33, 9, 9, (8, 8, 8, 8)),
    ("1f1b", 4, 8, 1, 1.0, 1.0, 33, 9, 9, (4, 3, 2, 1)),
    ("eager-1f1b", 4, 8, 1, 1.0, 1.0, 33, 9, 9, (7, 5, 3, 1)),
    ("interleaved", 4, 8, 2, 1.0, 1.0, 28.5, 4.5, 4.5, (11, 9, 7, 5)),
    ("interleaved", 4, 8, 4, 1.0, 1.0, 26.25, 2.25, 2.25, (19, 17, 15, 13)),
    ("looped-bfs", 4, 8, 2, 1.0, 1.0, 28.5, 4.5, 4.5, (16, 16, 16, 16)),
    ("zb-h1", 4, 8, 1, 1.0, 1.0, 27, 3, 3, (4, 4, 4, 4)),
    ("zb-h1", 4, 8, 1, 1.2, 0.8, 28.2, 4.2, 4.2, (4, 4, 4, 4)),
    ("zb-h2", 4, 8, 1, 1.0, 1.0, 27, 3, 0, (7, 7, 7, 7)),
    ("zb-h2", 4, 8, 1, 1.5, 0.7, 28.9, 3.3, 3.3, (7, 7, 7, 7)),
    ("zb-interleaved", 4, 8, 2, 1.0, 1.0, 25.5, 1.5, 1.5, (8, 8, 8, 8)),
    ("zb-v", 4, 8, 2, 1.0, 1.0, 25.5, 1.5, 0, (8, 8, 8, 8)),
    ("gpipe", 8, 16, 1, 1.0, 1.0, 69, 21, 21, (16,) * 8),
    ("1f1b", 8, 16, 1, 1.0, 1.0, 69, 21, 21, (8, 7, 6, 5, 4, 3, 2, 1)),
    ("zb-h1", 8, 16, 1, 1.0, 1.0, 55, 7, 7, (8,) * 8),
    ("zb-v", 8, 16, 2, 1.0, 1.0, 51.5, 3.5, 0, (16,) * 8),
]


@pytest.mark.smoke
@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: "{}-p{}-m{}-v{}-I{}".format(*row[:5]))
def test_golden_table(
    row: tuple[str, int, int, int, float, float, float, float, float, object],
) -> None:
    name, p, m, v, i, w, makespan, makespan_bubble, span_bubble, peaks = row
    done = simulated(name, p, m, v, i=i, w=w)
    assert done.makespan_seconds == pytest.approx(makespan)
    assert done.makespan_bubble == pytest.approx(makespan_bubble)
    assert done.span_bubble == pytest.approx(span_bubble, abs=1e-9)
    assert done.peak_in_flight == peaks


LATENCY = [
    # name, chunks, makespan bubbles at p=4 m=12, then at p=8 m=32; latency 0, 0.25 and 0.5
    ("gpipe", 1, (9, 10.5, 12), (21, 24.5, 28)),
    ("1f1b", 1, (9, 14.5, 20), (21, 38, 55)),
    ("eager-1f1b", 1, (9, 10.5, 12), (21, 24.5, 28)),
    ("interleaved", 2, (4.5, 8, 11.5), (10.5, 18, 25.5)),
    ("zb-h1", 1, (3, 6, 9), (7, 14, 21)),
    ("zb-h2", 1, (3, 3.75, 4.5), (7, 8.75, 10.5)),
    ("zb-v", 2, (1.5, 4.75, 8.5), (3.5, 11.75, 20.5)),
]


@pytest.mark.parametrize(("name", "v", "small", "large"), LATENCY)
def test_latency_table(
    name: str, v: int, small: tuple[float, ...], large: tuple[float, ...]
) -> None:
    for p, m, bubbles in ((4, 12, small), (8, 32, large)):
        found = [simulated(name, p, m, v, c).makespan_bubble for c in (0, 0.25, 0.5)]
        assert found == pytest.approx(bubbles)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_what_transfers_add(p: int, rounds: int) -> None:
    m, c = p * rounds, 0.125
    for name in ("gpipe", "eager-1f1b"):
        grown = simulated(name, p, m, 1, c).makespan_bubble - 3 * (p - 1)
        assert grown == pytest.approx(2 * c * (p - 1))
    grown = simulated("1f1b", p, m, 1, c).makespan_bubble - 3 * (p - 1)
    assert grown == pytest.approx(max(0, 2 * c * ((p - 1) * (1 + rounds) - 1)))


@pytest.mark.parametrize("p", range(1, 6))
@pytest.mark.parametrize(("i", "w"), [(1.0, 1.0), (1.25, 0.75), (1.5, 0.5)])
def test_bubbles_are_as_the_legends_say(p: int, i: float, w: float) -> None:
    for m in (2 * p, 3 * p):
        for v in (1, 2, 3):
            whole = (p - 1) * (1 + i + w) / v
            assert simulated("interleaved", p, m, v, 0, i, w).makespan_bubble == pytest.approx(
                whole
            )
            assert simulated("looped-bfs", p, m, v, 0, i, w).makespan_bubble == pytest.approx(whole)
            bubble = simulated("zb-interleaved", p, m, v, 0, i, w).makespan_bubble
            assert bubble == pytest.approx((p - 1) * (1 + i - w) / v)
        h2 = simulated("zb-h2", p, m, 1, 0, i, w)
        assert h2.makespan_bubble == pytest.approx((p - 1) * max(1, 1 + i - 2 * w))
        assert h2.span_bubble == pytest.approx((p - 1) * max(0, 1 + i - 2 * w), abs=1e-9)
        vee = simulated("zb-v", p, m, 2)
        assert vee.makespan_bubble == pytest.approx((p - 1) / 2)
        assert vee.span_bubble == pytest.approx(0)


@pytest.mark.parametrize("p", range(2, 7))
def test_zb_h1_with_few_microbatches(p: int) -> None:
    for m in range(1, p):
        assert simulated("zb-h1", p, m, 1).makespan_bubble == pytest.approx(2 * p - 1 - m)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if "serial" not in name])
@pytest.mark.parametrize("p", [2, 4])
def test_more_microbatches_than_fill_the_devices_leave_the_bubbles(name: str, p: int) -> None:
    schedule = SCHEDULES[name]
    v, fewest = schedule.usual_chunks, schedule.filling(p)
    full = simulated(name, p, fewest, v)
    for m in (2 * p, 4 * p):
        more = simulated(name, p, m, v)
        assert more.makespan_bubble == pytest.approx(full.makespan_bubble)
        assert more.span_bubble == pytest.approx(full.span_bubble)
    if fewest > 1:
        assert simulated(name, p, fewest - 1, v).span_bubble > full.span_bubble


@pytest.mark.parametrize("v", [1, 2])
def test_interleaved_in_other_groups(v: int) -> None:
    for m in (6, 10):
        assert simulated("interleaved", 4, m, v).makespan_bubble == pytest.approx(9 / v)
    assert simulated("interleaved", 4, 3, 2).makespan_bubble == pytest.approx(6)
