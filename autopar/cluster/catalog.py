"""The chips that have names: each figure with its source, its date and how far to trust it."""

from __future__ import annotations

from autopar.cluster.chip import Chip, Confidence, Source

_TERA = 1e12
_GIGA = 1e9
_GIB = 2**30
_DATE = "2026-01"

_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_GOOGLE = "https://cloud.google.com/tpu/docs/"
_BOOK = "https://jax-ml.github.io/scaling-book/tpus/"


def _gpu(
    name: str, teraflops: dict[str, float], gib: float, gigabytes_per_second: float, page: str
) -> Chip:
    """A GPU; `gib` is what the driver reports, of which JAX can be given 92 % in practice.

    Efficiency: XLA's speed-of-light model puts a 1024x4096x4096 bf16 matmul on an H100 at 45.7
    to 50.1 us; 0.78 of the peak, 1 GFLOP of ramp and 1 us of launch make that 46.9 us. It streams
    at 98 % of the bandwidth, which nobody has measured: 92 % is what copies reach on hardware. A
    kernel in a CUDA graph, as XLA makes them, starts about 1 us after the one before.
    """
    confidence: Confidence = "high" if name in ("a100-40gb", "a100-80gb", "h100") else "medium"
    return Chip(
        name=name,
        platform="gpu",
        peak_flops=tuple((dtype, rate * _TERA) for dtype, rate in teraflops.items()),
        memory_bytes=int(gib * 0.92 * _GIB),
        memory_bytes_per_second=gigabytes_per_second * _GIGA,
        launch_seconds=1e-6,
        compute_efficiency=0.78,
        half_flops=1e9,
        memory_efficiency=0.92,
        source=Source(
            "NVIDIA data sheet (dense rates); f32 is TF32 where the chip has it; "
            "92 % of the memory usable; efficiency after XLA's speed-of-light model for Hopper",
            _NVIDIA + page,
            _DATE,
            confidence,
        ),
    )


def _tpu(
    name: str, teraflops: dict[str, float], gib: float, gigabytes_per_second: float, page: str
) -> Chip:
    """A TPU device; `gib` is what libtpu's own out-of-memory message calls usable.

    Efficiency: fitted to libtpu's estimated_cycles of square bf16 matmuls (v5e 1024 to 8192,
    the others 4096), all within 10 %; half_flops is 5.7 us of work at the v5e's peak and 2.6 to
    5.2 us on the others. A weight-streaming 8x8192x8192 matmul on v5e reaches 0.75 to 0.8.
    """
    bf16 = teraflops["bf16"]
    return Chip(
        name=name,
        platform="tpu",
        peak_flops=tuple((dtype, rate * _TERA) for dtype, rate in teraflops.items()),
        memory_bytes=int(gib * _GIB),
        memory_bytes_per_second=gigabytes_per_second * _GIGA,
        launch_seconds=1e-6,
        # On one v7x device libtpu's 4096^3 matmul takes 166 us where 119 us is the peak.
        compute_efficiency=0.75 if name == "tpu7x" else 0.93,
        half_flops=1.2e9 if bf16 < 400 else 2.4e9,
        memory_efficiency=0.8,
        source=Source(
            "Google Cloud TPU docs and the JAX scaling book; memory and efficiency from libtpu "
            "ahead-of-time compilation; f32 runs as one bf16 pass",
            _GOOGLE + page if page else _BOOK,
            _DATE,
            "high",
        ),
    )


def _with_f32(**teraflops: float) -> dict[str, float]:
    """TPU rates: at JAX's default precision an f32 matmul is one bf16 pass."""
    return {**teraflops, "f32": teraflops["bf16"]}


_CPU = Chip(
    name="cpu",
    platform="cpu",
    peak_flops=(("f32", 50e9), ("f64", 25e9), ("bf16", 25e9)),
    memory_bytes=3 * _GIB,
    memory_bytes_per_second=10e9,
    launch_seconds=5e-6,
    compute_efficiency=0.8,
    half_flops=1e5,
    memory_efficiency=0.8,
    source=Source(
        "a guess at one of eight virtual devices that share a host; narrow floats are widened",
        "",
        _DATE,
        "low",
    ),
)

CHIPS: tuple[Chip, ...] = (
    _CPU,
    # No bf16 unit: XLA widens to f32.
    _gpu("v100-16gb", {"f16": 125, "bf16": 15.7, "f32": 15.7, "f64": 7.8}, 15.77, 900, "v100/"),
    _gpu(
        "a100-40gb",
        {"bf16": 312, "f16": 312, "f32": 156, "f64": 19.5, "int8": 624},
        39.4,
        1555,
        "a100/",
    ),
    _gpu(
        "a100-80gb",
        {"bf16": 312, "f16": 312, "f32": 156, "f64": 19.5, "int8": 624},
        79.1,
        2039,
        "a100/",
    ),
    _gpu(
        "h100",
        {"bf16": 989, "f16": 989, "f32": 494, "f64": 67, "fp8": 1979, "int8": 1979},
        79.1,
        3350,
        "h100/",
    ),
    _gpu(
        "h200",
        {"bf16": 989, "f16": 989, "f32": 494, "f64": 67, "fp8": 1979, "int8": 1979},
        139.8,
        4800,
        "h200/",
    ),
    _gpu(
        "b200",
        {"bf16": 2250, "f16": 2250, "f32": 1125, "f64": 37, "fp8": 4500, "int8": 4500},
        178.0,
        7700,
        "dgx-b200/",
    ),
    _gpu(
        "gb200",
        {"bf16": 2500, "f16": 2500, "f32": 1250, "f64": 40, "fp8": 5000, "int8": 5000},
        184.0,
        8000,
        "gb200-nvl72/",
    ),
    _tpu("v4", _with_f32(bf16=275, int8=275), 30.75, 1200, ""),
    _tpu("v5e", _with_f32(bf16=197, int8=394), 15.75, 810, "v5e"),
    _tpu("v5p", _with_f32(bf16=459, int8=918), 95.73, 2765, "v5p"),
    _tpu("v6e", _with_f32(bf16=918, int8=1836), 31.24, 1638, "v6e"),
    # One chip is two devices: half of 2307 and 4614 TFLOP/s, of 192 GiB and of 7380 GB/s.
    _tpu("tpu7x", _with_f32(bf16=1153.5, fp8=2307), 94.74, 3690, "tpu7x"),
)

ALIASES: tuple[tuple[str, str], ...] = (("v100", "v100-16gb"), ("v5litepod", "v5e"))


def chip_named(name: str) -> Chip | None:
    """The chip of a catalog name or alias, or None."""
    full = dict(ALIASES).get(name, name)
    return next((chip for chip in CHIPS if chip.name == full), None)
