"""What a plan is asked for: the cluster, the mesh, the method, the limits and the pins."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cluster import Cluster
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Origin
from autopar.rules import RuleBook

Pins = tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]


@dataclass(frozen=True)
class Request:
    """What to plan for: the cluster, the mesh (None: searched), the method, limits and pins.

    `stages`, `microbatches` and `schedule` are None where they are searched; `batch_axes` name
    arguments whose rows are not on axis 0. `order` has the numbers of the devices in the order of
    a mesh that came with devices of its own.
    """

    cluster: Cluster
    mesh: MeshShape | None = None
    method: str = "auto"
    memory_bytes: int | None = None
    pins: Pins = ()
    mesh_axes: int = 2
    rules: RuleBook = field(default_factory=RuleBook)
    remat: bool = True
    stages: int | None = 1
    microbatches: int | None = 1
    schedule: str | None = None
    batch_axes: tuple[tuple[str, int | None], ...] = ()
    order: tuple[int, ...] | None = None

    def origin(self, step: str, graph_key: str, jax: str) -> Origin:
        """What a plan for this request was made for."""
        return Origin(
            step=step,
            graph_key=graph_key,
            cluster=self.cluster.to_toml(),
            cluster_name=self.cluster.name,
            cluster_fingerprint=self.cluster.fingerprint(),
            jax_minor=jax,
            method=self.method,
            memory_bytes=self.budget_bytes,
            pins=self.pins,
        )

    @property
    def is_one_program(self) -> bool:
        """Whether nothing but one program on one mesh is asked for."""
        return self.stages == 1 and self.microbatches == 1

    @property
    def may_be_one_program(self) -> bool:
        """Whether one program on one mesh would do."""
        return self.stages in (None, 1) and self.microbatches in (None, 1)

    @property
    def budget_bytes(self) -> int:
        """Bytes that one device may hold."""
        return self.memory_bytes if self.memory_bytes is not None else self.cluster.memory_bytes
