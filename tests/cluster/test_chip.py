"""The rates of one chip by dtype, and the faults its figures can have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster.catalog import ENTRIES, chip_named
from autopar.cluster.chip import Chip
from autopar.errors import ClusterError


def chip(name: str) -> Chip:
    found = chip_named(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("h100", "bf16", 989),
        ("h100", "bfloat16", 989),
        ("h100", "float8_e4m3fn", 1979),
        ("a100-40gb", "fp8", 312),  # no fp8 unit: runs as bf16
        ("v100-16gb", "float16", 125),
        ("v5e", "float32", 197),  # one bf16 pass
        ("v5e", "f16", 197),  # not listed: as bf16
        ("v5e", "float64", 98.5),  # not listed: half of f32
        ("h100", "complex64", 494),
        ("h100", "int32", 494),  # as f32
        ("v5e", "int8", 394),
        ("v5e", "int4", 394),
        ("tpu7x", "bf16", 1153.5),  # 2307 a chip of two devices
    ],
)
def test_flops_for(name: str, dtype: str, teraflops: float) -> None:
    assert chip(name).flops_for(dtype) == pytest.approx(teraflops * 1e12)


def test_every_chip_names_its_source() -> None:
    chips = [entry.chip for entry in ENTRIES]
    assert len({c.name for c in chips}) == len(chips)
    for each in chips:
        assert each.source.what
        assert each.source.date
        assert each.source.confidence in ("high", "medium", "low")
        assert each.source.url or each.source.confidence == "low"


def test_a_chip_refuses_figures_that_are_not_positive() -> None:
    with pytest.raises(ClusterError, match="memory_bytes"):
        replace(chip("h100"), memory_bytes=0)
    with pytest.raises(ClusterError, match=r"compute_efficiency=1\.5"):
        replace(chip("h100"), compute_efficiency=1.5)
