"""The decisions of a problem: one for each op that communicates and each group of values.

A group is a root value and its followers: element-wise chains, transposes and reshapes whose
sharding is a renaming of the root's. Ops with contractions, gathers, convolutions and the like
decide which mesh axis goes to which of their factors. Broadcasts and iotas decide nothing: they
are made on demand in whatever sharding their consumer wants.

A choice is a sharding of a group, or mesh axes given to an op's factors. A reader's choice needs
shardings of what it reads, and needs go through ops that are made where they are read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from autopar.cluster.chip import Platform
from autopar.cost.liveness import BlockSpans
from autopar.cost.memory import held_spans
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.rule import Kind, Rule
from autopar.ir.sharding import Assignment, MeshShape, Sharding, operand_of_result
from autopar.ir.sharding_plan import OpPath
from autopar.ir.values import Value
from autopar.passes.shard.model.merge_isomorphic import Merged
from autopar.passes.shard.model.turned import TurnedReads, turned_reads
from autopar.passes.shard.model.whole_listing import whole_listing
from autopar.rules.propagation import BatchTags, tag_batch


def op_choices(rule: Rule, mesh: MeshShape) -> tuple[Assignment, ...]:
    """The ways to give axes to shardable factors that divide evenly."""
    able = rule.shardable if rule.known else ()
    found: list[Assignment] = []
    for factors in itertools.product(*((-1, *able) if n > 1 else (-1,) for n in mesh.sizes)):
        shares: dict[int, int] = {}
        for f, size in zip(factors, mesh.sizes, strict=True):
            if f >= 0:
                shares[f] = shares.get(f, 1) * size
        divides = all(rule.factors[f].size % n == 0 for f, n in shares.items())
        combiners = {
            rule.factors[f].combiner for f in shares if rule.factors[f].kind is Kind.REDUCE
        }
        if divides and len(combiners) <= 1:
            found.append(Assignment(factors))
    return tuple(found)


def group_choices(decision: Decision, mesh: MeshShape) -> tuple[Sharding, ...]:
    """The shardings that divide the group's dims, with partial sums if it may be one."""
    if decision.fixed is not None:
        return tuple(_kept(decision, mesh))
    return tuple(canonical_shardings(decision.sizes, mesh, decision.allows_partial))


def canonical_shardings(sizes: Sequence[int], mesh: MeshShape, partial: bool) -> Iterator[Sharding]:
    """Shardings with the axes of each dim in mesh order; whole first."""
    places = [-1, *(d for d, n in enumerate(sizes) if n > 1)] + ([-2] if partial else [])
    for given in itertools.product(*(places if n > 1 else (-1,) for n in mesh.sizes)):
        dims = tuple(
            tuple(a for a, p in zip(mesh.names, given, strict=True) if p == d)
            for d in range(len(sizes))
        )
        if all(n % mesh.size(axes) == 0 for n, axes in zip(sizes, dims, strict=True)):
            left = tuple(a for a, p in zip(mesh.names, given, strict=True) if p == -2)
            yield Sharding(dims, left)


def _kept(decision: Decision, mesh: MeshShape) -> Iterator[Sharding]:
    """Fixed dims as they were given, in their own order of axes; open dims (None) are free.

    Open dims get the axes that no fixed dim uses. Axes of one device are left out.
    """
    splitting = mesh.splitting
    fixed = [
        None if axes is None else tuple(a for a in axes if a in splitting)
        for axes in decision.fixed or ()
    ]
    taken = {a for axes in fixed for a in axes or ()}
    sizes = [n if axes is None else 1 for n, axes in zip(decision.sizes, fixed, strict=True)]
    for sharding in canonical_shardings(sizes, mesh, False):
        if taken.isdisjoint(sharding.axes()):
            dims = zip(fixed, sharding.dims, strict=True)
            yield Sharding(tuple(free if axes is None else axes for axes, free in dims))


# -- what a reader's choice needs ------------------------------------------------------------------


Choice = Sharding | Assignment


def required(read: Read, choices: Sequence[Choice], mesh: MeshShape) -> tuple[Sharding, ...]:
    """For each choice of the reader, the sharding in which it reads the value."""
    return tuple(_required(read, choice, mesh) for choice in choices)


def _required(read: Read, choice: Choice, mesh: MeshShape) -> Sharding:
    if isinstance(choice, Assignment):
        assert read.op is not None
        assert read.op.rule is not None
        return choice.operand_sharding(read.op.rule, read.operand, mesh)
    if read.kind is ReadKind.EXACT:
        return Place(read.reader, read.dims).sharding(choice)
    assert read.op is not None
    assert read.op.rule is not None
    result = Place(read.reader, read.dims).sharding(choice)
    return operand_of_result(read.op.rule, read.operand, result, read.partial_ok)


class DecisionKind(Enum):
    """The kind of a decision."""

    INPUT = "input"  # how an argument of the step lies
    GROUP = "group"  # how a value and its followers lie
    PORT = "port"  # how a value lies while it passes a loop's boundary
    OP = "op"  # which axis goes to which factor of an op


