"""A transport: routes from one submesh to another, and what carries arrays along them.

There may be so many programs in flight on a submesh; who wants one more waits for the oldest.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh

from autopar.runtime.bind import ArrayType, processes_of

# More than about forty programs with collectives under way abort the CPU client of JAX 0.10: its
# thread pools fill up with devices that wait for one another.
_CPU_LIMIT = 16

Admit = Callable[[Any], None]


def in_flight_limit(platform: str) -> int:
    """The number of programs that may be under way on a submesh; 0 for any number."""
    return _CPU_LIMIT if platform == "cpu" else 0


def wait(token: Any) -> None:
    """Wait until a program has run, or has failed: its results tell that to whoever reads them."""
    try:
        token.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return


def admit_any(token: Any) -> None:
    """Lets any number of programs be under way."""


def nearest_awaited(limit: int) -> int:
    """The smallest number of programs between one that is issued and one that is waited for."""
    return limit // 2 + 1 if limit else 0


def limit_in_flight(limit: int) -> Admit:
    """A function that takes the token of each program, and waits where `limit` are under way.

    It waits for the older half of them at once, as to fall asleep and wake up takes the host as
    long as to start a program. Of these the newest comes first: the others are done by then.
    """
    if not limit:
        return admit_any
    pending: deque[Any] = deque()
    half = (limit + 1) // 2

    def admit(token: Any) -> None:
        if len(pending) >= limit:
            for older in reversed([pending.popleft() for _ in range(half)]):
                wait(older)
        pending.append(token)

    return admit


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
