"""Collective prices against libtpu's and XLA's own estimates, and laws they must keep."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.cost import COLLECTIVE_KINDS, CollectiveKind, Prices, collective_seconds
from autopar.errors import ClusterError
from autopar.ir.mesh import MeshShape

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
GPU: list[tuple[str, str, Row, float]] = [
    ("8xh100", "data=8", (129, 226, 134, 133, 452), 0.15),
    ("4x8xh100", "data=32", (385, 676, 385, 2018, 1530), 0.35),
]


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


@pytest.mark.parametrize(("cluster", "mesh", "row", "rel"), GPU)
def test_gpu_collectives_as_xla_estimates_them(
    cluster: str, mesh: str, row: Row, rel: float
) -> None:
    for kind, ours, theirs in zip(KINDS, microseconds(cluster, mesh), row, strict=True):
        assert ours == pytest.approx(theirs, rel=rel), kind


def test_a_ring_in_figures() -> None:
    # 8 virtual CPU devices, 2 GB/s, 100 us to start, 2 us a step; 80 MB.
    # all-gather: 100 + 7 * 2 + 7/8 * 80e6 / 2e9 = 114 us + 35 ms.
    # all-reduce by the ring: 100 + 14 * 2 + 2 * 7/8 * 80e6 / 2e9 = 128 us + 70 ms.
    table = prices("8xcpu", "data=8")
    assert table.collective("all-gather", 80e6, ["data"]) == pytest.approx(35.114e-3)
    assert table.collective("all-reduce", 80e6, ["data"]) == pytest.approx(70.128e-3)
    # A small all-reduce takes the tree: 100 + 2 * 3 * 2 = 112 us + 2 * 8e3 / 2e9 = 8 us.
    assert table.collective("all-reduce", 8e3, ["data"]) == pytest.approx(120e-6)


def test_levels_see_what_the_inner_ones_leave() -> None:
    # 4 hosts x 8 A100: 230 GB/s inside, 0.7 * 25 = 17.5 GB/s across, S = 320 MB.
    # inside  8.4 + 7 * 3.4 us + 7/8 * 320e6 / 230e9 = 32.2 us + 1217.4 us
    # across  8.4 + 3 * 14 us  + 3/4 * 40e6 / 17.5e9 = 50.4 us + 1714.3 us
    table = prices("4x8xa100-40gb", "data=32")
    assert table.collective("all-gather", 320e6, ["data"]) == pytest.approx(3014.3e-6, rel=1e-4)


def test_large_all_reduces_are_added_up_in_the_switch() -> None:
    # 1 GiB: 75 us + 2^30 / (0.85 * 320e9) = 4.02 ms; the ring takes 5.93 ms.
    seconds = prices("8xh100", "data=8").collective("all-reduce", 2**30, ["data"])
    assert seconds == pytest.approx(4.0225e-3, rel=1e-3)


def test_nothing_to_do_costs_nothing() -> None:
    table = prices("8xh100", "data=8,model=1")
    assert table.collective("all-reduce", 0, ["data"]) == 0
    assert table.collective("all-reduce", 1e6, ["model"]) == 0
    assert table.collective("all-reduce", 1e6, []) == 0


def test_an_unknown_kind_lists_the_known() -> None:
    with pytest.raises(ClusterError, match="'broadcast' is not known; expected one of all-reduce"):
        collective_seconds("broadcast", 1.0, ())


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(COLLECTIVE_KINDS),
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
