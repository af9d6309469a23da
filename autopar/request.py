"""What a plan is asked for: the cluster, the mesh, the method, the limits and the pins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from autopar.cluster import Cluster
from autopar.errors import ArgumentError, InputError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Origin
from autopar.rules import RuleBook
from autopar.schedule.table import SCHEDULES

Pins = tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]


@dataclass(frozen=True)
class Request:
    """What to plan for: the cluster, the mesh (None: searched), the method, limits and pins.

    `stages`, `microbatches` and `schedule` are None where they are searched; `batch_axes` name
    arguments whose rows are not on axis 0.
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


def count_of(given: int | str, what: str) -> int | None:
    """A number that the user fixed, None for "auto"; raises ArgumentError for anything else."""
    if given == "auto":
        return None
    if not isinstance(given, int) or given < 1:
        raise ArgumentError(f"{what} is {given!r}; write 'auto' or a whole number from 1 on")
    return given


def microbatches_of(given: int | str | None, stages: int | None) -> int | None:
    """The same of microbatches, where nothing said means one for one stage and "auto" for more."""
    if given is None:
        return 1 if stages == 1 else None
    return count_of(given, "microbatches")


def schedule_of(given: str) -> str | None:
    """The schedule that the user fixed, None for "auto"; raises ArgumentError for no such name."""
    if given == "auto":
        return None
    if given not in SCHEDULES:
        raise ArgumentError(f"there is no schedule {given!r}; write 'auto', {', '.join(SCHEDULES)}")
    return given


def memory_bytes_of(memory_gb: float | None) -> int | None:
    """Bytes of a device's GiB, None where the cluster's figure counts; raises ArgumentError."""
    if memory_gb is None:
        return None
    if memory_gb <= 0:
        raise ArgumentError(f"memory_gb is {memory_gb}; give the GiB of one device, such as 16")
    return int(memory_gb * 2**30)


def wants_remat(given: object) -> bool:
    """Whether recomputing may be weighed; raises ArgumentError for anything but "auto", False."""
    if given not in ("auto", False):
        raise ArgumentError(f"remat is {given!r}; write 'auto' or False")
    return given == "auto"


def pins_of(given: Mapping[str, object] | None) -> Pins:
    """Pins from {path pattern: PartitionSpec or tuple of axis names}; raises InputError."""
    found: list[tuple[str, tuple[tuple[str, ...], ...]]] = []
    for pattern, spec in (given or {}).items():
        # A PartitionSpec iterates like a tuple but is none.
        if not isinstance(spec, Iterable) or isinstance(spec, str):
            raise InputError(
                f"pin {pattern!r} is {spec!r}; write a PartitionSpec such as P(None, 'model')"
            )
        entries = cast("Iterable[object]", spec)
        found.append((pattern, tuple(_dim_axes(entry) for entry in entries)))
    return tuple(found)


def _dim_axes(entry: object) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, Sequence):
        return tuple(str(a) for a in cast("Sequence[object]", entry))
    raise InputError(f"a pin's dim is {entry!r}; write None, an axis name or a tuple of them")
