"""The sharding of every value and op of a step on one mesh, and what the solver said of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from autopar.errors import GraphError
from autopar.ir.codec import ByName
from autopar.ir.control_flow import LOOPS, REMAT
from autopar.ir.graph import REGIONS, Graph, Op
from autopar.ir.sharding import Assignment, MeshShape, Sharding
from autopar.ir.text import show_bytes, show_seconds


class Status(Enum):
    """The way in which a search ended."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"  # an answer with a proven gap
    FIXED = "fixed"  # nothing was left to decide


@dataclass(frozen=True)
class Margin:
    """The cost of a recipe beside the answer: its seconds, or None and why there are none."""

    name: str
    seconds: float | None
    note: str


@dataclass(frozen=True)
class Outcome:
    """Seconds of the answer, a proven lower bound on any answer, and a sentence.

    `recipes` are the textbook strategies that the answer was measured against. The memory price
    is what one more byte a device would save in each step; 0 where memory does not bind.
    """

    status: Status
    seconds: float
    bound_seconds: float
    sentence: str
    recipes: tuple[Margin, ...] = ()
    memory_price_seconds_per_byte: float = 0.0

    @property
    def gap(self) -> float:
        """The distance of the answer from the best, at most, as a share of the answer."""
        if self.seconds <= 0:
            return 0.0
        return max(0.0, (self.seconds - self.bound_seconds) / self.seconds)

    def __str__(self) -> str:
        return (
            f"{self.status.value}: {show_seconds(self.seconds)}, "
            f"bound {show_seconds(self.bound_seconds)}, gap {self.gap:.2%}. {self.sentence}"
        )


@dataclass(frozen=True)
class Recomputation:
    """Names of forward values of the step as it was traced; what that takes and saves a device.

    It may save time, too: then the seconds are less than 0.
    Values of a scan's body are made again in the body of the backward scan.
    """

    values: tuple[str, ...] = ()
    seconds: float = 0.0
    saved_bytes: int = 0

    def __str__(self) -> str:
        if not self.values:
            return "recomputes nothing"
        count = f"{len(self.values)} values" if len(self.values) > 1 else "1 value"
        sign = "-" if self.seconds < 0 else "+"
        return (
            f"recomputes {count}: {sign}{show_seconds(abs(self.seconds))} a step, saves "
            f"{show_bytes(self.saved_bytes)} a device"
        )


OpPath = tuple[int, ...]  # (op index) or, inside bodies, (op, body, op, ...)

_ALIASES = (*sorted(REMAT), "optimization_barrier")  # other names for what goes in


def phase_of(region: str, reuse_gathered: bool) -> str:
    """The phase of a region: forward and backward are one where gathered values are reused."""
    return "forward" if reuse_gathered and region == "backward" else region


