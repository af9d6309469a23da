"""The record of a primitive: all that planning has to be told of it, in one row.

Rows stand in the file of their family (`pointwise.py`, `shape.py`, ...); `table.py` has them by
name. What needs JAX stays in `autopar.runtime.local`, and a row says if something must be there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from autopar.rules.factors import RuleMaker


class Work(Enum):
    """Its floating-point operations, which the front end counts."""

    NONE = "none: items are moved or named"
    ITEMS = "one for each item that it makes"
    READS = "one for each item that it reads, or makes where those are more"
    UPDATES = "one for each item of its last operand, which it puts into the first"
    TERMS = "two for each term of the sums that its results are"


class Fusion(Enum):
    """The cases in which compilers compute it inside the kernels of its readers."""

    BY_RULE = "where its rule says that the items of its one result are independent"
    INDEXING = "always, as index arithmetic, though items change their places"
    REDUCTION = "never: it computes what it reads, and its results are written to memory"
    KERNEL = "never: operands are read from memory, and results are written there"


@dataclass(frozen=True)
class Primitive:
    """The facts of one primitive.

    `redo_bytes` is what one item costs to compute again, as the bytes that the chip could load in
    that time. One that is `heavy` takes its FLOPs' time, all others that of their bytes. One that
    `moves` gives back the items that it is given, and no others; one that `keeps_zero` makes zeros
    of zeros. `local` says that its parameters speak of whole shapes, so that a device runs what
    `autopar.runtime.local` makes of it.
    """

    rule: RuleMaker
    work: Work = Work.ITEMS
    fusion: Fusion = Fusion.BY_RULE
    redo_bytes: float = 0.1
    heavy: bool = False
    moves: bool = False
    keeps_zero: bool = False
    local: bool = False


def alike(names: Iterable[str], facts: Primitive) -> dict[str, Primitive]:
    """A row for each of some names, with the same facts."""
    return dict.fromkeys(names, facts)
