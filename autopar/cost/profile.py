"""A step's profile by the cost model: its forward pass in layers that follow the user's modules.

The forward pass is a row of costed pieces: ops, and the trips of scans over layers. What does not
depend on the batch (casts of parameters, masks) is no piece: whoever reads it first computes it,
and nobody sends it.

A layer is a run of forward pieces of one module path, cut at some depth, or where there is none of
one line. Within it another begins at each product of weights and data that is the module's own.
Each trip of a scan over layers is a layer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from autopar.cluster import Chip
from autopar.cost.ops import is_fused_into_readers
from autopar.cost.prices import fused_seconds, kernel_seconds
from autopar.errors import InputError
from autopar.ir.control_flow import ControlFlow, PortKind
from autopar.ir.graph import Graph, Op
from autopar.ir.profile import Profile, ProfileLayer
from autopar.ir.values import Role
from autopar.rules import HEAVY

# -- the forward pass in pieces --------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """An op, or a trip of a scan, with the ops that only it needs.

    `ops` are their indices in the graph, its own first. `reads` names values of earlier pieces,
    `makes` are its own with their bytes. `parameters` are state inputs that nobody read before,
    `parameter_bytes` what the piece has of them. `begins` says that a weight meets data here;
    `trip` is -1 outside of scans over layers.
    """

    ops: tuple[int, ...]
    kind: str
    module: str
    line: str
    seconds: float
    reads: tuple[str, ...]
    makes: tuple[tuple[str, int], ...]
    parameters: tuple[str, ...]
    parameter_bytes: int
    begins: bool = False
    trip: int = -1


def whole_seconds(graph: Graph, op: Op, chip: Chip) -> float:
    """Seconds of one op of a graph with rules on one device, loops times their trips."""
    if op.control_flow is not None:
        bodies = [sum(whole_seconds(g, inner, chip) for inner in g.ops) for g in op.graphs]
        once = max(bodies) if op.control_flow.chooses else sum(bodies)
        return op.control_flow.trips * once
    made = sum(v.nbytes for v in op.results)
    if is_fused_into_readers(op):
        return fused_seconds(chip, made)
    return kernel_seconds(chip, op, made + sum(graph.value(o).nbytes for o in op.operands))


def forward_pieces(graph: Graph, chip: Chip) -> tuple[Piece, ...]:
    """The pieces of the forward pass of a graph with rules, in order."""
    return tuple(_Reader(graph, chip).pieces())


class _Reader:
    """Goes through the forward ops once and keeps what later ones may need."""

    def __init__(self, graph: Graph, chip: Chip) -> None:
        self._graph, self._chip = graph, chip
        self._has_batch = any(i.role is Role.BATCH for i in graph.inputs)
        # Of what does not depend on the batch, the floating state behind it.
        self._state: dict[str, frozenset[str]] = {
            i.value.name: frozenset((i.value.name,) if _is_parameter(i.role, i.value.dtype) else ())
            for i in graph.inputs
            if i.role is not Role.BATCH
        }
        self._waiting: dict[str, int] = {}  # value -> the op that makes it, once somebody reads it
        self._owned: set[str] = set()  # state that some piece has read
        self._parts: dict[str, tuple[str, ...]] = {}  # what trips make -> the part of each
        self._made: set[str] = set()

    def pieces(self) -> Iterator[Piece]:
        """The pieces in order."""
        for i, op in enumerate(self._graph.ops):
            if op.origin.region != "forward":
                continue
            names = op.value_operands
            if self._has_batch and all(n in self._state for n in names):
                self._set_aside(i, op)
            elif op.control_flow is not None and self._runs_over_layers(op, op.control_flow):
                yield from self._trips(i, op, op.control_flow)
            else:
                yield self._piece(i, op)

    def _set_aside(self, i: int, op: Op) -> None:
        behind = frozenset[str]().union(*(self._state[n] for n in op.value_operands))
        for value in op.results:
            self._state[value.name], self._waiting[value.name] = behind, i

    def _piece(self, i: int, op: Op) -> Piece:
        names = op.value_operands
        claimed, parameters = self._claimed(names), self._parameters(names)
        makes = tuple((v.name, v.nbytes) for v in op.results)
        self._made.update(name for name, _ in makes)
        return Piece(
            ops=(i, *claimed),
            kind=op.kind,
            module=op.origin.module,
            line=op.origin.line,
            seconds=self._seconds(i, *claimed),
            reads=self._reads(names),
            makes=makes,
            parameters=parameters,
            parameter_bytes=self._nbytes(parameters),
            begins=(op.kind in HEAVY or bool(op.graphs)) and bool(self._behind(names)),
        )

    def _trips(self, i: int, op: Op, flow: ControlFlow) -> Iterator[Piece]:
        """A piece for each trip: it reads the carry of the trip before and its slice of the xs."""
        length, names = flow.trips, op.value_operands
        starts = flow.operands_of(op.operands, PortKind.CARRY)
        others = flow.operands_of(op.operands, PortKind.CONSTANT, PortKind.SLICED)
        inits = [o for o in starts if isinstance(o, str)]
        fixed = [o for o in others if isinstance(o, str)]
        carries = flow.results_of(op.results, PortKind.CARRY)
        stacks = flow.results_of(op.results, PortKind.STACKED)
        claimed, parameters = self._claimed(names), self._parameters(names)
        seconds, before = self._seconds(i), self._reads(inits)
        for k in range(length):
            parts = tuple((f"{v.name}@{k}", v.nbytes // length) for v in stacks)
            carried = tuple((f"{v.name}@{k}", v.nbytes) for v in carries)
            yield Piece(
                ops=(i, *claimed) if k == 0 else (i,),
                kind=op.kind,
                module=op.origin.module,
                line=op.origin.line,
                seconds=seconds / length + (self._seconds(*claimed) if k == 0 else 0.0),
                reads=(*self._reads(fixed), *before),
                makes=(*carried, *parts),
                parameters=parameters if k == 0 else (),
                parameter_bytes=self._nbytes(parameters) // length,
                begins=True,
                trip=k,
            )
            before = tuple(name for name, _ in carried)
        for v in carries:
            self._parts[v.name] = (f"{v.name}@{length - 1}",)
        for v in stacks:
            self._parts[v.name] = tuple(f"{v.name}@{k}" for k in range(length))

    def _runs_over_layers(self, op: Op, flow: ControlFlow) -> bool:
        """True if a scan goes through stacked weights, and not through time."""
        sliced = flow.operands_of(op.operands, PortKind.SLICED)
        rows = (o for o in sliced if isinstance(o, str))
        return flow.trips > 1 and bool(self._behind(rows))

    def _behind(self, names: Iterable[str]) -> frozenset[str]:
        """The floating state that some values are made of alone."""
        return frozenset[str]().union(*(self._state.get(n, frozenset()) for n in names))

    def _parameters(self, names: Iterable[str]) -> tuple[str, ...]:
        """The state behind some values that nobody has read yet; now somebody has."""
        new = self._behind(names) - self._owned
        self._owned |= new
        return tuple(sorted(new))

    def _nbytes(self, names: Iterable[str]) -> int:
        return sum(self._graph.values[n].nbytes for n in names)

    def _reads(self, names: Iterable[str]) -> tuple[str, ...]:
        """The parts of the values among some that pieces make."""
        parts = (p for n in names for p in self._parts.get(n, (n,) if n in self._made else ()))
        return tuple(dict.fromkeys(parts))

    def _claimed(self, names: Iterable[str]) -> tuple[int, ...]:
        """The ops set aside that are behind some values, taken out of the waiting."""
        found: dict[int, None] = {}
        wanted = list(names)
        while wanted:
            i = self._waiting.pop(wanted.pop(), -1)
            if i >= 0:
                found[i] = None
                wanted += self._graph.ops[i].value_operands
        return tuple(sorted(found))

    def _seconds(self, *ops: int) -> float:
        return sum(whole_seconds(self._graph, self._graph.ops[i], self._chip) for i in ops)


def _is_parameter(role: Role, dtype: str) -> bool:
    return role is Role.STATE and (dtype[0] == "f" or dtype == "bf16")


# -- layers ----------------------------------------------------------------------------------------


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
            seconds = whole_seconds(graph, op, chip)
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
        names = op.value_operands
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
