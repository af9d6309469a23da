"""Grids and costs drawn at random."""

from hypothesis import strategies as st

from autopar.schedule.grid import Grid
from autopar.schedule.order import groups_evenly
from autopar.schedule.simulate import StageTimes
from autopar.schedule.table import SCHEDULES, make_grid


@st.composite
def grids(draw: st.DrawFn, devices: int = 6, microbatches: int = 14) -> Grid:
    """A grid of any schedule that the numbers allow."""
    schedule = SCHEDULES[draw(st.sampled_from(list(SCHEDULES)))]
    p = draw(st.integers(1, devices))
    least, most = schedule.chunks
    v = draw(st.integers(least, most or 4))
    counts = st.integers(1, microbatches)
    even = schedule.even_groups and v > 1
    m = draw(counts.filter(lambda m: groups_evenly(p, m)) if even else counts)
    return make_grid(schedule.name, p, m, v)


@st.composite
def stage_times(draw: st.DrawFn, stages: int) -> StageTimes:
    """Uneven costs; the seconds are whole eighths, so that sums are exact in any order."""

    def some(count: int, least: int) -> tuple[float, ...]:
        eighths = st.integers(least, 40)
        return tuple(draw(eighths) / 8 for _ in range(count))

    sizes = st.lists(st.integers(0, 1000), min_size=stages, max_size=stages)
    return StageTimes(
        forward=some(stages, 1),
        input_gradient=some(stages, 1),
        weight_gradient=some(stages, 1),
        send_seconds=some(stages - 1, 0),
        return_seconds=some(stages - 1, 0) if draw(st.booleans()) else (),
        activation_bytes=tuple(draw(sizes)),
        kept_bytes=tuple(draw(sizes)),
    )
