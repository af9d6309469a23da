"""What a pass is, what every pass is given, and how a pass is watched."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from autopar.cluster import Cluster
from autopar.ir.mesh import MeshShape

In = TypeVar("In")
Out = TypeVar("Out")

Clock = Callable[[], float]


@dataclass(frozen=True)
class Setting:
    """What a pass may know beside its input: the cluster, the mesh, the limits, the pins.

    `memory_bytes` is the budget of one device. `pins` are (path pattern, dims) pairs, dims
    being tuples of axis names for each tensor dim. The clock is handed in so that no pass
    reads one by itself.
    """

    cluster: Cluster
    mesh: MeshShape
    memory_bytes: int
    pins: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = ()
    clock: Clock = field(default=lambda: 0.0, compare=False)


@dataclass(frozen=True)
class Watcher:
    """Called after every slot with its name, what went in, what came out, and the seconds."""

    after: Callable[[str, object, object, float], None]


@dataclass(frozen=True)
class AbstractPass(abc.ABC, Generic[In, Out]):
    """A decision: one kind of data in, the next kind out, nothing else touched."""

    name: ClassVar[str]

    @abc.abstractmethod
    def run(self, given: In, setting: Setting) -> Out:
        """The output for one input."""
