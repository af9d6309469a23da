"""Control flow as index maps: how values enter, go round and leave the bodies of an op.

Four ops hold bodies, and only this file knows how their parameters lay out what they are given:

    scan   c.. k.. x..  -> k.. y..   a body (c.. k.. row of x..) -> (k.. row of y..), for each row
    while  a.. b.. k..  -> k..       a test (a.. k..) -> (go on?), a body (b.. k..) -> (k..)
    cond   i v..        -> r..       branches (v..) -> (r..), of which number i runs
    remat  v..          -> r..       a body (v..) -> (r..), part of the step that is run again

Each letter is a `Port`: a place in the op's boundary that one value goes through, with its number
among the operands and results, and among the inputs and outputs of the bodies. A carry `k` is one
port, as what a trip leaves is what the next is given:

    operand -> input +-> body -> output -+-> result
                     +-----<-------<-----+
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TypeVar

from autopar.errors import GraphError

T = TypeVar("T")
Place = tuple[int, int]  # a body, and the number of one of its inputs or outputs

REMAT = frozenset({"remat2", "checkpoint"})  # of JAX 0.10 and before, and of later ones
LOOPS = frozenset({"scan", "while", "cond"})  # what a listing has as a `Loop`
_SAME_ITEMS = frozenset({"convert_element_type", "transpose", "reshape", "squeeze", "slice"})


class PortKind(Enum):
    """The kind of value that goes through a port, and how often it does."""

    CONSTANT = "constant"  # an operand that bodies read as it is, the same in every trip
    SLICED = "sliced"  # an operand of which each trip reads a row
    CARRY = "carry"  # an operand of the first trip; then what the trip before left; then a result
    STACKED = "stacked"  # a result of which each trip leaves a row
    RESULT = "result"  # a result that a body leaves as it is
    CHOICE = "choice"  # an operand that no body reads: the number of the branch that runs
    TEST = "test"  # an output of while's test that nobody is given: whether to go on


@dataclass(frozen=True)
class Port:
    """A place in the boundary of an op with bodies: its numbers outside and inside.

    `operand` or `result` is None where there is none. Of a while's carry the body comes first.
    """

    kind: PortKind
    operand: int | None = None
    result: int | None = None
    inputs: tuple[Place, ...] = ()
    outputs: tuple[Place, ...] = ()

    @property
    def by_row(self) -> bool:
        """True if a trip has one row, without the first dim, of what stands outside."""
        return self.kind in (PortKind.SLICED, PortKind.STACKED)

    @property
    def is_carry(self) -> bool:
        """True if what a trip leaves is what the next is given."""
        return self.kind is PortKind.CARRY


@dataclass(frozen=True)
class ControlFlow:
    """The ports of an op with bodies: those of its operands in order, then all others.

    `trips` is how often a body runs: known for scan, and taken as once for while. `fences` of a
    remat keep XLA from reading what the first run left.
    """

    kind: str
    bodies: int
    ports: tuple[Port, ...]
    trips: int = 1
    fences: bool = False

    @property
    def is_remat(self) -> bool:
        """True if the body is part of the step around it: its inputs are the operands' names."""
        return self.kind in REMAT

    @property
    def repeats(self) -> bool:
        """True if a body may run more than once."""
        return self.kind in ("scan", "while")

    @property
    def chooses(self) -> bool:
        """True if only one of the bodies runs."""
        return self.kind == "cond"

    @cached_property
    def operands(self) -> tuple[Port, ...]:
        """The port of each operand."""
        return tuple(p for p in self.ports if p.operand is not None)

    @cached_property
    def results(self) -> tuple[Port, ...]:
        """The port of each result."""
        return tuple(p for p in self.ports if p.result is not None)

    @cached_property
    def inputs(self) -> tuple[tuple[Port, ...], ...]:
        """For each body the port of each of its inputs."""
        return self._by_body((place, port) for port in self.ports for place in port.inputs)

    @cached_property
    def outputs(self) -> tuple[tuple[Port, ...], ...]:
        """For each body the port of each of its outputs."""
        return self._by_body((place, port) for port in self.ports for place in port.outputs)

    def operands_of(self, operands: Sequence[T], *kinds: PortKind) -> list[T]:
        """Those of the operands that go through ports of some kinds, in order."""
        return [o for o, p in zip(operands, self.operands, strict=True) if p.kind in kinds]

    def results_of(self, results: Sequence[T], *kinds: PortKind) -> list[T]:
        """Those of the results that go through ports of some kinds, in order."""
        return [r for r, p in zip(results, self.results, strict=True) if p.kind in kinds]

    def _by_body(self, places: Iterator[tuple[Place, Port]]) -> tuple[tuple[Port, ...], ...]:
        found: list[list[tuple[int, Port]]] = [[] for _ in range(self.bodies)]
        for (body, at), port in places:
            found[body].append((at, port))
        return tuple(tuple(p for _, p in sorted(row, key=lambda r: r[0])) for row in found)


