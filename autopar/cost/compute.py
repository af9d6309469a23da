"""Seconds of a local op on a chip: a roofline with a ramp for small work."""

from __future__ import annotations

from autopar.cluster import Chip


def compute_seconds(chip: Chip, flops: float, nbytes: float, dtype: str) -> float:
    """Seconds of one op that does `flops` in `dtype` and moves `nbytes` to and from memory.

    max(flops / (peak * eff(flops)), nbytes / bandwidth) + launch, with
    eff(f) = emax * f / (f + half), so that the ramp costs half / (emax * peak) at any size.
    Never falls when flops or bytes grow. 0 for no work at all.
    """
    if flops <= 0 and nbytes <= 0:
        return 0.0
    busy = 0.0
    if flops > 0:
        busy = (flops + chip.half_flops) / (chip.compute_efficiency * chip.flops_for(dtype))
    return max(busy, _streaming(chip, nbytes)) + chip.launch_seconds


def elementwise_seconds(chip: Chip, nbytes: float) -> float:
    """Seconds of one fused element-wise pass that moves `nbytes` to and from memory."""
    return _streaming(chip, nbytes) + chip.launch_seconds if nbytes > 0 else 0.0


def _streaming(chip: Chip, nbytes: float) -> float:
    return max(nbytes, 0.0) / (chip.memory_efficiency * chip.memory_bytes_per_second)
