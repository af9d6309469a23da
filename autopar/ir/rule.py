"""The rule of an op: which of its dims may be sharded, written as factors, after Shardy.

A factor is an iteration index of the op. Each dim of each operand and result is a list of
factors, major to minor; one dim may hold several (reshape) and one factor may stand in several
tensors. Sharding an op is giving mesh axes to factors; what that means for each tensor follows.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

Dim = tuple[int, ...]  # factor indices, major to minor; () is a dim nothing can shard
Dims = tuple[Dim, ...]


class Kind(Enum):
    """The price of sharding a factor inside the op."""

    PASS = "pass"  # nothing: the shards are independent
    REDUCE = "reduce"  # the results are partial: they still need combining over the axis
    REPLICATE = "replicate"  # must be whole before the op
    PERMUTE = "permute"  # shards need their neighbors' edges or must move


COMBINERS = ("sum", "max", "min", "and", "or")


@dataclass(frozen=True)
class Factor:
    """An iteration index: its size, its kind and, for REDUCE, how shards combine."""

    size: int
    kind: Kind = Kind.PASS
    combiner: str = "sum"


@dataclass(frozen=True)
class Rule:
    """The factors of an op and where each stands.

    `linear` lists the operand sets that may be partial sums together, the others being whole,
    such that the results are then partial sums: ((0, 1),) for add, ((0,), (1,)) for mul.
    `on_demand` marks ops whose results cost next to nothing to build in any sharding (iota,
    broadcast). `known` is False where the primitive has no rule, so that all is replicated.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear: tuple[tuple[int, ...], ...] = ()
    on_demand: bool = False
    known: bool = True

    @cached_property
    def is_elementwise(self) -> bool:
        """True if each item of the only result comes from one item of each operand."""
        alone = self.known and len(self.results) == 1
        return alone and all(f.kind is Kind.PASS for f in self.factors)

    @cached_property
    def skeleton(self) -> tuple[object, ...]:
        """The ways in which shardings pass through: rules that differ in sizes alone share them."""
        factors = tuple((f.size > 1, f.kind.value, f.combiner) for f in self.factors)
        return self.operands, self.results, factors

    def major(self, dim: Dim) -> int | None:
        """The first factor of a dim that is larger than 1: the one that shards of it cut."""
        return next((f for f in dim if self.factors[f].size > 1), None)

    @cached_property
    def shardable(self) -> tuple[int, ...]:
        """The factors that an axis may be given to with no communication before the op.

        A factor must be the major one (sizes of 1 aside) of every dim it stands in: sharding
        a minor factor alone would leave each device a strided view.
        """
        return tuple(
            f
            for f, factor in enumerate(self.factors)
            if factor.size > 1
            and factor.kind in (Kind.PASS, Kind.REDUCE)
            and all(self._is_major(f, dims) for dims in (*self.operands, *self.results))
        )

    def _is_major(self, f: int, dims: Dims) -> bool:
        for dim in dims:
            if f in dim:
                return all(self.factors[g].size == 1 for g in dim[: dim.index(f)])
        return True

    def __str__(self) -> str:
        names = string.ascii_lowercase + string.ascii_uppercase
        left = ", ".join(_dims_text(d, names) for d in self.operands)
        right = ", ".join(_dims_text(d, names) for d in self.results)
        notes = "".join(
            f"; {names[f % 52]}:{_kind_text(factor)}"
            for f, factor in enumerate(self.factors)
            if factor.kind is not Kind.PASS
        )
        return f"({left}) -> ({right}){notes}" if self.known else "no rule"


def _kind_text(factor: Factor) -> str:
    plain = factor.kind is not Kind.REDUCE or factor.combiner == "sum"
    return factor.kind.value if plain else f"{factor.kind.value}-{factor.combiner}"


def _dims_text(dims: Dims, names: str) -> str:
    texts = ["".join(names[f % 52] for f in dim) for dim in dims]
    return " ".join(t if len(t) == 1 else f"[{t}]" for t in texts) or "-"
