"""The transport by `jax.device_put` across processes, which GPUs and TPUs have wires for.

JAX numbers such puts by a counter of each process, so that all processes must make all of them in
one order: that of the program. Who has neither end puts an array that has no pieces here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.frontend import compat
from autopar.runtime.bind import without_pieces
from autopar.runtime.transport.abstract import AbstractTransport, Copier, Endpoint, Route
from autopar.runtime.transport.crossing import Leg, LegCarrier, Piece, crossed


@final
class PutTransport(AbstractTransport):
    """Transport by `jax.device_put` from the devices of one process to those of another."""

    name = "put"
    asks_all = True

    def __init__(self, process: int) -> None:
        self._process = process

    def copier(
        self, routes: Sequence[Route], source: Endpoint, target: Endpoint, edge: int
    ) -> Copier:
        """A function of arrays on `source` that gives those on `target`, and does not block."""
        del edge  # JAX numbers its puts itself
        return crossed(routes, source, target, self._process, self._carrier)

    def _carrier(self, leg: Leg) -> LegCarrier:
        rounds = _rounds(leg)
        is_sender, is_receiver = (p == self._process for p in (leg.sender, leg.receiver))
        shardings = [r.arriving for r in rounds]
        empty = [] if is_sender else [without_pieces(r.shape, r.dtype, r.leaving) for r in rounds]

        def carry(pieces: Sequence[Any]) -> Sequence[Any]:
            given = [r.array(pieces) for r in rounds] if is_sender else empty
            arrived = jax.device_put(given, shardings)
            if not is_receiver:
                return ()
            got: dict[int, Any] = {}
            for r, array in zip(rounds, arrived, strict=True):
                got.update(zip(r.numbers, compat.local_pieces(array), strict=True))
            return [got[n] for n in range(len(leg.pieces))]

        return carry


@dataclass(frozen=True)
class _Round:
    """Pieces of one route that leave different devices, side by side as one array.

    `numbers` are theirs in the leg; piece i of the array is the i-th of them, on both sides.
    """

    numbers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    leaving: NamedSharding
    arriving: NamedSharding

    @classmethod
    def of(cls, numbers: Sequence[int], pieces: Sequence[Piece]) -> _Round:
        """Scalars are copies of one another; all else is rows of a longer array."""
        one, spec = pieces[0], PartitionSpec(*("d",) * bool(pieces[0].shape))
        shape = (len(pieces) * one.shape[0], *one.shape[1:]) if one.shape else ()
        sources, targets = (
            [d for s in shardings for d in s.device_set]
            for shardings in ([p.leaving for p in pieces], [p.arriving for p in pieces])
        )
        leaving, arriving = (
            NamedSharding(Mesh(np.array(devices, dtype=object), ("d",)), spec)
            for devices in (sources, targets)
        )
        return cls(tuple(numbers), shape, one.dtype, leaving, arriving)

    def array(self, pieces: Sequence[Any]) -> Any:
        """The array that leaves."""
        own = [pieces[n] for n in self.numbers]
        return jax.make_array_from_single_device_arrays(self.shape, self.leaving, own)


def _rounds(leg: Leg) -> list[_Round]:
    """The n-th piece of a route that leaves the same device goes in the n-th round."""
    seen: Counter[tuple[int, Any]] = Counter()
    found: dict[tuple[int, int], list[int]] = {}
    for number, piece in enumerate(leg.pieces):
        again = seen[piece.route, piece.leaving]
        seen[piece.route, piece.leaving] += 1
        found.setdefault((piece.route, again), []).append(number)
    return [_Round.of(own, [leg.pieces[n] for n in own]) for own in found.values()]
