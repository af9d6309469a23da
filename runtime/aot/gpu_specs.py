"""The description of GPUs that are not here, which XLA's compiler asks for."""

from __future__ import annotations

from autopar.cluster.catalog import ENTRIES, entry_named
from autopar.errors import ClusterError


def gpu_spec(chip: str) -> str:
    """The target config of a chip of the catalog, as a text proto.

    Raises ClusterError where XLA's specs have none of that name.
    """
    entry = entry_named(chip)
    gpu = entry.target if entry is not None else None
    if gpu is None:
        known = ", ".join(e.chip.name for e in ENTRIES if e.target is not None)
        raise ClusterError(f"XLA's GPU compiler has no target called {chip!r}; it has {known}")
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_bytes} threads_per_core_limit: 2048 core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {gpu.memory_bytes_per_second}
  l2_cache_size: {gpu.l2_bytes} clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  shared_memory_per_block_optin: {gpu.shared_bytes_of_a_block}
  cuda_compute_capability {{
    major: {gpu.major} minor: {gpu.minor} feature_extension: {gpu.extension}
  }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.description}"
"""
