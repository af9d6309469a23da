"""The forward pass of a step as a row of costed pieces: ops, and the trips of scans over layers.

What does not depend on the batch (casts of parameters, masks) is no piece: whoever reads it first
computes it, and nobody sends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.cluster import Chip
from autopar.cost.compute import compute_seconds, elementwise_seconds
from autopar.cost.fusion import is_fused_into_readers
from autopar.ir.control_flow import ControlFlow, PortKind
from autopar.ir.graph import Graph, Op
from autopar.ir.values import Role
from autopar.rules import HEAVY

# Element-wise work whose result is fused into what reads it costs next to nothing, but not nothing.
_FUSED_SHARE = 0.05


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


def op_seconds(graph: Graph, op: Op, chip: Chip) -> float:
    """Seconds of one op of a graph with rules on one device, loops times their trips."""
    if op.control_flow is not None:
        bodies = [sum(op_seconds(g, inner, chip) for inner in g.ops) for g in op.graphs]
        once = max(bodies) if op.control_flow.chooses else sum(bodies)
        return op.control_flow.trips * once
    made = sum(v.nbytes for v in op.results)
    if is_fused_into_readers(op):
        return _FUSED_SHARE * elementwise_seconds(chip, made)
    moved = made + sum(graph.value(o).nbytes for o in op.operands)
    if op.kind in HEAVY:
        return compute_seconds(chip, op.flops, moved, op.results[0].dtype)
    return elementwise_seconds(chip, moved)


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
            names = op.value_operands()
            if self._has_batch and all(n in self._state for n in names):
                self._set_aside(i, op)
            elif op.control_flow is not None and self._runs_over_layers(op, op.control_flow):
                yield from self._trips(i, op, op.control_flow)
            else:
                yield self._piece(i, op)

    def _set_aside(self, i: int, op: Op) -> None:
        behind = frozenset[str]().union(*(self._state[n] for n in op.value_operands()))
        for value in op.results:
            self._state[value.name], self._waiting[value.name] = behind, i

    def _piece(self, i: int, op: Op) -> Piece:
        names = op.value_operands()
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
        length, names = flow.trips, op.value_operands()
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
                wanted += self._graph.ops[i].value_operands()
        return tuple(sorted(found))

    def _seconds(self, *ops: int) -> float:
        return sum(op_seconds(self._graph, self._graph.ops[i], self._chip) for i in ops)


def _is_parameter(role: Role, dtype: str) -> bool:
    return role is Role.STATE and (dtype[0] == "f" or dtype == "bf16")