@dataclass(frozen=True)
class ShardingPlan:
    """The shardings of a step's values and ops on `mesh`.

    A value without an entry is made on demand where it is read. An op without an assignment
    computes in its result's sharding. `uses` tell where several ops of a region read a value in
    another sharding than its own: it is moved there once. `shared_partials` name the operands
    that are partial sums when an op's result is one. With `reuse_gathered` what was moved for the
    forward pass is held until the backward pass has read it too; without, it is moved again.
    """

    mesh: MeshShape
    values: ByName[Sharding]
    assignments: tuple[tuple[OpPath, Assignment], ...]
    uses: tuple[tuple[str, str, Sharding], ...]
    shared_partials: tuple[tuple[OpPath, tuple[int, ...]], ...]
    outcome: Outcome
    reuse_gathered: bool = False

    def phase_of(self, region: str) -> str:
        """The regions within which a value is moved once, by the name of the first."""
        return phase_of(region, self.reuse_gathered)

    @cached_property
    def sharding_of(self) -> Mapping[str, Sharding]:
        """Value name -> sharding."""
        return dict(self.values)

    @cached_property
    def assignment_of(self) -> Mapping[OpPath, Assignment]:
        """Op path -> assignment."""
        return dict(self.assignments)

    @cached_property
    def use_of(self) -> Mapping[tuple[str, str], Sharding]:
        """(value name, phase) -> the sharding in which the ops of a phase read it."""
        return {(name, region): s for name, region, s in self.uses}

    @cached_property
    def partials_of(self) -> Mapping[OpPath, tuple[int, ...]]:
        """Op path -> operands that are partial sums together."""
        return dict(self.shared_partials)

    def shards_as(self, other: ShardingPlan) -> bool:
        """True if another plan shards everything alike, however it was found."""
        return replace(other, outcome=self.outcome) == self

    def verify(self, graph: Graph) -> None:
        """Raise GraphError unless it is a sharding of this graph, from which it can be lowered.

        Every name, op path, operand, factor and axis is one that there is, every sharding fits its
        value, and every input of the graph and its loops lies somewhere. What the ops' rules allow
        is checked where they carry them; `ListingChecker` tells whether they compute the same.
        """
        self.verify_values(graph)
        values = self.sharding_of
        # The bodies of a remat read what is there already.
        loops = (op for op in graph.walk() if op.kind in LOOPS)
        for body in (graph, *(body for op in loops for body in op.graphs)):
            for given in body.inputs:
                if given.value.name not in values:
                    raise GraphError(f"the sharding says nothing of the input {given}")
        for op in graph.walk():
            named = [r.name in values for r in op.results]
            if op.kind in LOOPS:
                if not all(named):
                    raise GraphError(f"the sharding says nothing of what {op.kind} gives back")
            elif op.kind not in _ALIASES and any(named) and not all(named):
                raise GraphError(f"the sharding says something of only some results of {op.kind}")
        _once([path for path, _ in self.assignments], "the op at")
        _once([path for path, _ in self.shared_partials], "the operands of the op at")
        for path, assignment in self.assignments:
            self._verify_assignment(_op_at(graph, path), assignment)
        for path, operands in self.shared_partials:
            op = _op_at(graph, path)
            if len(set(operands)) != len(operands) or not all(
                0 <= i < len(op.operands) for i in operands
            ):
                raise GraphError(f"{op.kind} has no operands {operands}")

    def verify_values(self, graph: Graph) -> None:
        """Raise GraphError unless every sharding fits its value and is of this graph.

        Other parts of the step may be in the graph as well.
        """
        values = graph.nested_values
        _once([name for name, _ in self.values], "value")
        _once([(name, region) for name, region, _ in self.uses], "the read of")
        known = set[tuple[tuple[int, ...], int]]()  # shapes that lie so: most values look alike
        for name, region, sharding in (*((n, REGIONS[0], s) for n, s in self.values), *self.uses):
            if name not in values:
                raise GraphError(f"the sharding names {name}, which graph {graph.name} has not")
            key = values[name].shape, id(sharding)
            if key not in known:
                known.add(key)
                in_order = tuple(a for a in self.mesh.names if a in sharding.partial)
                if not sharding.fits(values[name].shape, self.mesh) or in_order != sharding.partial:
                    raise GraphError(
                        f"{values[name]} cannot be sharded as {sharding} on ({self.mesh})"
                    )
            if region not in REGIONS:
                raise GraphError(f"{name} is read in {region!r}, which is no region of a step")

    def _verify_assignment(self, op: Op, given: Assignment) -> None:
        factors, rule = given.factors, op.rule
        if op.kind in (*LOOPS, *_ALIASES):
            raise GraphError(f"{op.kind} is cut by its values, not by factors {factors}")
        if len(factors) != len(self.mesh.names) or min(factors, default=0) < -1:
            raise GraphError(f"{op.kind} cannot be cut by factors {factors} on ({self.mesh})")
        if any(r.name not in self.sharding_of for r in op.results):
            raise GraphError(f"the sharding cuts {op.kind} and says nothing of its results")
        if rule is not None and max(factors, default=-1) >= len(rule.factors):
            raise GraphError(f"{op.kind} has {len(rule.factors)} factors, not those of {factors}")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"sharding on ({self.mesh}) {{  # {self.outcome}"
        for name, sharding in self.values:
            if not sharding.is_replicated:
                yield f"  {name}  {sharding}"
        for name, region, sharding in self.uses:
            yield f"  {name} read in {region} as {sharding}"
        yield "}"


def _op_at(graph: Graph, path: OpPath) -> Op:
    """The op at a path, which need not be one."""
    found = graph
    if len(path) % 2 and min(path) >= 0:
        for op, body in zip(path[:-1:2], path[1::2], strict=True):
            if op >= len(found.ops) or body >= len(found.ops[op].graphs):
                break
            found = found.ops[op].graphs[body]
        else:
            if path[-1] < len(found.ops):
                return found.ops[path[-1]]
    raise GraphError(f"graph {graph.name} has no op at {list(path)}")


def _once(keys: Sequence[object], what: str) -> None:
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise GraphError(f"the sharding says twice how {what} {twice} is laid out")
