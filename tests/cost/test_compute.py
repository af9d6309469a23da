"""Compute prices against libtpu's cycle counts and XLA's GPU model, and laws they must keep."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.cost import compute_seconds, elementwise_seconds

# Matmul m x k x n in bf16 and its estimate in microseconds: cycles / clock.
MATMULS = [
    ("v5e:4x4", (1024, 1024, 1024), 30115 / 1500),
    ("v5e:4x4", (2048, 2048, 2048), 143032 / 1500),
    ("v5e:4x4", (4096, 4096, 4096), 1083068 / 1500),
    ("v5e:4x4", (8192, 8192, 8192), 9557312 / 1500),
    ("v5e:4x4", (256, 8192, 8192), 379312 / 1500),
    ("v5e:4x4", (8, 8192, 8192), 329968 / 1500),
    ("v5p:4x4x4", (4096, 4096, 4096), 545e3 / 1750),
    ("v6e:16x16", (4096, 4096, 4096), 302e3 / 1750),
    ("tpu7x:4x4x4", (4096, 4096, 4096), 316e3 / 1900),
    ("8xh100", (1024, 4096, 4096), (45.7 + 50.1) / 2),
]


@pytest.mark.parametrize(("cluster", "shape", "theirs"), MATMULS)
def test_matmuls_as_the_compilers_estimate_them(
    cluster: str, shape: tuple[int, int, int], theirs: float
) -> None:
    m, k, n = shape
    chip = Cluster.parse(cluster).chip
    ours = 1e6 * compute_seconds(chip, 2 * m * k * n, 2 * (m * k + k * n + m * n), "bf16")
    assert ours == pytest.approx(theirs, rel=0.15)


def test_a_memory_bound_op_in_figures() -> None:
    # 810 MB at 0.8 * 810 GB/s = 1250 us, and 1 us of launch.
    chip = Cluster.parse("v5e:4x4").chip
    assert elementwise_seconds(chip, 810e6) == pytest.approx(1251e-6)
    assert compute_seconds(chip, 1.0, 810e6, "bf16") == pytest.approx(1251e-6)
    assert elementwise_seconds(chip, 0) == compute_seconds(chip, 0, 0, "f32") == 0


amounts = st.floats(0, 1e18)


@settings(max_examples=200)
@given(amounts, amounts, amounts, amounts, st.sampled_from(["8xcpu", "8xh100", "v5e:4x4"]))
def test_more_work_never_takes_less(
    flops: float, nbytes: float, more_flops: float, more_bytes: float, cluster: str
) -> None:
    chip = Cluster.parse(cluster).chip
    before = compute_seconds(chip, flops, nbytes, "bf16")
    assert before <= compute_seconds(chip, flops + more_flops, nbytes, "bf16")
    assert before <= compute_seconds(chip, flops, nbytes + more_bytes, "bf16")
    assert before >= flops / chip.flops_for("bf16")
