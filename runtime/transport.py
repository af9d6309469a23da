"""Takes arrays from one submesh to another without ever waiting for them.

`jax.device_put` is asynchronous only between equal layouts: the same number of devices, and the
same box of the array on each in turn. So a value that is to lie otherwise is laid out anew by a
compiled program on one side, and what travels looks alike on both:

    mesh0 (2 devices)      laid out anew      put            laid out anew     mesh1 (4 devices)
    [rows 0-3 | 4-7]   ->  [cols 0-3 | 4-7]  ---->  [0-3|0-3|4-7|4-7]   ->   [col 0-1|2-3|4-5|6-7]
                           only one of the two sides computes, the one that has less to move
"""

from __future__ import annotations

import abc
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.frontend import compat
from autopar.runtime.bind import ArrayType

# -- the programs in flight on a submesh -------------------------------------------------------


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


def limit_in_flight(limit: int) -> Admit:
    """A function that takes the token of each program, and waits for the `limit`-th before it."""
    if not limit:
        return admit_any
    pending: deque[Any] = deque()

    def admit(token: Any) -> None:
        if len(pending) >= limit:
            wait(pending.popleft())
        pending.append(token)

    return admit


# -- from one submesh to another ---------------------------------------------------------------


Copier = Callable[[Sequence[Any]], Sequence[Any]]
_COPY = "copy"


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


class AbstractTransport(abc.ABC):
    """The means by which arrays travel between submeshes, in one process or between several."""

    @abc.abstractmethod
    def copier(self, routes: Sequence[Route], source: Endpoint, target: Endpoint) -> Copier:
        """A function of arrays on `source` that gives those on `target`, and does not block."""


class LocalTransport(AbstractTransport):
    """Transport within one process, whose own all devices are."""

    def copier(self, routes: Sequence[Route], source: Endpoint, target: Endpoint) -> Copier:
        """Lay out where needed, put, lay out again where needed; everything compiled here."""
        bridges = [_bridge(route, source.mesh, target.mesh) for route in routes]
        before = [w.before.sharding(source.mesh) for w in routes]
        after = [w.after.sharding(target.mesh) for w in routes]
        leave = _relay(before, [b.leaving for b in bridges], routes, source.admit)
        put = _puts(bridges, routes)
        arrive = _relay([b.arriving for b in bridges], after, routes, target.admit)
        steps = [step for step in (leave, put, arrive) if step is not None]
        return steps[0] if len(steps) == 1 else _chain(steps)


@dataclass(frozen=True)
class _Bridge:
    """Two layouts in which target device i holds what some source device holds.

    With equal numbers of devices that is device i; else each piece lies several times on the side
    that has more of them.
    """

    leaving: NamedSharding
    arriving: NamedSharding

    @property
    def is_even(self) -> bool:
        """True if both sides have as many devices."""
        return len(self.leaving.device_set) == len(self.arriving.device_set)


def _bridge(route: Route, source: Mesh, target: Mesh) -> _Bridge:
    before, after = route.before.sharding(source), route.after.sharding(target)
    many, more = source.devices.size, target.devices.size
    if many == more:
        if _boxes(before, route) == _boxes(after, route):
            return _Bridge(before, after)
        if _piece_bytes(after, route) <= _piece_bytes(before, route):
            return _Bridge(_over(target, source, route.after.spec), after)
        return _Bridge(before, _over(source, target, route.before.spec))
    if more % many == 0:
        return _Bridge(before, _copied(source, target, route.before.spec))
    if many % more == 0:
        return _Bridge(_copied(target, source, route.after.spec), after)
    whole = PartitionSpec()
    return _Bridge(NamedSharding(source, whole), NamedSharding(target, whole))


def _boxes(sharding: NamedSharding, route: Route) -> list[Any]:
    """The box of the array on each device in turn."""
    boxes = sharding.devices_indices_map(route.before.shape)
    mesh: Any = sharding.mesh
    return [boxes[d] for d in mesh.devices.flat]


