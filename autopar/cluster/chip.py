"""A device of a cluster: its speeds, its memory and where the figures come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.errors import ClusterError

Platform = Literal["cpu", "gpu", "tpu"]
Confidence = Literal["high", "medium", "low"]

_SHORT_NAMES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "half": "f16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "f32",
    "complex128": "f64",
    "c64": "f32",
    "c128": "f64",
    "float8": "fp8",
    "int4": "int8",
    "uint4": "int8",
    "uint8": "int8",
    "s8": "int8",
    "u8": "int8",
    "s4": "int8",
    "u4": "int8",
}
# What stands in for a type that a chip does not list: the next wider one that can hold it.
_STAND_INS = {"fp8": "bf16", "int8": "bf16", "f16": "bf16", "bf16": "f16"}


@dataclass(frozen=True)
class Source:
    """The source of a figure: where and when it was read, and how far to trust it."""

    what: str
    url: str
    date: str
    confidence: Confidence


@dataclass(frozen=True)
class Chip:
    """A JAX device (on TPU v7x that is half a chip).

    `peak_flops` is dense FLOP/s by dtype at JAX's default matmul precision (so "f32" is TF32 on
    recent GPUs and bf16 passes on TPUs). `memory_bytes` is what a program can use.
    A matmul of F FLOPs reaches `compute_efficiency * F / (F + half_flops)` of the peak; streaming
    reaches `memory_efficiency` of `memory_bytes_per_second`. `launch_seconds` is paid by each op.
    """

    name: str
    platform: Platform
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bytes_per_second: float
    launch_seconds: float
    compute_efficiency: float
    half_flops: float
    memory_efficiency: float
    source: Source

    def __post_init__(self) -> None:
        if self.platform not in ("cpu", "gpu", "tpu"):
            raise ClusterError(
                f"chip {self.name!r} has platform {self.platform!r}; write cpu, gpu or tpu"
            )
        figures = (
            *((f"peak_flops.{dtype}", peak) for dtype, peak in self.peak_flops),
            ("memory_bytes", self.memory_bytes),
            ("memory_bytes_per_second", self.memory_bytes_per_second),
            ("compute_efficiency", self.compute_efficiency),
            ("memory_efficiency", self.memory_efficiency),
        )
        faults = [name for name, figure in figures if not figure > 0]
        if faults or not self.peak_flops:
            raise ClusterError(
                f"chip {self.name!r} needs positive figures for "
                f"{', '.join(faults) or 'peak_flops'}; give each in bytes, seconds or FLOP/s"
            )
        if min(self.half_flops, self.launch_seconds) < 0:
            raise ClusterError(f"chip {self.name!r} needs half_flops and launch_seconds from 0 on")
        for name, share in (
            ("compute_efficiency", self.compute_efficiency),
            ("memory_efficiency", self.memory_efficiency),
        ):
            if share > 1:
                raise ClusterError(f"chip {self.name!r} has {name}={share}; it is a share, <= 1")

    def flops_for(self, dtype: str) -> float:
        """Peak FLOP/s for a dtype ("bf16" or "bfloat16", "fp8" or "float8_e4m3fn", ...).

        A type that is not listed runs at the rate of the next wider listed one; integers wider
        than 8 bits, booleans and unknown types run at the f32 rate.
        """
        peaks = dict(self.peak_flops)
        is_fp8 = dtype.startswith(("float8", "f8"))
        name = "fp8" if is_fp8 else _SHORT_NAMES.get(dtype, dtype)
        seen: set[str] = set()
        while name not in peaks and name in _STAND_INS and name not in seen:
            seen.add(name)
            name = _STAND_INS[name]
        fallback = peaks.get("f32", min(peaks.values()))
        # Half the f32 rate: what a vector unit makes of 64-bit numbers when nobody says otherwise.
        return peaks.get(name, fallback / 2 if name == "f64" else fallback)


@dataclass(frozen=True)
class GpuTarget:
    """The figures that XLA's compiler asks for of a GPU that is not here.

    They are from the public files of openxla/xla, target_config/specs, which also give the rates of
    a GPU's units: these make no difference to XLA's times.
    """

    description: str
    major: int
    cores: int
    memory_bytes: int
    memory_bytes_per_second: int
    l2_bytes: int
    clock_ghz: float
    shared_bytes: int
    fpus: int = 128
    minor: int = 0

    @property
    def shared_bytes_of_a_block(self) -> int:
        """The most shared memory that one block can ask for; recent chips keep 1 KiB back."""
        return self.shared_bytes - (1024 if self.major >= 8 else 0)

    @property
    def extension(self) -> str:
        """The extension of an architecture that code is for alone, as in sm_90a."""
        return "ACCELERATED_FEATURES" if self.major >= 9 else "NONE"
