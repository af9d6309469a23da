"""PipeDream's partition: published profiles, brute force, and plans that keep what they promise."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.ir.profile import Chain, ProfileLayer
from autopar.ir.profile_file import load_profile
from autopar.passes.stage.pipedream import SYNCS, Level, PipelineStage, Sync, partition

TEN_GBIT = 1.25e6
DATA = Path(__file__).parents[3] / "shared" / "data" / "pipedream"
published = pytest.mark.skipif(not DATA.exists(), reason="the published profiles are not here")


def chain_of(
    times: Sequence[float], weights: Sequence[int] = (), cuts: Sequence[int] = ()
) -> Chain:
    weights = weights or [0] * len(times)
    cuts = cuts or [0] * len(times)
    layers = tuple(
        ProfileLayer(f"n{i}", "Linear", 0.25 * t, 0.75 * t, 0, w)
        for i, (t, w) in enumerate(zip(times, weights, strict=True))
    )
    return Chain(layers, tuple(cuts))


# -- an independent statement of the problem -------------------------------------------------


def sync_cost(sync: Sync, m: int, nbytes: int, bandwidth: float) -> float:
    """The table of data/pipedream/README.md."""
    if sync == "ps":
        return 4 * (m - 1) * nbytes / (m * bandwidth)
    if sync == "ring":
        return 2 * (m - 1) * nbytes / (m * bandwidth)
    return 2 * (m - 1) * nbytes / bandwidth


def plans(count: int, workers: int, first: int = 0) -> list[list[tuple[int, int, int]]]:
    """Every way to give layers first..count-1 to consecutive stages that use all workers."""
    found = [[(first, count, workers)]]
    for cut in range(first + 1, count):
        for m in range(1, workers):
            found += [[(first, cut, m), *rest] for rest in plans(count, workers - m, cut)]
    return found


def scored(
    chain: Chain, plan: Sequence[tuple[int, int, int]], level: Level, sync: Sync,
    within: Callable[[int, int], float],
) -> float:  # fmt: skip
    worst, end = 0.0, plan[-1][1]
    for first, last, m in plan:
        nbytes = sum(x.parameter_bytes for x in chain.layers[first:last])
        stage = max(within(first, last), sync_cost(sync, m, nbytes, level.bytes_per_ms)) / m
        cut = 2 * chain.cut_bytes[last - 1] / level.bytes_per_ms if last < end else 0.0
        worst = max(worst, stage, cut)
    return worst


def brute_force(chain: Chain, levels: Sequence[Level], sync: Sync) -> float:
    @cache
    def best(depth: int, first: int, last: int) -> float:
        if depth == 0:
            return math.fsum(x.compute_ms for x in chain.layers[first:last])
        level = levels[depth - 1]
        return min(
            scored(chain, plan, level, sync, lambda i, j: best(depth - 1, i, j))
            for plan in plans(last, level.count, first)
        )

    return best(len(levels), 0, len(chain.layers))


def rescored(
    chain: Chain, stages: Sequence[PipelineStage], levels: Sequence[Level], sync: Sync
) -> float:
    """What a returned partition takes, nested stages and all; its layers must be the chain's."""
    inner = {(s.first - 1, s.last): s.stages for s in stages}

    def within(first: int, last: int) -> float:
        if len(levels) == 1:
            return math.fsum(x.compute_ms for x in chain.layers[first:last])
        return rescored(chain, inner[first, last], levels[:-1], sync)

    assert [s.first for s in stages[1:]] == [s.last + 1 for s in stages[:-1]]
    assert sum(s.replicas for s in stages) == levels[-1].count
    plan = [(s.first - 1, s.last, s.replicas) for s in stages]
    return scored(chain, plan, levels[-1], sync, within)


# -- published profiles ----------------------------------------------------------------------


