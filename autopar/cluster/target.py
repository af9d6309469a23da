"""What a compiler has to be told to compile for a cluster that is not here."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster.chip import Platform
from autopar.cluster.cluster import Cluster
from autopar.cluster.topology import Switch
from autopar.errors import ClusterError


@dataclass(frozen=True)
class Target:
    """A chip and the topology text of its compiler; `options` are the topology's own keywords.

    A GPU topology is "partitions x hosts x devices of a host", a TPU's "kind:AxB[xC]".
    """

    platform: Platform
    chip: str
    topology: str
    device_count: int
    slices: int = 1

    @classmethod
    def of(cls, cluster: Cluster) -> Target:
        """The target of a cluster; raises ClusterError where its wiring has no such name."""
        chip, topology = cluster.chip, cluster.topology
        if isinstance(topology, Switch):
            hosts, rest = divmod(topology.device_count, topology.devices_per_host)
            if rest:
                raise ClusterError(
                    f"cluster {cluster.name} has a host that is part full; compiling ahead of "
                    f"time wants a multiple of {topology.devices_per_host} devices"
                )
            text = f"1x{hosts}x{topology.devices_per_host}"
            return cls(chip.platform, chip.name, text, topology.device_count)
        sizes = "x".join(map(str, topology.shape))
        text = f"{chip.name}:{sizes}"
        return cls(chip.platform, chip.name, text, topology.device_count, topology.slices)

    def __str__(self) -> str:
        return self.topology if self.platform == "tpu" else f"{self.chip} {self.topology}"
