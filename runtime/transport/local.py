"""The transport within one process, whose own all devices are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from autopar.frontend import compat
from autopar.runtime.transport.abstract import AbstractTransport, Copier, Endpoint, Route
from autopar.runtime.transport.bridge import Bridge, bridged


@final
class LocalTransport(AbstractTransport):
    """Lays out where needed, puts, lays out again where needed; everything is compiled before."""

    name = "local"

    def copier(
        self, routes: Sequence[Route], source: Endpoint, target: Endpoint, edge: int
    ) -> Copier:
        """A function of arrays on `source` that gives those on `target`, and does not block."""
        del edge
        return local_copier(routes, source, target)


def local_copier(routes: Sequence[Route], source: Endpoint, target: Endpoint) -> Copier:
    """A copier between submeshes whose devices are all this process's own."""
    return bridged(routes, source, target, lambda bridges: _puts(bridges, routes))


def _puts(bridges: Sequence[Bridge], routes: Sequence[Route]) -> Copier:
    """Between as many devices all arrays in one call; else one by one."""
    if all(b.is_even for b in bridges):
        shardings = [b.arriving for b in bridges]
        if not any(r.before.is_key for r in routes):
            return compat.copier(shardings)
        return lambda arrays: jax.device_put(list(arrays), shardings)
    puts = [_fan(b) for b in bridges]
    return lambda arrays: [put(a) for put, a in zip(puts, arrays, strict=True)]


def _fan(bridge: Bridge) -> Callable[[Any], Any]:
    """Piece by piece: each to its copies on the target, or one of its copies to the target."""
    taken, targets = zip(*bridge.pairs, strict=True)

    def put(array: Any) -> Any:
        piece_of = {s.device: s.data for s in array.addressable_shards}
        pieces = jax.device_put([piece_of[d] for d in taken], list(targets))
        return jax.make_array_from_single_device_arrays(array.shape, bridge.arriving, pieces)

    return put