@published
@pytest.mark.parametrize(
    ("model", "sync", "expected"),
    [
        ("vgg16", "ps", (381.063, 171.413, 88.874, 44.159)),
        ("resnet50", "ps", (221.709, 110.855, 55.427, 27.714)),
        ("gnmt", "ps", (45.936, 25.868, 19.285, 15.918)),
        ("vgg16", "ring", (336.268, 168.134, 88.874, 44.159)),
        ("resnet50", "ring", (221.709, 110.855, 55.427, 27.714)),
        ("gnmt", "ring", (45.936, 25.868, 19.285, 14.074)),
    ],
)
def test_published_profiles(model: str, sync: Sync, expected: tuple[float, ...]) -> None:
    chain = load_profile(DATA / f"{model}.json").chain()
    for workers, bottleneck in zip((2, 4, 8, 16), expected, strict=True):
        levels = [Level(workers, TEN_GBIT)]
        found = partition(chain, levels, sync)
        assert found.bottleneck_ms == pytest.approx(bottleneck, abs=5e-4)
        assert rescored(chain, found.stages, levels, sync) == pytest.approx(found.bottleneck_ms)


@published
def test_replicas_of_vgg16() -> None:
    chain = load_profile(DATA / "vgg16.json").chain()
    for workers in (4, 8, 16):
        stages = partition(chain, [Level(workers, TEN_GBIT)]).stages
        assert [s.replicas for s in stages] == [workers - 1, 1]
        assert stages[-1].last == len(chain.layers) == 40


# -- brute force -----------------------------------------------------------------------------

FEW = st.sampled_from([0, 0, 1, 2, 3, 7, 50])


@st.composite
def chains(draw: st.DrawFn, most: int) -> Chain:
    count = draw(st.integers(1, most))
    lists = [draw(st.lists(FEW, min_size=count, max_size=count)) for _ in range(3)]
    return chain_of(lists[0], lists[1], lists[2])


@settings(max_examples=150)
@given(chains(5), st.integers(1, 5), st.sampled_from(SYNCS), st.sampled_from([0.5, 1.0, 4.0, 64.0]))
def test_nothing_is_better(chain: Chain, workers: int, sync: Sync, bandwidth: float) -> None:
    levels = [Level(workers, bandwidth)]
    found = partition(chain, levels, sync)
    assert found.bottleneck_ms == pytest.approx(brute_force(chain, levels, sync))
    assert rescored(chain, found.stages, levels, sync) == pytest.approx(found.bottleneck_ms)


@settings(max_examples=100)
@given(
    chains(4),
    st.lists(
        st.builds(Level, st.integers(1, 3), st.sampled_from([0.5, 2.0, 16.0])),
        min_size=2,
        max_size=3,
    ),
    st.sampled_from(SYNCS),
)
def test_nothing_is_better_on_servers(chain: Chain, levels: list[Level], sync: Sync) -> None:
    found = partition(chain, levels, sync)
    assert found.workers == math.prod(level.count for level in levels)
    assert found.bottleneck_ms == pytest.approx(brute_force(chain, levels, sync))
    assert rescored(chain, found.stages, levels, sync) == pytest.approx(found.bottleneck_ms)


def test_fewer_layers_may_take_a_server_longer() -> None:
    # Without layer 1 to keep it busy, a server's third worker has layer 3's weights to synchronise.
    chain = chain_of([3, 0, 0], [10, 0, 35], [3, 2, 0])
    levels = [Level(3, 1.0), Level(2, 2.0)]
    found = partition(chain, levels)
    assert found.bottleneck_ms == pytest.approx(brute_force(chain, levels, "ps"))
    assert found.bottleneck_ms == pytest.approx(80 / 9)


@settings(max_examples=60)
@given(chains(5), st.integers(1, 4), st.sampled_from(SYNCS))
def test_of_equals_the_fewest_stages(chain: Chain, workers: int, sync: Sync) -> None:
    level = Level(workers, 1.0)
    found = partition(chain, [level], sync)

    def within(first: int, last: int) -> float:
        return math.fsum(x.compute_ms for x in chain.layers[first:last])

    best = [
        [(last - first, m) for first, last, m in reversed(plan)]
        for plan in plans(len(chain.layers), workers)
        if scored(chain, plan, level, sync, within) <= found.bottleneck_ms * (1 + 1e-12)
    ]
    # From the last stage to the first: fewest replicas, then most layers.
    wanted = min(best, key=lambda plan: (len(plan), [(m, -size) for size, m in plan]))
    assert [(s.last - s.first + 1, s.replicas) for s in reversed(found.stages)] == wanted


