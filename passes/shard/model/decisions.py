"""The decisions of a problem: one for each op that communicates and each group of values.

A group is a root value and its followers: element-wise chains, transposes and reshapes whose
sharding is a renaming of the root's. Ops with contractions, gathers, convolutions and the like
decide which mesh axis goes to which of their factors. Broadcasts and iotas decide nothing: they
are made on demand in whatever sharding their consumer wants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.sharding import Sharding
from autopar.ir.values import Value
from autopar.passes.shard.model.merge_isomorphic import Merged

OpPath = tuple[int, ...]  # (op index) or, inside bodies, (op, body, op, ...)


class DecisionKind(Enum):
    """The kind of a decision."""

    INPUT = "input"  # how an argument of the step lies
    GROUP = "group"  # how a value and its followers lie
    PORT = "port"  # how a value lies while it passes a loop's boundary
    USE = "use"  # in which sharding several ops of one region read a value
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

    @property
    def graph(self) -> Graph:
        """The merged graph."""
        return self.merged.graph

    @property
    def values(self) -> Mapping[str, Value]:
        """The values of the graph and of all bodies in it."""
        return self.graph.nested_values
