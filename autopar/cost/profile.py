"""A step's profile by the cost model: its forward pass in layers that follow the user's modules.

A layer is a run of forward pieces of one module path, cut at some depth, or where there is none of
one line. Within it another begins at each product of weights and data that is the module's own.
Each trip of a scan over layers is a layer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from autopar.cluster import Chip
from autopar.cost.forward import Piece, forward_pieces, op_seconds
from autopar.errors import InputError
from autopar.ir.graph import Graph, Op
from autopar.ir.profile import Profile, ProfileLayer
from autopar.rules import HEAVY

_WANTED_LAYERS = 6
_MS = 1e3


def profile_of(graph: Graph, chip: Chip, depth: int | None = None, source: str = "") -> Profile:
    """The profile of a step on one device, update left out; the graph has its rules.

    `depth` is how many parts of a module path tell layers apart; None takes the least that gives
    six layers. Raises InputError where there is no forward pass outside of loops.
    """
    pieces = forward_pieces(graph, chip)
    if not pieces:
        raise InputError(
            f"{graph.name} has no forward pass that could be cut into layers: nothing of it is "
            "computed from the batch outside of a loop that also differentiates it. Profile the "
            "step without its loop over microbatches."
        )
    runs = _runs(pieces, depth or _fitting_depth(pieces))
    crossings = list(_crossings(pieces, runs))
    sent = {name for name, _, _ in crossings}
    edges = sorted({(maker, reader) for _, maker, reader in crossings})
    backward = _backward_seconds(graph, pieces, chip)
    return Profile(
        model=graph.name,
        layers=tuple(_layers(pieces, runs, sent, backward)),
        edges=tuple((runs[maker].name, runs[reader].name) for maker, reader in edges),
        source=source,
    )


@dataclass(frozen=True)
class _Run:
    """Pieces first..last-1 and the name of the layer that they are."""

    name: str
    first: int
    last: int


def _fitting_depth(pieces: Sequence[Piece]) -> int:
    deepest = max(piece.module.count("/") + 1 for piece in pieces)
    depths = range(1, deepest + 1)
    return next((d for d in depths if len(_runs(pieces, d)) >= _WANTED_LAYERS), deepest)


def _runs(pieces: Sequence[Piece], depth: int) -> tuple[_Run, ...]:
    """The layers in order; a name that comes again gets a number."""
    starts = [0, *(i for i in range(1, len(pieces)) if _begins(pieces, i, depth)), len(pieces)]
    count: dict[str, int] = {}
    runs: list[_Run] = []
    for first, last in pairwise(starts):
        name = _name(pieces[first], depth)
        count[name] = count.get(name, 0) + 1
        numbered = name if count[name] == 1 else f"{name} #{count[name]}"
        runs.append(_Run(numbered, first, last))
    return tuple(runs)


def _begins(pieces: Sequence[Piece], i: int, depth: int) -> bool:
    """True if a layer begins at a piece."""
    piece, before = pieces[i], pieces[i - 1]
    label = _label(piece, depth)
    if piece.trip >= 0 or before.trip >= 0 or label != _label(before, depth):
        return True
    return piece.begins and label in (piece.module, piece.line)


def _label(piece: Piece, depth: int) -> str:
    """The module path, or where there is none the user's line."""
    return "/".join(piece.module.split("/")[:depth]) or piece.line


def _name(piece: Piece, depth: int) -> str:
    name = _label(piece, depth) or piece.kind
    return f"{name}[{piece.trip}]" if piece.trip >= 0 else name


def _layers(
    pieces: Sequence[Piece], runs: Sequence[_Run], sent: Set[str], backward: Sequence[float]
) -> Iterator[ProfileLayer]:
    for run in runs:
        own = pieces[run.first : run.last]
        slowest = max(own, key=lambda piece: piece.seconds)
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        yield ProfileLayer(
            name=run.name,
            op=slowest.kind + more,
            forward_ms=_MS * sum(piece.seconds for piece in own),
            backward_ms=_MS * sum(backward[run.first : run.last]),
            activation_bytes=sum(n for piece in own for name, n in piece.makes if name in sent),
            parameter_bytes=sum(piece.parameter_bytes for piece in own),
        )


def _crossings(pieces: Sequence[Piece], runs: Sequence[_Run]) -> Iterator[tuple[str, int, int]]:
    """The values that later layers read, with the layers that make and read them."""
    made_by: dict[str, int] = {}
    for at, run in enumerate(runs):
        for piece in pieces[run.first : run.last]:
            yield from ((name, made_by[name], at) for name in piece.reads if made_by[name] < at)
            made_by.update((name, at) for name, _ in piece.makes)


def _backward_seconds(graph: Graph, pieces: Sequence[Piece], chip: Chip) -> list[float]:
    """Seconds of the backward ops of each piece."""
    homes, found = _Homes(graph, pieces), [0.0] * len(pieces)
    for i, op in enumerate(graph.ops):
        if op.origin.region == "backward":
            seconds = op_seconds(graph, op, chip)
            trips = homes.trips(homes.place(i))
            for at in trips:
                found[at] += seconds / len(trips)
    return found


class _Homes:
    """Finds for each backward op the forward piece that it differentiates.

    That piece has the op's module and line, or at least its module. It comes no later than those
    of the backward ops that are read, and no earlier than what is read of the forward pass, of
    which an op that is no matrix product reads its own piece's.
    """

    def __init__(self, graph: Graph, pieces: Sequence[Piece]) -> None:
        self._graph = graph
        self._last = len(pieces) - 1
        self._length = [1] * len(pieces)  # of a scan, at its first trip
        self._at: dict[str, int] = {}  # value -> the piece that makes it, weight -> that reads it
        self._named: dict[tuple[str, ...], list[int]] = {}
        self._placed: dict[str, int] = {}
        for at, piece in enumerate(pieces):
            if piece.trip > 0:
                self._length[at - piece.trip] += 1
                continue
            self._at.update((name, at) for name in piece.parameters)
            for i in piece.ops:
                self._note(graph.ops[i], at)

    def trips(self, at: int) -> range:
        """The pieces of the op whose first piece is given."""
        return range(at, at + self._length[at])

    def place(self, i: int) -> int:
        """The first piece of the forward op that a backward op belongs to; asked in order."""
        op = self._graph.ops[i]
        names = op.value_operands()
        known = [self._at[n] for n in names if n in self._at]
        earliest = max(known, default=0)
        latest = min((self._placed[n] for n in names if n in self._placed), default=self._last)
        latest = max(earliest, latest)
        named = next((self._named[key] for key in _keys(op) if key in self._named), None)
        if named is None:
            at = earliest if known else latest
        elif known and op.kind not in HEAVY:
            at = named[min(bisect_left(named, earliest), len(named) - 1)]
        else:
            at = named[max(bisect_right(named, latest) - 1, 0)]
        at = min(max(at, earliest), latest)
        self._placed.update((v.name, at) for v in op.results)
        return at

    def _note(self, op: Op, at: int) -> None:
        self._at.update((v.name, at) for v in op.results)
        for key in _keys(op):
            self._named.setdefault(key, []).append(at)


def _keys(op: Op) -> Iterator[tuple[str, ...]]:
    """Keys that an op and its derivative share, the most telling first."""
    module, line = op.origin.module, op.origin.line
    if op.kind in HEAVY:
        yield module, line, op.kind
    if line:
        yield module, line
    if module:
        yield (module,)
