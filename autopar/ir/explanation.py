"""Why a tensor or an op is sharded as it is: the choice beside the next best, and what binds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.sharding import Sharding
from autopar.ir.text import show_bytes, show_seconds


@dataclass(frozen=True)
class Price:
    """The cost of a plan in a step on one device, by the same models for every plan compared."""

    seconds: float  # of a step, collectives beside work
    solver_seconds: float  # what the solver makes small: all work one after the other
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        exposed, held = show_seconds(self.exposed_seconds), show_bytes(self.peak_bytes)
        step = f"{show_seconds(self.seconds)} a step, {exposed} of it exposed communication"
        return f"{step}; {held} a device"


@dataclass(frozen=True)
class Alternative:
    """Another choice with everything else chosen anew around it; why not, where it cannot be.

    `changes` tell in a sentence each what else would differ: collectives that come or go, other
    tensors that move along. `price` is None where there is no such plan; `refusal` says why.
    """

    choice: str  # as its user writes it: P('data', None)
    sharding: Sharding | None
    price: Price | None
    changes: tuple[str, ...] = ()
    refusal: str = ""


@dataclass(frozen=True)
class Explanation:
    """A value or op of a plan, its choice and price, the next best, and what binds.

    `subject` is a path or an op ("dot_general model.py:12"); `shared_by` are others that take the
    same decision with it (tied state, ops that look alike), by path. `binds` are sentences: pins,
    memory and its price, dims that do not divide, rules that leave no choice.
    """

    subject: str
    shape: tuple[int, ...]
    dtype: str
    submesh: int
    choice: str
    sharding: Sharding
    local_bytes: int
    reads: tuple[str, ...]  # which ops read it and in which sharding, a sentence each
    price: Price
    alternatives: tuple[Alternative, ...]
    shared_by: tuple[str, ...]
    binds: tuple[str, ...]
    others: tuple[str, ...] = ()  # what the question may have meant as well, and is not told of
    is_split: bool = False  # the choice is how an op is cut up: what it reads and what it makes

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.subject} is sharded as {self.choice}: {self.price}"
        yield from (f"  {sentence}" for sentence in self.reads)
        for other in self.alternatives:
            yield f"  {other.choice} instead: {other.price or other.refusal}"
            yield from (f"    {change}" for change in other.changes)
        yield from (f"  limits: {sentence}" for sentence in self.binds)


@dataclass(frozen=True)
class TrafficChange:
    """Collectives of one kind over the same axes, before and after."""

    kind: str
    axes: tuple[str, ...]
    count: tuple[int, int]
    nbytes: tuple[int, int]
    seconds: tuple[float, float]


@dataclass(frozen=True)
class Counterfactual:
    """The price of a plan with pins beside its own, or why there is no such plan."""

    pins: tuple[str, ...]  # as the user wrote them
    price: Price
    pinned: Price | None
    traffic: tuple[TrafficChange, ...]
    moved: tuple[tuple[str, str, str], ...]  # path, choice before, choice after
    refusal: str = ""
    notes: tuple[str, ...] = ()  # what was held as it is: mesh, stages, recomputation

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"as planned: {self.price}"
        yield f"with {', '.join(self.pins)}: {self.pinned or self.refusal}"
        for t in self.traffic:
            more = show_bytes(t.nbytes[1] - t.nbytes[0])
            yield f"  {t.kind} over {'+'.join(t.axes)}: {t.count[1] - t.count[0]:+}, {more}"
        yield from (f"  {path}: {before} -> {after}" for path, before, after in self.moved)
        yield from (f"  {note}" for note in self.notes)