def recurrence(chain: Chain, workers: int, bandwidth: float) -> float:
    """A(N, M) with ps as it is written down, over all i: slow but for chains of any length."""
    times = np.cumsum([0.0, *(x.compute_ms for x in chain.layers)])
    weights = np.cumsum([0.0, *(x.parameter_bytes for x in chain.layers)])
    cuts = 2 * np.array([0, *chain.cut_bytes]) / bandwidth
    count = len(chain.layers)

    def stage(first: int, last: int, m: int) -> float:
        sync = 4 * (m - 1) * (weights[last] - weights[first]) / (m * bandwidth)
        return max(times[last] - times[first], sync) / m

    @cache
    def least(last: int, workers: int) -> float:
        best = stage(0, last, workers)
        for m in range(1, workers):
            for i in range(1, last):
                before = max(stage(i, last, m), cuts[i])
                if before < best:
                    best = min(best, max(before, least(i, workers - m)))
        return float(best)

    return least(count, workers)


@pytest.mark.parametrize("seed", range(3))
def test_long_chains(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times = rng.exponential(1.0, 33) * (rng.random(33) < 0.8)
    weights = [int(w) for w in rng.integers(0, 40, 33)]
    cuts = [*(int(c) for c in rng.integers(0, 12, 32)), 0]
    chain = chain_of([float(t) for t in times], weights, cuts)
    for workers in (3, 6, 11):
        found = partition(chain, [Level(workers, 8.0)])
        assert found.bottleneck_ms == pytest.approx(recurrence(chain, workers, 8.0), rel=1e-12)


# -- corners ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
def test_one_worker_has_no_choice(sync: Sync) -> None:
    chain = chain_of([1, 2, 3], [5, 5, 5], [9, 9, 0])
    (stage,) = partition(chain, [Level(1, 1.0)], sync).stages
    assert stage == PipelineStage(1, 3, 1, 6.0, 0.0, 0.0, 1)


def test_more_workers_than_layers_become_replicas() -> None:
    found = partition(chain_of([12.0]), [Level(100, 1.0)])
    assert [(s.first, s.last, s.replicas) for s in found.stages] == [(1, 1, 100)]
    assert found.bottleneck_ms == pytest.approx(0.12)


def test_layers_that_take_no_time() -> None:
    found = partition(chain_of([0, 0, 0]), [Level(3, 1.0)])
    assert found.bottleneck_ms == 0
    assert len(found.stages) == 1


def test_in_flight_keeps_the_pipeline_full() -> None:
    found = partition(chain_of([4, 2, 2], [0, 90, 90]), [Level(4, 1.0)], "sosp19")
    assert [(s.replicas, s.in_flight) for s in found.stages] == [(2, 2), (1, 2), (1, 1)]
    found = partition(chain_of([6, 2], [0, 90]), [Level(4, 1.0)], "sosp19")
    assert [(s.replicas, s.in_flight) for s in found.stages] == [(3, 2), (1, 1)]


def test_it_prints() -> None:
    found = partition(chain_of([4, 2, 2], [0, 90, 90]), [Level(4, 1.0)], "sosp19")
    assert str(found) == (
        "partition 4 workers, sosp19, 2.000 ms {\n"
        "  1..1  x2  compute 2.000 ms  sync 0.000 ms  transfer 0.000 ms  in flight 2\n"
        "  2..2  x1  compute 2.000 ms  sync 0.000 ms  transfer 0.000 ms  in flight 2\n"
        "  3..3  x1  compute 2.000 ms  sync 0.000 ms  transfer 0.000 ms  in flight 1\n"
        "}"
    )


def test_no_layers_make_no_stages() -> None:
    with pytest.raises(InputError, match="no layers"):
        partition(Chain((), ()), [Level(1, 1.0)])


@pytest.mark.parametrize(
    ("levels", "sync", "told"),
    [
        ([], "ps", "there are no levels"),
        ([Level(0, 1.0)], "ps", "0 workers"),
        ([Level(2, 1.0), Level(-3, 1.0)], "ps", "-3 workers"),
        ([Level(2, 0.0)], "ps", "bandwidth of 0.0 bytes/ms"),
        ([Level(2, math.inf)], "ps", "bandwidth of inf"),
        ([Level(2, math.nan)], "ps", "bandwidth of nan"),
        ([Level(2, 1.0)], "tree", "there is no sync 'tree'; write ps, ring, sosp19"),
    ],
)
def test_levels_that_make_no_sense(levels: list[Level], sync: Sync, told: str) -> None:
    with pytest.raises(InputError, match=told):
        partition(chain_of([1.0]), levels, sync)
