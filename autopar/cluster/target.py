"""The target that a compiler is told, to compile for a cluster that is not here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster.chip import Platform
from autopar.cluster.cluster import Cluster
from autopar.cluster.placement import cut_out, submesh_shapes
from autopar.errors import MeshError


@dataclass(frozen=True)
class Target:
    """A chip and the topology text of its compiler: "1 x hosts x devices of a host" of a GPU.

    That of a TPU is "kind:AxB[xC]" of one of `slices` slices; `host_bounds` are the chips of a host
    along x, y, z and `wraps` the rings. `devices_per_chip` and `memory_bytes`, what one device has
    (0: not known), are the cluster's.
    """

    platform: Platform
    chip: str
    topology: str
    device_count: int
    slices: int = 1
    host_bounds: tuple[int, ...] = ()
    wraps: tuple[bool, ...] = ()
    devices_per_chip: int = 1
    memory_bytes: int = 0

    @classmethod
    def of(cls, cluster: Cluster) -> Target:
        """The target of a cluster or of a block that was cut out of one.

        Raises ClusterError where no compiler has a name for its wiring.
        """
        chip = cluster.chip
        told = cluster.topology.compiler_topology(chip.name, cluster.name)
        return cls(
            chip.platform,
            chip.name,
            told.text,
            cluster.device_count,
            told.slices,
            told.host_bounds,
            told.wraps,
            told.devices_per_chip,
            cluster.memory_bytes,
        )

    def __str__(self) -> str:
        if self.platform != "tpu":
            return f"{self.chip} {self.topology}"
        return f"{self.slices}x{self.topology}" if self.slices > 1 else self.topology


def target_within(cluster: Cluster, devices: Sequence[int]) -> tuple[Target, tuple[int, ...]]:
    """The target of the block that some devices of a cluster are, and their numbers in it.

    Raises MeshError where they are no block of it.
    """
    first = min(devices)
    shape = next((s for s in submesh_shapes(cluster) if s.device_count == len(devices)), None)
    if shape is None or sorted(devices) != list(range(first, first + len(devices))):
        raise MeshError(f"devices {list(devices)} of {cluster.name} are no block of neighbours")
    return Target.of(cut_out(cluster, shape)), tuple(d - first for d in devices)
