"""Programs that are timed do what they are timed for, as often as they say."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.cluster.calibration import Experiment
from autopar.errors import ClusterError
from autopar.hlo.collectives import read_collectives
from autopar.ir.listing import COLLECTIVES
from autopar.ir.sharding import MeshShape
from autopar.runtime.bind import bind_mesh
from autopar.runtime.measure.bench import DeviceBench, Repeats, Timing, program
from autopar.runtime.measure.devices import choose_devices, devices_at

ONCE = Repeats(1, 1, 0.0)


@pytest.mark.parametrize("axis", ["data", "model"])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_collective_runs_as_often_and_as_large_as_it_says(kind: str, axis: str) -> None:
    mesh = bind_mesh(MeshShape.of("data=2,model=4"), range(8))
    experiment = Experiment(kind, "f32", (8192,), "data=2, model=4", axis)
    run, args, ops = program(experiment, mesh, trips=6)
    found = read_collectives(run.lower(*args).compile().as_text())
    assert {c.kind for c in found} == {kind}
    assert {c.nbytes for c in found} == {8192}
    assert sum(c.trips for c in found) == ops
    assert {len(group) for c in found for group in c.groups} == {2 if axis == "data" else 4}
    assert jax.block_until_ready(run(*args)).shape == args[0].shape


@pytest.mark.parametrize(
    ("experiment", "ops"),
    [
        (Experiment("launch", "f32", (4096,)), 24),
        (Experiment("scale", "f32", (2**16,)), 3),
        (Experiment("add", "f32", (2**16,)), 3),
        (Experiment("matmul", "bf16", (16, 32, 64)), 6),
        (Experiment("matmul", "f16", (16, 16, 16)), 6),
        (Experiment("matmul", "fp8", (16, 16, 16)), 6),
        (Experiment("matmul", "f32", (64, 64, 64)), 6),
    ],
)
def test_local_ops_stay_finite_and_are_counted(experiment: Experiment, ops: int) -> None:
    mesh = bind_mesh(MeshShape.of((8,)), range(8))
    run, args, count = program(experiment, mesh, trips=3)
    assert count == ops
    result = np.asarray(run(*args).astype(np.float32))
    assert np.isfinite(result).all()
    if experiment.kind == "matmul":
        first = np.asarray(args[0].astype(np.float32))
        assert 0.05 < np.abs(result).mean() / np.abs(first).mean() < 20


def test_a_bench_times_on_all_devices_of_a_cluster() -> None:
    bench = DeviceBench(Cluster.parse("4xcpu"), devices_at(choose_devices("0,2,4,6")))
    timing = bench.timed(Experiment("all-reduce", "f32", (8192,), "data=4", "data"), 4, ONCE)
    assert isinstance(timing, Timing)
    assert timing.seconds > 0
    assert timing.count == 1
    before = bench.clock()
    assert bench.clock() >= before


def test_what_devices_cannot_do_is_an_answer() -> None:
    bench = DeviceBench(Cluster.parse("8xcpu"), devices_at(choose_devices("")))
    refused = bench.timed(Experiment("all-reduce", "f32", (12,), "data=8", "data"), 4, ONCE)
    assert isinstance(refused, Timing)
    odd = bench.timed(Experiment("reduce-scatter", "f32", (12,), "data=8", "data"), 4, ONCE)
    assert isinstance(odd, str)
    assert "Error" in odd


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("", range(8)),
        ("3", range(3)),
        ("1,5", (1, 5)),
        ("6, 2", (2, 6)),
        ("0", (0,)),
        ("cpu:8", range(8)),
    ],
)
def test_devices_that_are_chosen(text: str, places: range | tuple[int, ...]) -> None:
    assert choose_devices(text) == tuple(places)


@pytest.mark.parametrize("text", ["cpu:0", "cpu:x", "-1", "1,", "cpu:9"])
def test_devices_that_are_not_there(text: str) -> None:
    with pytest.raises(ClusterError):
        choose_devices(text)
