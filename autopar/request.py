"""What a plan is asked for: the cluster, the mesh, the method, the limits and the pins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from autopar.cluster import Cluster
from autopar.errors import InputError
from autopar.ir.mesh import MeshShape
from autopar.rules import RuleBook

Pins = tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]


@dataclass(frozen=True)
class Request:
    """What to plan for: the cluster, the mesh (None: searched), the method, limits and pins."""

    cluster: Cluster
    mesh: MeshShape | None = None
    method: str = "auto"
    memory_bytes: int | None = None
    pins: Pins = ()
    mesh_axes: int = 2
    rules: RuleBook = field(default_factory=RuleBook)
    remat: bool = True

    @property
    def budget_bytes(self) -> int:
        """Bytes that one device may hold."""
        return self.memory_bytes if self.memory_bytes is not None else self.cluster.memory_bytes


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