@dataclass(frozen=True)
class Place:
    """The decision that a value belongs to, and for each of its dims the decision's dim, or -1."""

    decision: int
    dims: tuple[int, ...]

    def sharding(self, chosen: Sharding) -> Sharding:
        """The value's sharding when its decision's is `chosen`."""
        return Sharding(tuple(chosen.dims[d] if d >= 0 else () for d in self.dims), chosen.partial)


@dataclass(frozen=True)
class Rematerializable:
    """A value made where it is read: its op, and the op's operands' standing."""

    op: Op
    path: OpPath
    operands: tuple[Standing, ...]
    operand_values: tuple[Value, ...]
    value: Value
    has_source: bool


Standing = Place | Rematerializable | None  # None is a literal


class Member(NamedTuple):
    """A value of a group, the op that makes it, and how many values of the step it stands for.

    `runs` is how often a step makes each of them.
    """

    value: Value
    place: Place
    path: OpPath
    copies: int
    runs: int = 1


@dataclass
class Decision:
    """A decision while the graph is being read; `sizes` bound how its dims may be divided.

    `runs` are the trips of the loops around it, times its microbatches; `count` says how many
    look-alikes share it.
    """

    kind: DecisionKind
    label: str
    value: Value | None  # the root value; None for ops
    sizes: list[int]
    runs: int
    region: str
    line: str
    depth: int = 0
    op: Op | None = None
    path: OpPath = ()
    may_be_partial: bool = False
    fixed: tuple[tuple[str, ...] | None, ...] | None = None  # a kept constraint; None dim is free
    members: list[Member] = field(default_factory=lambda: list[Member]())
    count: int = 1
    carried: bool = False  # from one trip of a loop to the next
    joined: bool = False  # a sum, in the backward pass, of gradients that different ops give

    @property
    def allows_partial(self) -> bool:
        """True if a choice may leave the group a partial sum."""
        return self.may_be_partial and self.kind in (DecisionKind.GROUP, DecisionKind.PORT)

    def narrow(self, dims: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """A member's dims must divide too."""
        for d, n in zip(dims, shape, strict=True):
            if d >= 0:
                self.sizes[d] = math.gcd(self.sizes[d], n)


class ReadKind(Enum):
    """The relation of an op to its operands."""

    OP = "op"  # by the op's own decision
    GROUP = "group"  # element-wise in the sharding of a group
    EXACT = "exact"  # in the very sharding of a port, an input or a constraint


@dataclass(frozen=True)
class Read:
    """A reader's need of one value: who reads it, as which operand, how often a step."""

    value: Value
    standing: Standing
    reader: int  # decision
    kind: ReadKind
    operand: int  # index in the op's operands; for EXACT unused
    op: Op | None
    dims: tuple[int, ...]  # EXACT: the value's dims in terms of the reader's; GROUP: the result's
    partial_ok: bool
    runs: int
    region: str
    line: str
    count: int = 1  # how many reads of the step it stands for
    enters: bool = False  # a loop: what is moved for it is held while it runs


@dataclass(frozen=True)
class Reading:
    """Everything read out of a graph: decisions, where values stand, who needs what.

    `graph` is the merged graph, and so are names and paths; `ties` are decisions that must be
    taken alike, as one op stands for several that read now from this one and now from that.
    """

    merged: Merged
    decisions: tuple[Decision, ...]
    standings: Mapping[str, Standing]
    reads: tuple[Read, ...]
    followers: Mapping[OpPath, int]  # op -> the group it computes in
    partial_operands: Mapping[OpPath, tuple[int, ...]]  # op -> operands that share a partial sum
    op_decisions: Mapping[OpPath, int]
    # (operand, input decision that it returns to, how many outputs of the step it stands for)
    outputs: tuple[tuple[Operand, int | None, int], ...] = ()
    ties: tuple[tuple[int, int], ...] = ()
    _spans: dict[Platform, BlockSpans] = field(
        default_factory=dict[Platform, BlockSpans], init=False, repr=False, compare=False
    )
    _turned: dict[bool, Mapping[OpPath, TurnedReads]] = field(
        default_factory=dict[bool, Mapping[OpPath, TurnedReads]],
        init=False, repr=False, compare=False,
    )  # fmt: skip

    @property
    def graph(self) -> Graph:
        """The merged graph."""
        return self.merged.graph

    def spans(self, platform: Platform) -> BlockSpans:
        """The lifetimes of the step's values, as it lies whole on one device of a platform."""
        if platform not in self._spans:
            whole = self.merged.whole
            one = MeshShape((), ())
            self._spans[platform] = held_spans(whole, whole_listing(whole), one, platform)
        return self._spans[platform]

    @cached_property
    def batch(self) -> BatchTags:
        """The dims of values that carry the batch."""
        return tag_batch(self.graph)

    def turned(self, on_gpu: bool) -> Mapping[OpPath, TurnedReads]:
        """The ops that may have to be given operands in another order than they lie in."""
        if on_gpu not in self._turned:
            self._turned[on_gpu] = turned_reads(self.graph, on_gpu)
        return self._turned[on_gpu]

    @property
    def values(self) -> Mapping[str, Value]:
        """The values of the graph and of all bodies in it."""
        return self.graph.nested_values
