"""The pieces of arrays that cross between processes: every process has them from one plan.

Sockets and send pairs match what they carry by position and check no shapes, so both ends must
know the same pieces in the same order. They do: a bridge says which device each piece leaves and
where it arrives, and the pieces of a send are grouped by the two processes, a leg for each pair.

    mesh0, on processes 0 and 1        legs             mesh1, on processes 1 and 2
    [a | b]  [c | d]            0 -> 1: a, b            [a | b]  [c | d]
                                1 -> 2: c, d

Where the transport can, an array that goes from one process to one other as it lies is a single
piece: to take it apart and to put it together takes the hosts longer than to carry it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar.frontend import compat
from autopar.runtime.bind import ArrayType, processes_of, words_of
from autopar.runtime.transport.abstract import Copier, Endpoint, Route
from autopar.runtime.transport.bridge import Bridge, bridged
from autopar.runtime.transport.local import local_copier


@dataclass(frozen=True)
class Piece:
    """A device's piece of the array of a route, on its way to another device; or all of the array.

    `leaving` and `arriving` say how it lies on one device, or on all of them.
    """

    route: int
    leaving: NamedSharding | SingleDeviceSharding
    arriving: NamedSharding | SingleDeviceSharding
    shape: tuple[int, ...]
    dtype: Any

    @property
    def is_whole(self) -> bool:
        """True if it is all of the array."""
        return isinstance(self.leaving, NamedSharding)


@dataclass(frozen=True)
class Leg:
    """The pieces of one send that go from one process to another, in order."""

    number: int
    sender: int
    receiver: int
    pieces: tuple[Piece, ...]


# Takes a leg's pieces where they are this process's, else none, and gives those that arrive.
LegCarrier = Callable[[Sequence[Any]], Sequence[Any]]


def crossed(
    routes: Sequence[Route],
    source: Endpoint,
    target: Endpoint,
    process: int,
    carrier: Callable[[Leg], LegCarrier | None],
    *,
    takes_wholes: bool = False,
) -> Copier:
    """A copier between submeshes of several processes, for one of them.

    `carrier` says how a leg is carried; None where this process has no part in it. One that
    `takes_wholes` is given arrays that cross whole as they are. Where both submeshes are this
    process's own nothing crosses.
    """
    if source.is_whole_on(process) and target.is_whole_on(process):
        return local_copier(routes, source, target)
    words = [Route(_in_words(r.before), _in_words(r.after)) for r in routes]

    def carried(bridges: Sequence[Bridge]) -> Copier:
        return _by_legs(bridges, words, process, carrier, _legs(bridges, words, takes_wholes))

    copy = bridged(words, source, target, carried, process)
    keys = [i for i, r in enumerate(routes) if r.before.is_key]
    if not keys:
        return copy
    impls = {i: compat.key_impl(routes[i].before.dtype) for i in keys}

    def copy_keys(arrays: Sequence[Any]) -> Sequence[Any]:
        given = list(arrays)
        for i in keys:
            given[i] = None if given[i] is None else jax.random.key_data(given[i])
        arrived = list(copy(given))
        for i, impl in impls.items():
            if arrived[i] is not None:
                arrived[i] = jax.random.wrap_key_data(arrived[i], impl=impl)
        return arrived

    return copy_keys


def _in_words(kind: ArrayType) -> ArrayType:
    """The type of the words that keys are, which lie as the keys do."""
    if not kind.is_key:
        return kind
    words = words_of(kind)
    return ArrayType(words.shape, words.dtype, kind.spec)


def _by_legs(
    bridges: Sequence[Bridge],
    routes: Sequence[Route],
    process: int,
    carrier: Callable[[Leg], LegCarrier | None],
    legs: Sequence[Leg],
) -> Copier:
    """Each leg in turn, and what arrives here put together."""
    own: list[tuple[list[tuple[int, int | None]], LegCarrier]] = []
    lands: dict[tuple[int, Any], tuple[int, int]] = {}  # (leg, number in it) of what arrives
    placed = dict[int, tuple[int, int]]()  # the same of arrays that arrive whole
    for leg in legs:
        alone = leg.sender == leg.receiver
        carry = _within(leg, process) if alone else carrier(leg)
        if carry is None:
            continue
        if leg.receiver == process:
            for n, p in enumerate(leg.pieces):
                if p.is_whole:
                    placed[p.route] = (len(own), n)
                else:
                    lands[p.route, _device(p.arriving)] = (len(own), n)
        takes = [
            (p.route, _at(p, bridges[p.route].leaving, process))
            for p in leg.pieces
            if leg.sender == process
        ]
        own.append((takes, carry))
    wholes = [
        (_only, [placed[i]])
        if i in placed
        else (
            compat.assembler(r.before.shape, r.before.dtype, b.arriving),
            [lands[i, device] for device in _local(b.arriving, process)],
        )
        for i, (r, b) in enumerate(zip(routes, bridges, strict=True))
        if lands or placed
    ]

    def copy(arrays: Sequence[Any]) -> Sequence[Any]:
        arrived = [
            carry([_taken(arrays[route], at) for route, at in takes]) for takes, carry in own
        ]
        if not wholes:
            return [None] * len(routes)
        return [make([arrived[leg][n] for leg, n in places]) for make, places in wholes]

    return copy


def _at(piece: Piece, leaving: NamedSharding, process: int) -> int | None:
    """The number of a piece among those of its array in this process; None for all of it."""
    return None if piece.is_whole else _local(leaving, process).index(_device(piece.leaving))


def _taken(array: Any, at: int | None) -> Any:
    return array if at is None else compat.local_pieces(array)[at]


def _only(pieces: Sequence[Any]) -> Any:
    (piece,) = pieces
    return piece


def _device(sharding: Any) -> Any:
    (device,) = sharding.device_set
    return device


def _legs(bridges: Sequence[Bridge], routes: Sequence[Route], takes_wholes: bool) -> list[Leg]:
    """The legs of a send by their processes, each piece once."""
    found: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for i, (bridge, route) in enumerate(zip(bridges, routes, strict=True)):
        kind = route.before
        meshes: Any = bridge.leaving.mesh, bridge.arriving.mesh
        ends = tuple(map(processes_of, meshes))
        is_pair = len(ends[0]) == len(ends[1]) == 1 and ends[0] != ends[1]
        if takes_wholes and bridge.is_even and is_pair:
            (sender,), (receiver,) = ends
            piece = Piece(i, bridge.leaving, bridge.arriving, kind.shape, kind.dtype)
            found[sender, receiver].append(piece)
            continue
        shape = bridge.arriving.shard_shape(kind.shape)
        for devices in bridge.pairs:
            leaving, arriving = map(SingleDeviceSharding, devices)
            piece = Piece(i, leaving, arriving, shape, kind.dtype)
            found[devices[0].process_index, devices[1].process_index].append(piece)
    return [Leg(n, *ends, tuple(found[ends])) for n, ends in enumerate(sorted(found))]


def _within(leg: Leg, process: int) -> LegCarrier | None:
    """Pieces that stay in their process are put as they are in one process."""
    if leg.sender != process:
        return None
    targets = [p.arriving for p in leg.pieces]
    return lambda pieces: jax.device_put(list(pieces), targets)


def _local(sharding: Any, process: int) -> list[Any]:
    """A process's own devices of a mesh, in the order in which arrays have their pieces."""
    return [d for d in sharding.mesh.devices.flat if d.process_index == process]
