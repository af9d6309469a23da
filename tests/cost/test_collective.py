"""Collective prices against libtpu's and XLA's own estimates, and laws they must keep."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.cost import Prices, collective_seconds
from autopar.errors import ClusterError
from autopar.ir.listing import COLLECTIVES, CollectiveKind
from autopar.ir.sharding import MeshShape

MIB = 2**20
# Microseconds for 32 MiB in the order of KINDS, over the last axis; None where not probed.
# Estimates of libtpu and of XLA's speed-of-light model.
KINDS: tuple[CollectiveKind, ...] = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
Row = tuple[float | None, ...]
TPU: list[tuple[str, str, Row]] = [
    ("v5e:2x4", "data=8", (360, 360, 364, 1259, 719)),
    ("v5e:4x4", "4,4", (360, 719, 721, 1079, 719)),
    ("v5e:16x16", "16,16", (360, None, 742, None, None)),
    ("v6e:16x16", "16,16", (169, 359, 362, 2696, 359)),
    ("v5p:4x4x4", "16,4", (135, 359, 360, 539, 359)),
    ("v5p:4x4x8", "8,16", (169, 180, 185, 674, 359)),
    ("tpu7x:4x4x4", "16,8", (157, 180, 180, 629, 359)),
    ("2xv5e:4x4", "2,16", (360, 360, 367, 1349, 719)),
    # Probed for this model with libtpu 0.0.52: no ring, half a ring, three directions at once.
    ("v6e:4x4", "4,4", (135, 359, 360, None, None)),
    ("v5p:2x2x4", "8,2", (90, 359, None, None, None)),
    ("v5p:4x4x4", "32,2", (90, 359, None, None, None)),
    ("v5p:4x4x4", "data=64", (123, 120, None, None, None)),
    ("v6e:16x16", "data=256", (179, None, None, None, None)),
]
# XLA's latencies as benchmarks/collectives.py probes them: cluster, mesh, axis, MiB, microseconds.
# Groups within a host are its tables of measured collectives, others its analytic model.
GPU: list[tuple[str, str, str, int, Row]] = [
    ("8xh100", "data=8", "data", 1, (31, 52, 20, 55, 35)),
    ("8xh100", "data=8", "data", 8, (65, 105, 59, 71, 128)),
    ("8xh100", "data=8", "data", 32, (129, 226, 134, 133, 452)),
    ("8xh100", "data=8", "data", 256, (729, 1262, 771, 759, None)),
    ("8xh100", "data=2,model=4", "model", 1, (20, 43, 29, 34, 35)),
    ("8xh100", "data=2,model=4", "model", 8, (57, 85, 55, 79, 128)),
    ("8xh100", "data=2,model=4", "model", 32, (113, 218, 124, 136, 452)),
    ("8xh100", "data=2,model=4", "model", 256, (666, 1420, 774, 671, None)),
    ("8xh100", "data=2,model=4", "data", 1, (18, 21, 16, 36, 32)),
    ("8xh100", "data=2,model=4", "data", 8, (40, 73, 43, 47, 93)),
    ("8xh100", "data=2,model=4", "data", 32, (96, 188, 126, 106, 301)),
    ("8xh100", "data=2,model=4", "data", 256, (549, 1181, 773, 517, None)),
    ("8xb200", "data=8", "data", 1, (36, 49, 33, 43, 39)),
    ("8xb200", "data=8", "data", 8, (63, 94, 52, 54, 123)),
    ("8xb200", "data=8", "data", 32, (84, 197, 92, 113, 422)),
    ("8xb200", "data=8", "data", 256, (433, 843, 441, 459, None)),
    # All of two and of four hosts, then one GPU of each: None where an all-to-all is charged for
    # what stays at home.
    ("2x8xh100", "data=16", "data", 1, (120, 194, 120, 365, 126)),
    ("2x8xh100", "data=16", "data", 32, (305, 517, 305, 1095, 1530)),
    ("2x8xh100", "data=16", "data", 256, (1673, 2917, 1673, 6563, 11705)),
    ("4x8xh100", "data=32", "data", 1, (195, 343, 195, 967, 126)),
    ("4x8xh100", "data=32", "data", 32, (385, 676, 385, 2018, 1530)),
    ("4x8xh100", "data=32", "data", 256, (1782, 3130, 1782, 9901, 11705)),
    ("2x8xh100", "data=2,model=8", "data", 1, (104, 162, 104, 126, 126)),
    ("2x8xh100", "data=2,model=8", "data", 32, (813, 1541, 813, None, 1530)),
    ("2x8xh100", "data=2,model=8", "data", 256, (5971, 11582, 5974, None, 11705)),
    ("4x8xh100", "data=4,model=8", "data", 1, (189, 332, 189, 200, 126)),
    ("4x8xh100", "data=4,model=8", "data", 32, (1233, 2377, 1233, None, 1530)),
    ("4x8xh100", "data=4,model=8", "data", 256, (8900, 17401, 8902, None, 11705)),
    ("2x8xh200", "data=16", "data", 32, (216, 353, 216, 722, 833)),
    ("2x8xh200", "data=16", "data", 256, (957, 1603, 958, 3580, 6131)),
    ("2x8xb200", "data=16", "data", 32, (182, 298, 182, 605, 783)),
    ("2x8xb200", "data=16", "data", 256, (847, 1484, 847, 3298, 5802)),
]  # fmt: skip


def tolerance(cluster: str, mib: int) -> float:
    """How near: an analytic model's figures to a seventh; measured ones scatter, most the small."""
    if "x8x" in cluster:
        return 0.15 if mib > 1 else 0.3
    return 0.25 if mib > 8 else 0.3 if mib > 1 else 0.75


