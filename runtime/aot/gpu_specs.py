"""The description of GPUs that are not here, which XLA's compiler asks for."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import ClusterError


@dataclass(frozen=True)
class _Gpu:
    """Figures of one GPU, from the public files of openxla/xla, target_config/specs.

    Those files also give the rates of its units, which make no difference to XLA's times.
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

    @property
    def shared_bytes_of_a_block(self) -> int:
        """The most shared memory that one block can ask for; recent chips keep 1 KiB back."""
        return self.shared_bytes - (1024 if self.major >= 8 else 0)

    @property
    def extension(self) -> str:
        """The extension of an architecture that code is for alone, as in sm_90a."""
        return "ACCELERATED_FEATURES" if self.major >= 9 else "NONE"


_GPUS = {
    "v100-16gb": _Gpu(
        "Tesla V100-SXM2-16GB", 7, 80, 16_935_682_048, 898_048_000_000, 6_291_456, 1.53, 98304, 64
    ),
    "a100-40gb": _Gpu(
        "NVIDIA A100-SXM4-40GB", 8, 108, 42_331_013_120, 1_555_200_000_000, 41_943_040, 1.41,
        167936, 64,
    ),
    "a100-80gb": _Gpu(
        "NVIDIA A100-SXM4-80GB", 8, 108, 85_100_068_864, 2_039_040_000_000, 41_943_040, 1.41,
        167936, 64,
    ),
    "h100": _Gpu(
        "NVIDIA H100 80GB HBM3", 9, 132, 84_942_979_072, 3_352_320_000_000, 52_428_800, 1.98, 233472
    ),
    "h200": _Gpu(
        "NVIDIA H200 141GB HBM3e", 9, 132, 151_397_597_184, 4_800_000_000_000, 52_428_800, 1.98,
        233472,
    ),
    "b200": _Gpu(
        "NVIDIA B200", 10, 148, 191_514_411_008, 7_672_320_000_000, 132_644_864, 1.965, 233472
    ),
    "gb200": _Gpu(
        "NVIDIA GB200", 10, 152, 197_897_748_480, 7_928_064_000_000, 135_528_448, 2.062, 233472
    ),
}  # fmt: skip


def gpu_spec(chip: str) -> str:
    """The target config of a chip of the catalog, as a text proto.

    Raises ClusterError where XLA's specs have none of that name.
    """
    if chip not in _GPUS:
        raise ClusterError(
            f"XLA's GPU compiler has no target called {chip!r}; it has {', '.join(_GPUS)}"
        )
    gpu = _GPUS[chip]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_bytes} threads_per_core_limit: 2048 core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {gpu.memory_bytes_per_second}
  l2_cache_size: {gpu.l2_bytes} clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  shared_memory_per_block_optin: {gpu.shared_bytes_of_a_block}
  cuda_compute_capability {{ major: {gpu.major} minor: 0 feature_extension: {gpu.extension} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.description}"
"""
