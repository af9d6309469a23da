"""The catalog: interconnects that there are, and chips with all that is known of each.

A new chip is an `Entry` here. A new interconnect is a file like `torus.py` and a name in
`TOPOLOGIES` and `FABRICS`. Each figure has its source, its date and how far to trust it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster.chip import Chip, Confidence, GpuTarget, Source
from autopar.cluster.switch import Switch, SwitchFabric
from autopar.cluster.topology import AbstractFabric, AbstractTopology, SwitchLevel
from autopar.cluster.torus import Torus, TorusFabric

TOPOLOGIES: tuple[type[AbstractTopology], ...] = (Switch, Torus)
FABRICS: tuple[type[AbstractFabric], ...] = (TorusFabric, SwitchFabric)


@dataclass(frozen=True)
class Entry:
    """A chip, what joins it, and what others call it.

    `kinds` are parts of JAX's device_kind, in small letters. `usual` are clusters of it that are
    listed and completed: any other of the form does as well. `target` is what XLA's compiler asks
    of a GPU that is not here, `clock_mhz` the rate of a TPU's schedules, as libtpu dumps them, and
    `gke` its name in Google Kubernetes Engine, cloud.google.com/gke-tpu-accelerator.
    """

    chip: Chip
    fabric: AbstractFabric
    usual: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    target: GpuTarget | None = None
    clock_mhz: float | None = None
    gke: str = ""


# -- the figures of chips -------------------------------------------------------------------------

_TERA = 1e12
_GIGA = 1e9
_US = 1e-6
_GIB = 2**30
_DATE = "2026-01"

_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_GOOGLE = "https://cloud.google.com/tpu/docs/"
_BOOK = "https://jax-ml.github.io/scaling-book/tpus/"


def _gpu(
    name: str, teraflops: dict[str, float], gib: float, gigabytes_per_second: float, page: str,
    confidence: Confidence = "medium",
) -> Chip:  # fmt: skip
    """A GPU; `gib` is what the driver reports, of which JAX can be given 92 % in practice.

    Efficiency: XLA's speed-of-light model puts a 1024x4096x4096 bf16 matmul on an H100 at 45.7
    to 50.1 us; 0.78 of the peak, 1 GFLOP of ramp and 1 us of launch make that 46.9 us. It streams
    at 98 % of the bandwidth, which nobody has measured: 92 % is what copies reach on hardware. A
    kernel in a CUDA graph, as XLA makes them, starts about 1 us after the one before.
    """
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
    name: str, teraflops: dict[str, float], gib: float, gigabytes_per_second: float, page: str,
    efficiency: float = 0.93,
) -> Chip:  # fmt: skip
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
        compute_efficiency=efficiency,
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


# -- the figures of links -------------------------------------------------------------------------


def _nvlink(
    gigabytes: float, pair: float, reduction: float = 0.0, start: float = 29, small: float = 12
) -> SwitchLevel:
    """NVLink or NVSwitch inside a host, in GB/s per GPU, of a ring and of one pair.

    A collective takes `start` microseconds to start, one of a small message `small`. Fitted for
    H100 and B200 to XLA's tables of measured collectives over 2, 4 and 8 GPUs (probed with
    benchmarks/collectives.py). As the root of the mean square it is 8 % off for an H100 from 8 MiB
    on, and 26 % below; for a B200 15 % and 20 %. The tables scatter as much: half as many bytes may
    take longer. Pairs exchange 76 (B200: 82) GB/s up to 64 MiB, and four times that above 128 MiB,
    which no formula here follows; two GPUs alone reach 116.
    """
    return SwitchLevel(
        "nvlink",
        8,
        gigabytes * _GIGA,
        2.1 * _US,
        start_seconds=start * _US,
        pair_bytes_per_second=pair * _GIGA,
        shuffle_bytes_per_second=0.86 * gigabytes * _GIGA,
        reduction_efficiency=reduction,
        reduction_start_seconds=70 * _US if reduction else 0.0,
        local_bytes_per_second=2.5 * gigabytes * _GIGA,
        small_start_seconds=small * _US,
        small_rate=0.36,
    )


def _network(gigabytes: float, start: float, step: float) -> SwitchLevel:
    """InfiniBand or Ethernet between hosts: the one-way GB/s that a GPU reaches, microseconds.

    Of H100, H200 and B200 they are XLA's, which takes the first to have half the port of the
    others: with them whole hosts, and GPUs of one number in each host, are within 10 % of its
    all-gathers, reduce-scatters, all-reduces (4 hosts) and permutes. Not followed, because it is
    no physical figure: groups of some GPUs of each host pay a network step for every member
    (8 in 2 hosts: 332 us for 64 KiB); an all-to-all sends the share that stays at home as well;
    two whole hosts of four are half as fast as two of two; and a group of every second host is 5 ms
    whatever its size.
    """
    return SwitchLevel("network", 1, gigabytes * _GIGA, step * _US, start_seconds=start * _US)


def _data_center(gigabits_per_chip: float, devices_per_chip: int = 1) -> SwitchLevel:
    """The data-center network between TPU slices; latencies are a guess (low confidence)."""
    rate = gigabits_per_chip / 8 / devices_per_chip * _GIGA
    return SwitchLevel("data-center network", 1, rate, 30 * _US, start_seconds=50 * _US)


# Measured here on 8 virtual devices of 2 cores, busy: an all-reduce of 4 B 255 us, of 16 MiB 17 ms.
_CPU_INSIDE = SwitchLevel("host", 8, 2 * _GIGA, 2 * _US, start_seconds=100 * _US)
_CPU_NETWORK = SwitchLevel("network", 1, 1 * _GIGA, 50 * _US, start_seconds=100 * _US)

# -- the catalog ----------------------------------------------------------------------------------

ENTRIES: tuple[Entry, ...] = (
    Entry(_CPU, SwitchFabric(1024, 1024, _CPU_INSIDE, _CPU_NETWORK), ("8xcpu",)),
    # No bf16 unit: XLA widens to f32. 25 Gb/s for a whole p3.16xlarge of 8 GPUs: 0.39 GB/s each.
    # 8.4 and 14 us are NCCL's table.
    Entry(
        _gpu("v100-16gb", {"f16": 125, "bf16": 15.7, "f32": 15.7, "f64": 7.8}, 15.77, 900, "v100/"),
        SwitchFabric(8, 8, _nvlink(120, 40), _network(0.35, 8.4, 14)),
        usual=("8xv100-16gb",),
        kinds=("v100",),
        aliases=("v100",),
        target=GpuTarget(
            "Tesla V100-SXM2-16GB", 7, 80, 16_935_682_048, 898_048_000_000, 6_291_456, 1.53, 98304,
            64,
        ),
    ),
    # Ports of 200 Gb/s, nine tenths reached.
    Entry(
        _gpu(
            "a100-40gb", {"bf16": 312, "f16": 312, "f32": 156, "f64": 19.5, "int8": 624}, 39.4,
            1555, "a100/", "high",
        ),
        SwitchFabric(8, 8, _nvlink(230, 58), _network(22.5, 8.4, 14)),
        usual=("8xa100-40gb", "4x8xa100-40gb"),
        kinds=("a100",),
        target=GpuTarget(
            "NVIDIA A100-SXM4-40GB", 8, 108, 42_331_013_120, 1_555_200_000_000, 41_943_040, 1.41,
            167936, 64,
        ),
    ),
    Entry(
        _gpu(
            "a100-80gb", {"bf16": 312, "f16": 312, "f32": 156, "f64": 19.5, "int8": 624}, 79.1,
            2039, "a100/", "high",
        ),
        SwitchFabric(8, 8, _nvlink(230, 58), _network(22.5, 8.4, 14)),
        usual=("8xa100-80gb",),
        kinds=("a100-sxm4-80gb", "a100 80gb"),
        target=GpuTarget(
            "NVIDIA A100-SXM4-80GB", 8, 108, 85_100_068_864, 2_039_040_000_000, 41_943_040, 1.41,
            167936, 64,
        ),
    ),
    Entry(
        _gpu(
            "h100", {"bf16": 989, "f16": 989, "f32": 494, "f64": 67, "fp8": 1979, "int8": 1979},
            79.1, 3350, "h100/", "high",
        ),
        SwitchFabric(8, 8, _nvlink(361, 76, 0.6), _network(22.8, 47, 37)),
        usual=("8xh100", "16x8xh100"),
        kinds=("h100",),
        target=GpuTarget(
            "NVIDIA H100 80GB HBM3", 9, 132, 84_942_979_072, 3_352_320_000_000, 52_428_800, 1.98,
            233472,
        ),
    ),
    Entry(
        _gpu(
            "h200", {"bf16": 989, "f16": 989, "f32": 494, "f64": 67, "fp8": 1979, "int8": 1979},
            139.8, 4800, "h200/",
        ),
        SwitchFabric(8, 8, _nvlink(361, 76, 0.6), _network(43.5, 47, 37)),
        usual=("8xh200",),
        kinds=("h200",),
        target=GpuTarget(
            "NVIDIA H200 141GB HBM3e", 9, 132, 151_397_597_184, 4_800_000_000_000, 52_428_800, 1.98,
            233472,
        ),
    ),
    Entry(
        _gpu(
            "b200", {"bf16": 2250, "f16": 2250, "f32": 1125, "f64": 37, "fp8": 4500, "int8": 4500},
            178.0, 7700, "dgx-b200/",
        ),
        SwitchFabric(8, 8, _nvlink(640, 82, start=40, small=22), _network(46, 42, 22)),
        usual=("8xb200",),
        kinds=("b200",),
        target=GpuTarget(
            "NVIDIA B200", 10, 148, 191_514_411_008, 7_672_320_000_000, 132_644_864, 1.965, 233472
        ),
    ),
    # One NVLink domain is a rack of 72; a host drives 4 of them.
    Entry(
        _gpu(
            "gb200", {"bf16": 2500, "f16": 2500, "f32": 1250, "f64": 40, "fp8": 5000, "int8": 5000},
            184.0, 8000, "gb200-nvl72/",
        ),
        SwitchFabric(72, 4, _nvlink(640, 82, start=40, small=22), _network(46, 42, 22)),
        usual=("72xgb200",),
        kinds=("gb200",),
        target=GpuTarget(
            "NVIDIA GB200", 10, 152, 197_897_748_480, 7_928_064_000_000, 135_528_448, 2.062, 233472
        ),
    ),
    # 46.6 and 93.4 GB/s one way are what libtpu's own estimates imply (v4: scaling book).
    Entry(
        _tpu("v4", _with_f32(bf16=275, int8=275), 30.75, 1200, ""),
        TorusFabric(3, 4096, 2, 4, 45 * _GIGA, 1, False, _data_center(25)),
        usual=("v4:4x4x4",),
        kinds=("tpu v4",),
        clock_mhz=1050,
        gke="tpu-v4-podslice",
    ),
    Entry(
        _tpu("v5e", _with_f32(bf16=197, int8=394), 15.75, 810, "v5e"),
        TorusFabric(2, 256, 1, 16, 46.63 * _GIGA, 1, True, _data_center(25)),
        usual=("v5e:4x4",),
        kinds=("tpu v5 lite", "tpu v5e"),
        aliases=("v5litepod",),
        clock_mhz=1500,
        gke="tpu-v5-lite-podslice",
    ),
    Entry(
        _tpu("v5p", _with_f32(bf16=459, int8=918), 95.73, 2765, "v5p"),
        TorusFabric(3, 8960, 2, 4, 93.4 * _GIGA, 1, False, _data_center(50)),
        usual=("v5p:4x4x8",),
        kinds=("tpu v5p", "tpu v5"),
        clock_mhz=1750,
        gke="tpu-v5p-slice",
    ),
    Entry(
        _tpu("v6e", _with_f32(bf16=918, int8=1836), 31.24, 1638, "v6e"),
        TorusFabric(2, 256, 1, 16, 93.4 * _GIGA, 1, False, _data_center(100)),
        usual=("v6e:16x16",),
        kinds=("tpu v6",),
        clock_mhz=1750,
        gke="tpu-v6e-slice",
    ),
    # One chip is two devices: half of 2307 and 4614 TFLOP/s, of 192 GiB and of 7380 GB/s. On one
    # device libtpu's 4096^3 matmul takes 166 us where 119 us is the peak.
    Entry(
        _tpu("tpu7x", _with_f32(bf16=1153.5, fp8=2307), 94.74, 3690, "tpu7x", 0.75),
        TorusFabric(3, 9216, 2, 4, 93.4 * _GIGA, 2, False, _data_center(100, 2)),
        usual=("tpu7x:4x4x4",),
        kinds=("tpu7x", "tpu v7"),
        clock_mhz=1900,
        gke="tpu7x",
    ),
)  # fmt: skip


def entry_named(name: str) -> Entry | None:
    """The entry of a catalog name or alias, or None."""
    return next((e for e in ENTRIES if name == e.chip.name or name in e.aliases), None)


def chip_named(name: str) -> Chip | None:
    """The chip of a catalog name or alias, or None."""
    entry = entry_named(name)
    return entry.chip if entry is not None else None


def gpu_target(name: str) -> GpuTarget:
    """The target of a GPU; an H100's where the chip has none."""
    named = (entry_named(name), entry_named("h100"))
    return next(e.target for e in named if e is not None and e.target is not None)


def fabric_of(chip: str) -> AbstractFabric:
    """The fabric of a chip of the catalog, by its full name."""
    return next(e.fabric for e in ENTRIES if e.chip.name == chip)


def chip_of_kind(kind: str) -> str | None:
    """The catalog's name for what JAX calls a kind of device, None where it has none."""
    # "gb200" holds "b200": the longest part of the kind is the one that is meant.
    found = [(len(part), e.chip.name) for e in ENTRIES for part in e.kinds if part in kind.lower()]
    return max(found)[1] if found else None


def usual_clusters() -> tuple[str, ...]:
    """The names that are listed and completed."""
    return tuple(name for entry in ENTRIES for name in entry.usual)