def prices(cluster: str, mesh: str) -> Prices:
    return Prices(Cluster.parse(cluster), MeshShape.of(mesh))


def microseconds(cluster: str, mesh: str, nbytes: float = 32 * MIB) -> list[float]:
    table = prices(cluster, mesh)
    return [1e6 * table.collective(kind, nbytes, table.mesh.names[-1:]) for kind in KINDS]


@pytest.mark.parametrize(("cluster", "mesh", "row"), TPU)
def test_tpu_collectives_as_libtpu_estimates_them(cluster: str, mesh: str, row: Row) -> None:
    for kind, ours, theirs in zip(KINDS, microseconds(cluster, mesh), row, strict=True):
        if theirs is not None:
            # 16 hops of 1 us are 8 % of the fastest: the probes leave latency out.
            assert ours == pytest.approx(theirs, rel=0.10), kind


@pytest.mark.parametrize(("cluster", "mesh", "axis", "mib", "row"), GPU)
def test_gpu_collectives_as_xla_estimates_them(
    cluster: str, mesh: str, axis: str, mib: int, row: Row
) -> None:
    table = prices(cluster, mesh)
    for kind, theirs in zip(KINDS, row, strict=True):
        if theirs is not None:
            ours = 1e6 * table.collective(kind, mib * MIB, (axis,))
            # Two GPUs alone exchange half again as fast as any other pair.
            rel = 0.6 if theirs in (93, 301) else tolerance(cluster, mib)
            assert ours == pytest.approx(theirs, rel=rel), kind


def test_collectives_of_a_megabyte_and_more_are_right_on_average() -> None:
    ratios: dict[str, list[float]] = {}
    for cluster, mesh, axis, mib, row in GPU:
        table = prices(cluster, mesh)
        for kind, theirs in zip(KINDS, row, strict=True):
            if theirs is not None:
                seconds = table.collective(kind, mib * MIB, (axis,))
                ratios.setdefault(kind, []).append(1e6 * seconds / theirs)
    for name, found in ratios.items():
        assert statistics.geometric_mean(found) == pytest.approx(1, abs=0.08), name


def test_a_ring_in_figures() -> None:
    # 8 virtual CPU devices, 2 GB/s, 100 us to start, 2 us a step; 80 MB.
    # all-gather: 100 + 7 * 2 + 7/8 * 80e6 / 2e9 = 114 us + 35 ms.
    # all-reduce by the ring: 100 + 14 * 2 + 2 * 7/8 * 80e6 / 2e9 = 128 us + 70 ms.
    table = prices("8xcpu", "data=8")
    assert table.collective("all-gather", 80e6, ["data"]) == pytest.approx(35.114e-3)
    assert table.collective("all-reduce", 80e6, ["data"]) == pytest.approx(70.128e-3)
    # A small all-reduce takes the tree: 100 + 2 * 3 * 2 = 112 us + 2 * 8e3 / 2e9 = 8 us.
    assert table.collective("all-reduce", 8e3, ["data"]) == pytest.approx(120e-6)


