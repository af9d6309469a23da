"""The price list of one mesh on one cluster, in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cluster import Cluster, LinkLevel, axis_links
from autopar.cost.collective import COLLECTIVE_KINDS, SCATTER_TIE, collective_seconds
from autopar.cost.compute import elementwise_seconds, kernel_seconds
from autopar.errors import MeshError
from autopar.ir.graph import Op
from autopar.ir.sharding import MeshShape

# What each platform's compiler runs beside work: XLA makes every collective of a GPU asynchronous,
# on TPUs only these, and none on CPUs.
_BESIDE: Mapping[str, frozenset[str]] = {
    "gpu": frozenset(COLLECTIVE_KINDS),
    "tpu": frozenset({"all-gather", "collective-permute"}),
    "cpu": frozenset(),
}
# The first and the last collectives of a step have no work to run beside, and what runs beside work
# slows it a little.
_EXPOSED_SHARE = 0.25


@dataclass(frozen=True)
class Prices:
    """Prices, in seconds, of communication over each set of axes and of work on each device."""

    cluster: Cluster
    mesh: MeshShape
    # Every subset of the axes is laid out once: planners ask for millions of prices.
    _links: dict[frozenset[str], tuple[LinkLevel, ...]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        links: dict[frozenset[str], tuple[LinkLevel, ...]] = {}
        for mask in range(1 << len(self.mesh.names)):
            axes = tuple(a for i, a in enumerate(self.mesh.names) if mask >> i & 1)
            links[frozenset(axes)] = axis_links(self.cluster, self.mesh, axes)
        object.__setattr__(self, "_links", links)

    def links(self, axes: Sequence[str]) -> tuple[LinkLevel, ...]:
        """The physical levels that a collective over `axes` crosses, innermost first.

        Raises MeshError where an axis is not the mesh's.
        """
        try:
            return self._links[frozenset(axes)]
        except KeyError:
            raise MeshError(
                f"mesh {self.mesh} has no axes {list(axes)}; its axes are {list(self.mesh.names)}"
            ) from None

    def collective(self, kind: str, nbytes: float, axes: Sequence[str]) -> float:
        """Seconds of a collective over `axes` on a whole local buffer of `nbytes`.

        The buffer is the result of an all-gather, and the local operand of an all-reduce,
        reduce-scatter, all-to-all or collective-permute. 0 where the axes hold one device.
        Raises ClusterError on an unknown kind and MeshError on an unknown axis.
        """
        seconds = collective_seconds(kind, nbytes, self.links(axes))
        if kind != "reduce-scatter":
            return seconds
        # It may always be done as an all-reduce that is then sliced; XLA turns that pair back into
        # a reduce-scatter, so of equals the plan takes the reduce-scatter.
        reduced = collective_seconds("all-reduce", nbytes, self.links(axes))
        return min(seconds, SCATTER_TIE * reduced)

    @property
    def beside(self) -> frozenset[str]:
        """The kinds of collectives that run beside work which does not wait for them."""
        return _BESIDE[self.cluster.chip.platform]

    def exposed_share(self, kind: str) -> float:
        """The share of a collective off the critical path that a step is expected to wait for."""
        return _EXPOSED_SHARE if kind in self.beside else 1.0

    def kernel(self, op: Op, nbytes: float, share: float) -> float:
        """Seconds of an op's kernel that moves `nbytes` and does 1 / `share` of its work."""
        return kernel_seconds(self.cluster.chip, op, nbytes, share)

    def elementwise(self, nbytes: float) -> float:
        """Seconds of one fused element-wise pass over `nbytes` of one device's memory."""
        return elementwise_seconds(self.cluster.chip, nbytes)
