"""Seconds of a local op on a chip: a roofline with a ramp for small work.

`kernel_seconds` is the one price of an op, for the solver's rows, recomputation, profiles and the
listing. They differ in which ops they take to be no kernels of their own: the listing knows its
kernels; the others price an op that is fused into its readers by `fused_seconds`.
"""

from __future__ import annotations

from autopar.cluster import Chip
from autopar.ir.graph import Op
from autopar.rules import HEAVY

# Work whose result is fused into what reads it costs next to nothing, but not nothing.
_FUSED_SHARE = 0.05


def kernel_seconds(chip: Chip, op: Op, nbytes: float, share: float = 1.0) -> float:
    """Seconds of the kernel of an op that moves `nbytes` and does 1 / `share` of the op's work.

    Products and convolutions are bound by arithmetic or by memory, all else by memory.
    """
    if op.kind not in HEAVY:
        return elementwise_seconds(chip, nbytes)
    return compute_seconds(chip, op.flops / share, nbytes, op.results[0].dtype)


def fused_seconds(chip: Chip, nbytes: float) -> float:
    """Seconds that an op which makes `nbytes` adds to the kernels that read it."""
    return _FUSED_SHARE * elementwise_seconds(chip, nbytes)


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