def test_a_ring_over_hosts_goes_at_the_pace_of_the_slowest_level() -> None:
    # 4 hosts x 8 A100: 230 GB/s inside, 8 * 22.5 = 180 GB/s across, S = 320 MB.
    # waits 29 + 7 * 2.1 us inside, 8.4 + 3 * 14 us across; 31/32 * 320e6 / 180e9 = 1722.2 us;
    # its own 10 MB at 2.5 * 230 GB/s 17.4 us.
    table = prices("4x8xa100-40gb", "data=32")
    assert table.collective("all-gather", 320e6, ["data"]) == pytest.approx(1833.7e-6, rel=1e-4)
    assert table.collective("reduce-scatter", 320e6, ["data"]) == pytest.approx(1851.1e-6, rel=1e-4)


def test_small_messages_are_sent_the_way_that_starts_sooner() -> None:
    # 8 H100: 12 us to start at 0.36 of the rates, or 29 us at all of them; 7 steps of 2.1 us.
    # 64 KiB: 26.7 + (7/8 V / 361e9 + 1/8 V / 902.5e9) / 0.36 us; 32 MiB: 43.7 + 81.33 + 4.65 us.
    table = prices("8xh100", "data=8")
    assert table.collective("all-gather", 2**16, ["data"]) == pytest.approx(27.166e-6, rel=1e-4)
    assert table.collective("all-gather", 2**25, ["data"]) == pytest.approx(129.68e-6, rel=1e-4)


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("nbytes", [2**12, 2**20, 2**25, 2**30])
def test_a_collective_that_another_started_takes_no_longer(kind: str, nbytes: int) -> None:
    gpus = prices("2x8xh100", "data=2,model=8")
    alone, joined = (f(kind, nbytes, ["model"]) for f in (gpus.collective, gpus.joined))
    # 29 us to start, or 12 as small messages do; a reduction in the switch 70 or 53.
    assert alone - 17.001e-6 <= joined <= alone
    tpus = prices("v5e:4x4", "4,4")
    assert tpus.joined(kind, nbytes, ["data"]) == tpus.collective(kind, nbytes, ["data"])


def test_an_all_reduce_may_go_level_by_level() -> None:
    # 64 KiB over 4 hosts x 8 H100, S = 65536 B, a small message: trees inside and across,
    # 12 + 6 * 2.1 + (2 S / 361e9 + 3 S / 902.5e9) / 0.36 and 47 + 4 * 37 + 2 S / 8 / 22.8e9 us.
    seconds = prices("4x8xh100", "data=32").collective("all-reduce", 2**16, ["data"])
    assert seconds == pytest.approx(221.93e-6, rel=1e-4)


def test_large_all_reduces_are_added_up_in_the_switch() -> None:
    # 1 GiB: 70 us + 2^30 / (0.6 * 361e9) = 5.03 ms; the ring takes 5.71 ms.
    seconds = prices("8xh100", "data=8").collective("all-reduce", 2**30, ["data"])
    assert seconds == pytest.approx(5.0273e-3, rel=1e-3)


def test_nothing_to_do_costs_nothing() -> None:
    table = prices("8xh100", "data=8,model=1")
    assert table.collective("all-reduce", 0, ["data"]) == 0
    assert table.collective("all-reduce", 1e6, ["model"]) == 0
    assert table.collective("all-reduce", 1e6, []) == 0


def test_an_unknown_kind_lists_the_known() -> None:
    with pytest.raises(ClusterError, match="'broadcast' is not known; expected one of all-reduce"):
        collective_seconds("broadcast", 1.0, ())


@settings(max_examples=60)
@given(
    kind=st.sampled_from(COLLECTIVES),
    place=st.sampled_from(
        [("8xcpu", "2,4"), ("2x8xh100", "4,4"), ("v5e:4x4", "2,8"), ("2xv5e:4x4", "4,8")]
    ),
    nbytes=st.floats(1, 1e11),
    factor=st.floats(1, 100),
)
def test_more_bytes_never_take_less(
    kind: CollectiveKind, place: tuple[str, str], nbytes: float, factor: float
) -> None:
    table = prices(*place)
    for axes in (["data"], ["model"], ["data", "model"]):
        small, large = (table.collective(kind, n, axes) for n in (nbytes, nbytes * factor))
        assert 0 < small <= large
