"""Which experiments are run, and in which order."""

from __future__ import annotations

import pytest

from autopar.calibrating.fitted import predicted_seconds
from autopar.calibrating.ladder import FULL, QUICK, LadderEffort, ladder, measured_axes
from autopar.cluster import Cluster
from autopar.ir.listing import COLLECTIVES
from autopar.ir.sharding import MeshShape

NAMES = (
    "8xcpu",
    "8xh100",
    "4x8xa100-80gb",
    "v5e:4x4",
    "2xv5e:4x4",
    "tpu7x:2x2x1",
    "1xcpu",
    "6xcpu",
)


def texts(name: str, most: int) -> list[str]:
    return [f"{axis} of {mesh}" for mesh, axis in measured_axes(Cluster.parse(name), most)]


def test_axes_fill_each_level_before_anything_else() -> None:
    assert texts("8xcpu", 6) == [
        "data of data=8", "data of data=2, model=4", "model of data=2, model=4",
    ]  # fmt: skip
    assert texts("4x8xh100", 1) == [
        "data of data=4, model=8", "model of data=4, model=8", "data of data=32",
    ]  # fmt: skip
    assert texts("1xcpu", 6) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chosen", [QUICK, FULL], ids=["quick", "full"])
def test_a_ladder_has_everything_within_its_bounds(name: str, chosen: LadderEffort) -> None:
    cluster = Cluster.parse(name)
    steps = ladder(cluster, chosen)
    assert len(set(steps)) == len(steps)
    assert all(predicted_seconds(cluster, step) <= chosen.longest for step in steps)
    kinds = {step.kind for step in steps}
    wanted = {"launch", "scale", "add", "matmul"}
    assert kinds == (wanted | set(COLLECTIVES) if cluster.device_count > 1 else wanted)
    dtypes = {step.dtype for step in steps if step.kind == "matmul"}
    assert dtypes == {"bf16", "f16", "f32", "fp8"} & set(dict(cluster.chip.peak_flops))


@pytest.mark.parametrize("name", NAMES)
def test_every_series_has_both_ends_before_any_has_a_middle(name: str) -> None:
    steps = ladder(Cluster.parse(name), FULL)
    series = {step.series for step in steps}
    ends = steps[: 2 * len(series)]
    for one in series:
        sizes = sorted(step.shape for step in steps if step.series == one)
        first = {step.shape for step in ends if step.series == one}
        if one[0] != "matmul":
            assert first >= {sizes[0], sizes[-1]}
        assert len(first) >= 2


def test_parts_of_a_collective_are_whole_for_odd_groups() -> None:
    for step in ladder(Cluster.parse("6xcpu"), FULL):
        if step.axis:
            assert step.shape[0] % (4 * MeshShape.of(step.mesh).size([step.axis])) == 0
