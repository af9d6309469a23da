"""A transport: routes from one submesh to another, and what carries arrays along them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.sharding import Mesh

from autopar.runtime.bind import ArrayType, processes_of
from autopar.runtime.transport.in_flight import Admit, admit_any

# Takes arrays on one submesh and gives them on another: of a submesh that has none of this
# process's devices they are None.
Copier = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Route:
    """The route of an array: its type on the mesh that it leaves, and on the next."""

    before: ArrayType
    after: ArrayType


@dataclass(frozen=True)
class Endpoint:
    """A submesh at one end of a way; `admit` takes the token of each program that runs there."""

    mesh: Mesh
    admit: Admit = admit_any

    def is_on(self, process: int) -> bool:
        """True if some of its devices are this process's."""
        return process in processes_of(self.mesh)

    def is_whole_on(self, process: int) -> bool:
        """True if all of its devices are this process's."""
        return processes_of(self.mesh) == frozenset({process})


class AbstractTransport(abc.ABC):
    """The means by which arrays travel between submeshes, in one process or between several.

    `name` is what users call it. One that `asks_all` wants every process of the job to call its
    copiers, also those that have neither end.
    """

    name: ClassVar[str]
    asks_all: ClassVar[bool] = False

    @abc.abstractmethod
    def copier(
        self, routes: Sequence[Route], source: Endpoint, target: Endpoint, edge: int
    ) -> Copier:
        """A function of arrays on `source` that gives those on `target`, and does not block.

        The `edge` is a number that all processes have for this way and for no other.
        """
