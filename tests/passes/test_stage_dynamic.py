"""The stage recurrence gives Alpa's known values, and what a search through everything gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.cluster.placement import submesh_families
from autopar.passes.stage.dynamic import (
    Interval,
    Pace,
    Recurrence,
    even_chunks,
    find_frontier,
    min_memory,
    stages_that_fit,
)
from autopar.passes.stage.interval_costs import Floats, interval_costs
from autopar.passes.stage.prices import BatchPrices, StageTable
from tests.passes.stage_tables import (
    PLENTY,
    best_partition,
    every_partition,
    partition_bytes,
    partition_seconds,
    scaled_table,
    stage_tables,
)

EVEN = (1.0,) * 8


def flights(microbatches: int, stages: int) -> list[int]:
    """Those of 1f1b, from the first stage."""
    return [min(microbatches, stages - s) for s in range(stages)]


def recurrence_of(table: StageTable, batch: BatchPrices) -> Recurrence:
    """The recurrence under 1f1b; the tables here have one family."""
    (family,) = submesh_families(table.cluster)
    devices = {table.submeshes.index(shape): shape.device_count for shape in family}
    most = min(table.layer_count, table.cluster.device_count)
    counts = flights(batch.microbatches, most)[::-1]
    return stages_that_fit(interval_costs(table, batch), devices, counts, table.memory_bytes)


def pace_of(batch: BatchPrices, recurrence: Recurrence) -> Pace:
    m = batch.microbatches
    return Pace(m, tuple(min(m, p) for p in range(1, recurrence.most_stages + 1)))


def best_of(
    table: StageTable, batch: BatchPrices, only: int | None = None
) -> tuple[float, tuple[Interval, ...]]:
    """Seconds and parts of the best number of stages."""
    recurrence = recurrence_of(table, batch)
    found = find_frontier(recurrence, pace_of(batch, recurrence), math.inf, only)
    stages = int(np.argmin(found.seconds))
    if math.isinf(found.seconds[stages]):
        return math.inf, ()
    return float(found.seconds[stages]), recurrence.trace_back(
        stages, float(found.threshold[stages])
    )


def cut_at(parts: Sequence[Interval]) -> list[tuple[int, int, int]]:
    """First layer, last layer, devices: in these tables option u is submesh u of 1, 2, 4, 8."""
    return [(part.first, part.last, 2**part.option) for part in parts]


@pytest.mark.parametrize(
    ("weights", "penalty", "microbatches", "seconds", "stages"),
    [
        (EVEN, 0.15, 4, 5.8, [(0, 7, 8)]),
        (EVEN, 0.15, 16, 21.85, [(0, 1, 2), (2, 3, 2), (4, 5, 2), (6, 7, 2)]),
        (EVEN, 0.15, 128, 135.0, [(k, k, 1) for k in range(8)]),
        (EVEN, 0.05, 16, 18.4, [(0, 7, 8)]),
        (EVEN, 0.05, 128, 135.0, [(k, k, 1) for k in range(8)]),
        (EVEN, 0.0, 16, 16.0, None),
        ((1, 1, 1, 1, 2, 2, 4, 4), 0.15, 4, 11.6, [(0, 7, 8)]),
        (
            (1, 1, 1, 1, 2, 2, 4, 4), 0.15, 64, 154.1,
            [(0, 3, 2), (4, 5, 2), (6, 6, 2), (7, 7, 2)],
        ),
    ],
)  # fmt: skip
def test_known_values_of_scaled_layers(
    weights: tuple[float, ...],
    penalty: float,
    microbatches: int,
    seconds: float,
    stages: list[tuple[int, int, int]] | None,
) -> None:
    table = scaled_table("8xcpu", weights, [microbatches], penalty)
    found, parts = best_of(table, table.batches[0])
    assert found == pytest.approx(seconds, rel=1e-9)
    if stages:
        assert cut_at(parts) == stages


def random_recurrence(most_stages: int) -> Recurrence:
    """Alpa's random table of [first, last, submesh, configuration], which is not additive."""
    table: Floats = np.random.RandomState(42).rand(8, 8, 4, 5)
    columns = table.transpose(2, 3, 0, 1).reshape(20, 8, 8)
    price = np.where(np.triu(np.ones((8, 8), dtype=np.bool_)), columns, np.inf)
    return Recurrence(
        options=np.arange(20),
        added=price,
        slowest=price,
        bears=np.zeros((20, 8, 8), dtype=np.int64),
        flights=np.zeros(most_stages + 1, dtype=np.int64),
        devices=np.repeat(np.array([1, 2, 4, 8], dtype=np.int64), 5),
        device_count=8,
        thresholds=np.unique(price[np.isfinite(price)]),
    )


