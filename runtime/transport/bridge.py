"""Takes arrays from one submesh to another without ever waiting for them.

`jax.device_put` is asynchronous only between equal layouts: the same number of devices, and the
same box of the array on each in turn. So a value that is to lie otherwise is laid out anew by a
compiled program on one side, and what travels looks alike on both:

    mesh0 (2 devices)      laid out anew      put            laid out anew     mesh1 (4 devices)
    [rows 0-3 | 4-7]   ->  [cols 0-3 | 4-7]  ---->  [0-3|0-3|4-7|4-7]   ->   [col 0-1|2-3|4-5|6-7]
                           only one of the two sides computes, the one that has less to move
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.frontend import compat
from autopar.ir.projection import paired
from autopar.runtime.transport.abstract import Admit, Copier, Endpoint, Route

_COPY = "copy"


def bridged(
    routes: Sequence[Route],
    source: Endpoint,
    target: Endpoint,
    carrier: Callable[[Sequence[Bridge]], Copier],
    process: int | None = None,
) -> Copier:
    """A copier that lays arrays out on the source, has them carried, and again on the target.

    What `carrier` makes of the bridges takes arrays that leave and gives those that arrive. A
    `process` of several lays out only on the submeshes that it has devices of.
    """
    bridges = [_bridge(route, source.mesh, target.mesh) for route in routes]
    before = [r.before.sharding(source.mesh) for r in routes]
    after = [r.after.sharding(target.mesh) for r in routes]
    leaves, arrives = (process is None or end.is_on(process) for end in (source, target))
    steps = [
        _relay(before, [b.leaving for b in bridges], routes, source.admit) if leaves else None,
        carrier(bridges),
        _relay([b.arriving for b in bridges], after, routes, target.admit) if arrives else None,
    ]
    return _chain([step for step in steps if step is not None])


@dataclass(frozen=True)
class Bridge:
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

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """For each target device, in order, the source device whose piece it gets."""
        leaving: Any = self.leaving.mesh
        arriving: Any = self.arriving.mesh
        return paired(list(leaving.devices.flat), list(arriving.devices.flat))


def _bridge(route: Route, source: Mesh, target: Mesh) -> Bridge:
    before, after = route.before.sharding(source), route.after.sharding(target)
    many, more = source.devices.size, target.devices.size
    if many == more:
        if _boxes(before, route) == _boxes(after, route):
            return Bridge(before, after)
        if _piece_bytes(after, route) <= _piece_bytes(before, route):
            return Bridge(_over(target, source, route.after.spec), after)
        return Bridge(before, _over(source, target, route.before.spec))
    if more % many == 0:
        return Bridge(before, _copied(source, target, route.before.spec))
    if many % more == 0:
        return Bridge(_copied(target, source, route.after.spec), after)
    whole = PartitionSpec()
    return Bridge(NamedSharding(source, whole), NamedSharding(target, whole))


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
    return compat.direct(jax.jit(relaid, out_shardings=(*after, token)).lower(*types).compile())


def _chain(steps: Sequence[Copier]) -> Copier:
    if len(steps) == 1:
        return steps[0]

    def carry(arrays: Sequence[Any]) -> Sequence[Any]:
        for step in steps:
            arrays = step(arrays)
        return arrays

    return carry
