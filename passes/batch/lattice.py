"""Lattice of the batch analysis: how a value of one microbatch relates to that of the whole batch.

    replicated  <  local  <  sharded  <  partial        (`join` takes the larger)

    x      sharded     its rows of f32[B, d]
    w      replicated  all of it
    i      local       the number of the microbatch
    x.T@x  partial     its part of a sum over all rows

They are the BATCH, FREE and PART values of the proof in `docs/explanation/microbatching.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from autopar.ir.batching import Rows
from autopar.ir.values import Literal


class Share(Enum):
    """The share that a microbatch has of a value."""

    REPLICATED = "replicated"  # all of it: the same in every microbatch
    SHARDED = "sharded"  # its own rows
    LOCAL = "local"  # a value of its own that has no rows, such as its number
    PARTIAL = "partial"  # its part of a sum (or maximum, ...) over the microbatches


@dataclass(frozen=True)
class Fact:
    """Knowledge of one value within a microbatch.

    `uniform` marks rows that are all alike, however the dim is split; `zero` a value of zeros.
    `multiple_of` names scalars of the whole batch that this value is proportional to, and
    `bound_to` those on which it depends in any other way.
    """

    share: Share = Share.REPLICATED
    rows: Rows | None = None
    uniform: bool = False
    zero: bool = False
    combiner: str = ""
    multiple_of: frozenset[str] = frozenset()
    bound_to: frozenset[str] = frozenset()

    @property
    def scalars(self) -> frozenset[str]:
        """The scalars of the whole batch that the value depends on."""
        return self.multiple_of | self.bound_to

    @property
    def differs(self) -> bool:
        """True if the value differs between microbatches."""
        return self.share is not Share.REPLICATED


REPLICATED = Fact()


def literal_fact(literal: Literal) -> Fact:
    """The fact of a constant."""
    return Fact(zero=literal.text in ("0", "0.0", "-0.0", "False"))


def bound(fact: Fact, scalars: frozenset[str]) -> Fact:
    """The fact of a value that depends on these scalars, and not as their multiple."""
    every = fact.scalars | scalars
    return replace(fact, multiple_of=frozenset(), bound_to=every)


def join(one: Fact, other: Fact) -> Fact:
    """The fact of a value that is one of two; partial if either is."""
    # Proportional if both are, a zero being a multiple of anything.
    multiple = frozenset(
        s
        for s in one.multiple_of | other.multiple_of
        if all(f.zero or s in f.multiple_of for f in (one, other))
    )
    rest_of = (one.scalars | other.scalars) - multiple
    zero = one.zero and other.zero
    # The larger share wins; uniform rows take the other's place.
    main, rest = (one, other) if _weight(one) >= _weight(other) else (other, one)
    uniform = main.uniform and (rest.uniform or rest.rows is None)
    rows = main.rows
    if rest.rows is not None and main.uniform:
        rows = rest.rows
    return replace(
        main, rows=rows, uniform=uniform, zero=zero, multiple_of=multiple, bound_to=rest_of
    )


def _weight(fact: Fact) -> int:
    return (Share.REPLICATED, Share.LOCAL, Share.SHARDED, Share.PARTIAL).index(fact.share)