def _piece_bytes(sharding: NamedSharding, route: Route) -> int:
    return math.prod(sharding.shard_shape(route.before.shape))


def _over(shape: Mesh, devices: Mesh, spec: PartitionSpec) -> NamedSharding:
    """The layout of one submesh on another's devices."""
    return NamedSharding(
        _mesh(devices.devices.reshape(shape.devices.shape), shape.axis_names), spec
    )


def _copied(shape: Mesh, devices: Mesh, spec: PartitionSpec) -> NamedSharding:
    """The layout of a smaller submesh on the devices of a larger one, each piece several times."""
    grid = devices.devices.reshape(*shape.devices.shape, -1)
    return NamedSharding(_mesh(grid, (*shape.axis_names, _COPY)), spec)


def _mesh(grid: Any, names: Sequence[str]) -> Mesh:
    return Mesh(grid, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def _relay(
    before: Sequence[NamedSharding],
    after: Sequence[NamedSharding],
    routes: Sequence[Route],
    admit: Admit,
) -> Copier | None:
    """Compiles a program that changes layouts on one submesh; None where all lie right already."""
    off = [
        i
        for i, (b, a, w) in enumerate(zip(before, after, routes, strict=True))
        if not b.is_equivalent_to(a, len(w.before.shape))
    ]
    if not off:
        return None
    kinds = [routes[i].before for i in off]
    types = [
        jax.ShapeDtypeStruct(k.shape, k.dtype, sharding=before[i])
        for i, k in zip(off, kinds, strict=True)
    ]
    program = _layout_program(tuple(types), tuple(after[i] for i in off))

    def relay(arrays: Sequence[Any]) -> Sequence[Any]:
        laid = list(arrays)
        *moved, token = program(*(arrays[i] for i in off))
        admit(token)
        for i, array in zip(off, moved, strict=True):
            laid[i] = array
        return laid

    return relay


@lru_cache(maxsize=1024)
def _layout_program(types: tuple[Any, ...], after: tuple[NamedSharding, ...]) -> Any:
    """Arrays as they are, to lie otherwise, and a token; sends that are alike share one."""

    def relaid(*given: Any) -> tuple[Any, ...]:
        return *given, jnp.zeros((), bool)

    token = NamedSharding(after[0].mesh, PartitionSpec())
    return jax.jit(relaid, out_shardings=(*after, token)).lower(*types).compile()


def _puts(bridges: Sequence[_Bridge], routes: Sequence[Route]) -> Copier:
    """Between as many devices all arrays in one call; else one by one."""
    if all(b.is_even for b in bridges):
        shardings = [b.arriving for b in bridges]
        if not any(_is_key(w) for w in routes):
            return compat.copier(shardings)
        return lambda arrays: jax.device_put(list(arrays), shardings)
    puts = [_fan(b) for b in bridges]
    return lambda arrays: [put(a) for put, a in zip(puts, arrays, strict=True)]


def _is_key(route: Route) -> bool:
    return bool(jax.dtypes.issubdtype(route.before.dtype, jax.dtypes.extended))


def _fan(bridge: _Bridge) -> Callable[[Any], Any]:
    """Piece by piece: each to its copies on the target, or one of its copies to the target."""
    leaving: Any = bridge.leaving.mesh
    arriving: Any = bridge.arriving.mesh
    sources, targets = list(leaving.devices.flat), list(arriving.devices.flat)
    taken = [sources[i * len(sources) // len(targets)] for i in range(len(targets))]

    def put(array: Any) -> Any:
        piece_of = {s.device: s.data for s in array.addressable_shards}
        pieces = jax.device_put([piece_of[d] for d in taken], targets)
        return jax.make_array_from_single_device_arrays(array.shape, bridge.arriving, pieces)

    return put


def _chain(steps: Sequence[Copier]) -> Copier:
    def carry(arrays: Sequence[Any]) -> Sequence[Any]:
        for step in steps:
            arrays = step(arrays)
        return arrays

    return carry