def control_flow(
    kind: str, params: Mapping[str, object], operands: int, results: int, bodies: int
) -> ControlFlow | None:
    """The ports of an op or equation with so many operands, results and bodies.

    None where it is none of the four. Raises GraphError where a parameter is no number.
    """

    def count(name: str) -> int:
        if name not in params:
            raise GraphError(f"op {kind} has no parameter {name!r}")
        if not isinstance(found := params[name], int):
            raise GraphError(f"parameter {name!r} of op {kind} is {found!r}, not a number")
        return found

    if kind == "scan":
        ports = _scan(count("num_consts"), count("num_carry"), operands, results)
        return ControlFlow(kind, bodies, tuple(ports), count("length"))
    if kind == "while":
        ports = _while(count("cond_nconsts"), count("body_nconsts"), results)
        return ControlFlow(kind, bodies, tuple(ports))
    if kind == "cond":
        return ControlFlow(kind, bodies, tuple(_cond(operands, results, bodies)))
    if kind in REMAT:
        whole = (*_passed(operands, 0, 1), *_returned(results, 1))
        fences = bool(params.get("prevent_cse", True))
        return ControlFlow(kind, bodies, whole, fences=fences)
    return None


def _scan(consts: int, carries: int, operands: int, results: int) -> Iterator[Port]:
    first = consts + carries
    for i in range(consts):
        yield Port(PortKind.CONSTANT, operand=i, inputs=((0, i),))
    for k in range(carries):
        yield Port(PortKind.CARRY, consts + k, k, ((0, consts + k),), ((0, k),))
    for i in range(first, operands):
        yield Port(PortKind.SLICED, operand=i, inputs=((0, i),))
    for k in range(carries, results):
        yield Port(PortKind.STACKED, result=k, outputs=((0, k),))


def _while(tests: int, consts: int, carries: int) -> Iterator[Port]:
    first = tests + consts
    for i in range(tests):
        yield Port(PortKind.CONSTANT, operand=i, inputs=((0, i),))
    for i in range(consts):
        yield Port(PortKind.CONSTANT, operand=tests + i, inputs=((1, i),))
    for k in range(carries):
        places = ((1, consts + k), (0, tests + k))
        yield Port(PortKind.CARRY, first + k, k, places, ((1, k),))
    yield Port(PortKind.TEST, outputs=((0, 0),))


def _cond(operands: int, results: int, bodies: int) -> Iterator[Port]:
    yield Port(PortKind.CHOICE, operand=0)
    yield from _passed(operands, 1, bodies)
    yield from _returned(results, bodies)


def _passed(operands: int, first: int, bodies: int) -> Iterator[Port]:
    """Operands that every body is given, from the first on."""
    for i in range(first, operands):
        places = tuple((b, i - first) for b in range(bodies))
        yield Port(PortKind.CONSTANT, operand=i, inputs=places)


def _returned(results: int, bodies: int) -> Iterator[Port]:
    for k in range(results):
        places = tuple((b, k) for b in range(bodies))
        yield Port(PortKind.RESULT, result=k, outputs=places)


Ran = tuple[str, Sequence[T], Sequence[T]]  # the kind of an op, what it reads, and its results


def merely_cast(again: Iterable[Ran[T]], arguments: Collection[T]) -> frozenset[T]:
    """The arguments of which ops that are run again only cast or turn over what is theirs alone.

    So it is with weights: all else reads an activation too. To run that early holds little, where
    to gather it may take long.
    """
    alone: dict[T, frozenset[T]] = {a: frozenset((a,)) for a in arguments}
    others: set[T] = set()
    for kind, reads, results in again:
        if all(r in alone for r in reads):
            made = frozenset[T]().union(*(alone[r] for r in reads))
            if not made or kind in _SAME_ITEMS:
                alone.update(dict.fromkeys(results, made))
            else:
                others |= made
    return frozenset(arguments) - others


def with_casts(ops: Iterable[Ran[T]], arguments: Collection[T]) -> frozenset[T]:
    """The arguments, and what ops that only cast or turn over make of them alone."""
    found = set(arguments)
    for kind, reads, results in ops:
        if kind in _SAME_ITEMS and found.issuperset(reads):
            found.update(results)
    return frozenset(found)
