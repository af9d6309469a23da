"""What is known of a value within one microbatch: how it relates to that of the whole batch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from autopar.ir.batching import Rows
from autopar.ir.graph import Op
from autopar.ir.values import Literal


class Share(Enum):
    """What a microbatch has of a value."""

    SAME = "same"  # all of it: it is the same in every microbatch
    ROWS = "rows"  # its own rows
    OWN = "own"  # a value of its own that has no rows, such as its number
    PART = "part"  # its part of a sum (or maximum, ...) over the microbatches


@dataclass(frozen=True)
class Fact:
    """What is known of one value.

    `uniform` marks rows that are all alike, however the dim is split; `zero` a value of zeros.
    `multiple_of` names scalars of the whole batch that this value is proportional to, and
    `bound_to` those on which it depends in any other way.
    """

    share: Share = Share.SAME
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
    def is_own(self) -> bool:
        """Whether the value differs between microbatches."""
        return self.share is not Share.SAME


SAME = Fact()
_LINE = re.compile(r"\(([^()]+:\d+)\)")


def literal_fact(literal: Literal) -> Fact:
    """What is known of a constant."""
    return Fact(zero=literal.text in ("0", "0.0", "-0.0", "False"))


def bound(fact: Fact, scalars: frozenset[str]) -> Fact:
    """The fact of a value that depends on these scalars, and not as their multiple."""
    every = fact.scalars | scalars
    return replace(fact, multiple_of=frozenset(), bound_to=every)


class Why(Enum):
    """Why a step cannot be cut: one remedy for each."""

    AXIS = "axis"  # no batch axis, or an ambiguous one
    STRUCTURE = "structure"  # the program depends on how many rows there are
    CONSTANT = "constant"  # a number of rows is used as an index or an option
    COUPLED = "coupled"  # an op mixes rows
    TWICE = "twice"  # a value holds the rows in two dims
    OPAQUE = "opaque"  # code that cannot be seen into
    RANDOM = "random"  # random bits of which no rows can be had alone
    CALLED = "called"  # Python that must be called once a step
    LOOPED = "looped"  # a statistic is used inside the loop's body that makes it
    STATISTIC = "statistic"  # BatchNorm and its like
    METRIC = "metric"  # a statistic of a statistic, of which no gradient is taken
    DEEP = "deep"  # too many statistics, one after the other
    BARRIER = "barrier"  # needs all forwards before all backwards
    NOTHING = "nothing"  # nothing depends on the batch


@dataclass(frozen=True)
class Fault:
    """One thing that forbids cutting the step, as a sentence that names value and line."""

    why: Why
    text: str

    @property
    def lines(self) -> tuple[str, ...]:
        """The user's lines that the sentence names, in order."""
        return tuple(dict.fromkeys(_LINE.findall(self.text)))


def described(op: Op, place: int = 0) -> str:
    """A result of an op with its type and the user's line: "add %3: f32[8,4] (train.py:8)"."""
    value = f" {op.results[place]}" if op.results else ""
    line = f" ({op.origin.line})" if op.origin.line else ""
    return f"{op.kind}{value}{line}"