@pytest.mark.parametrize(
    ("microbatches", "most_stages", "seconds"),
    [
        (16, 8, 0.29528505825705),
        (1, 8, 0.0236323009),
        (512, 8, 9.277936233),
        (16, 2, 0.29528505825705),
        (16, 1, 3.8022007),
    ],
)
def test_known_values_of_a_random_table(
    microbatches: int, most_stages: int, seconds: float
) -> None:
    recurrence = random_recurrence(most_stages)
    pace = Pace(microbatches, (1 << 30,) * most_stages)
    found = find_frontier(recurrence, pace, math.inf)
    stages = int(np.argmin(found.seconds))
    assert found.seconds[stages] == pytest.approx(seconds, rel=1e-6)
    parts = recurrence.trace_back(stages, float(found.threshold[stages]))
    if most_stages == 1:
        assert parts == (Interval(0, 7, 3 * 5 + 3),)
    else:
        assert parts == (Interval(0, 3, 2 * 5 + 2), Interval(4, 7, 2 * 5 + 4))


@settings(max_examples=150)
@given(stage_tables())
def test_the_best_of_all_partitions_is_found(table: StageTable) -> None:
    for batch in table.batches:
        m = batch.microbatches
        best = best_partition(table, batch, partial(flights, m))
        seconds, parts = best_of(table, batch)
        if best is None:
            assert math.isinf(seconds)
            continue
        assert seconds == pytest.approx(best.seconds, rel=1e-9)
        counts = flights(m, len(parts))
        assert partition_seconds(table, batch, parts, counts[0]) == pytest.approx(seconds)
        assert partition_bytes(batch, parts, counts) <= table.memory_bytes


@settings(max_examples=60)
@given(stage_tables())
def test_every_number_of_stages_is_found_when_it_is_asked_for(table: StageTable) -> None:
    batch = table.batches[0]
    m = batch.microbatches
    least: dict[int, float] = {}
    for parts in every_partition(table, batch):
        counts = flights(m, len(parts))
        if partition_bytes(batch, parts, counts) <= table.memory_bytes:
            seconds = partition_seconds(table, batch, parts, counts[0])
            least[len(parts)] = min(seconds, least.get(len(parts), math.inf))
    for stages in range(1, recurrence_of(table, batch).most_stages + 1):
        found = best_of(table, batch, stages)[0]
        assert found == pytest.approx(least.get(stages, math.inf), rel=1e-9)


@settings(max_examples=60)
@given(stage_tables())
def test_the_least_memory_is_that_of_the_leanest_partition(table: StageTable) -> None:
    batch = table.batches[0]
    (family,) = submesh_families(table.cluster)
    devices = {table.submeshes.index(shape): shape.device_count for shape in family}
    most = min(table.layer_count, table.cluster.device_count)
    counts = flights(batch.microbatches, most)[::-1]
    least = min(
        partition_bytes(batch, parts, flights(batch.microbatches, len(parts)))
        for parts in every_partition(table, batch)
    )
    costs = interval_costs(table, batch)
    found = min_memory(costs, devices, counts, PLENTY, None)
    assert found is not None
    nbytes, parts = found
    assert nbytes == least
    assert partition_bytes(batch, parts, flights(batch.microbatches, len(parts))) == least
    assert min_memory(costs, devices, counts, least, None) is None
    # Exactly that much suffices, and a byte less does not.
    assert math.isfinite(best_of(replace(table, memory_bytes=least), batch)[0])
    assert math.isinf(best_of(replace(table, memory_bytes=least - 1), batch)[0])


@settings(max_examples=40)
@given(stage_tables())
def test_more_memory_is_never_slower(table: StageTable) -> None:
    batch = table.batches[0]
    limits = (80, 120, 200, 400, 1000)
    found = [best_of(replace(table, memory_bytes=limit), batch)[0] for limit in limits]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(found))


@settings(max_examples=60)
@given(stage_tables())
def test_even_chunks_have_the_least_slowest_chunk_that_fits(table: StageTable) -> None:
    batch = table.batches[0]
    costs = interval_costs(table, batch)
    options = np.flatnonzero(costs.submesh == costs.submesh[0]).tolist()
    bears = costs.most_in_flight(table.memory_bytes)

    def slowest(cuts: Sequence[int], counts: Sequence[int]) -> float:
        parts = zip((0, *cuts), (*cuts, table.layer_count), counts, strict=True)
        return max(
            min(
                (
                    float(costs.seconds[o, first, after - 1])
                    for o in options
                    if bears[o, first, after - 1] >= flight
                ),
                default=math.inf,
            )
            for first, after, flight in parts
        )

    for count in range(1, table.layer_count + 1):
        counts = flights(batch.microbatches, count)
        every = combinations(range(1, table.layer_count), count - 1)
        least = min(slowest(cuts, counts) for cuts in every)
        found = even_chunks(costs, options, counts, table.memory_bytes)
        if found is None:
            assert math.isinf(least)
            continue
        assert [p.first for p in found[1:]] == [p.last + 1 for p in found[:-1]]
        assert slowest([p.first for p in found[1:]], counts) == pytest.approx(least)
