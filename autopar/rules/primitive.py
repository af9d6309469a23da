"""The record of a primitive: all that planning has to be told of it, and what rows are made with.

Rows stand in the file of their family (`pointwise.py`, `shape.py`, ...); `table.py` has them by
name. What needs JAX stays in `autopar.runtime.local`, and a row says if something must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from autopar.errors import GraphError
from autopar.ir.graph import Op, Plain
from autopar.ir.rule import Dim, Factor, Kind, Rule
from autopar.ir.values import Value


def optional(op: Op, name: str) -> Plain:
    """A parameter, or None where the op has none of that name."""
    return next((value for key, value in op.params if key == name), None)


def items(value: Plain) -> tuple[Plain, ...]:
    """A parameter that is a tuple."""
    if not isinstance(value, tuple):
        raise GraphError(f"parameter {value!r} is not a tuple")
    return value


def ints(value: Plain) -> tuple[int, ...]:
    """A parameter that is a tuple of whole numbers."""
    return tuple(v for v in items(value) if isinstance(v, int))


def pairs(value: Plain) -> tuple[tuple[int, ...], ...]:
    """A parameter that is a tuple of tuples of whole numbers."""
    return tuple(ints(v) for v in items(value))


def fields(value: Plain) -> dict[str, Plain]:
    """A named tuple, such as dimension numbers, by field."""
    found: dict[str, Plain] = {}
    for item in items(value):
        match item:
            case (str() as name, content):
                found[name] = content
            case _:
                raise GraphError(f"parameter {value!r} does not name its fields")
    return found


RuleMaker = Callable[[Op, Sequence[Value]], Rule]

WHOLE: Dim = ()  # a dim that nothing can shard


class Factors:
    """Collects the factors of one op; a maker asks for them dim by dim, then for the rule."""

    def __init__(self) -> None:
        self._found: list[Factor] = []

    def new(self, size: int, kind: Kind = Kind.PASS, combiner: str = "sum") -> Dim:
        """A dim of one new factor."""
        self._found.append(Factor(size, kind, combiner))
        return (len(self._found) - 1,)

    def each(self, shape: Sequence[int], kind: Kind = Kind.PASS) -> list[Dim]:
        """A new factor for each dim of a shape."""
        return [self.new(n, kind) for n in shape]

    def whole(self, size: int) -> Dim:
        """A dim of one new factor that must be whole before the op."""
        return self.new(size, Kind.REPLICATE)

    def rule(
        self,
        operands: Sequence[Sequence[Dim]],
        results: Sequence[Sequence[Dim]],
        linear: Sequence[Sequence[int]] = (),
        *,
        on_demand: bool = False,
    ) -> Rule:
        """The rule over all factors found so far."""
        return Rule(
            tuple(self._found),
            tuple(tuple(dims) for dims in operands),
            tuple(tuple(dims) for dims in results),
            tuple(tuple(group) for group in linear),
            on_demand,
        )


def replicated_rule(op: Op, operands: Sequence[Value]) -> Rule:
    """The rule that keeps every dim of every operand and result whole."""
    found = Factors()
    return found.rule(
        [found.each(v.shape, Kind.REPLICATE) for v in operands],
        [found.each(v.shape, Kind.REPLICATE) for v in op.results],
    )


def unknown_rule(op: Op, operands: Sequence[Value]) -> Rule:
    """The rule of a primitive that we know nothing about: nothing can be sharded."""
    return Rule(
        (),
        tuple((WHOLE,) * len(v.shape) for v in operands),
        tuple((WHOLE,) * len(v.shape) for v in op.results),
        known=False,
    )


TermCount = Callable[[Op, Sequence[Value]], int]


class Work(Enum):
    """Its floating-point operations."""

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
    PRODUCT = "never; a TPU's compiler computes its operands in its kernel, as a reduction's"
    SCATTER = "never: it computes what it puts, and puts it into the buffer of its first operand"


@dataclass(frozen=True)
class Primitive:
    """The facts of one primitive.

    `redo_bytes` is what one item costs to compute again, as the bytes that the chip could load in
    that time; `gpu_bytes` are those that a GPU could load while it computes one. `terms` counts
    those of the sums of one whose work they are: it takes its FLOPs' time, all others that of their
    bytes. One that `moves` gives back the items that it is given, and no others; one that
    `keeps_zero` makes zeros of zeros; one that `adds` puts sums into what its first operand holds;
    one that `draws` makes random items, or the keys of such. Where its items depend on what is
    read, and not on shapes alone, `picks` is the operand whose rows become those of its result; one
    that `regroups` cuts its operands in parts, or joins them, and the first with rows gives them.
    `local` says that its parameters speak of whole shapes, so that a device runs what
    `autopar.runtime.local` makes of it.
    """

    rule: RuleMaker
    work: Work = Work.ITEMS
    fusion: Fusion = Fusion.BY_RULE
    redo_bytes: float = 0.1
    gpu_bytes: float = 0.0
    terms: TermCount | None = None
    moves: bool = False
    keeps_zero: bool = False
    adds: bool = False
    draws: bool = False
    picks: int | None = None
    regroups: bool = False
    local: bool = False

    def flops(self, op: Op, operands: Sequence[Value]) -> int:
        """The floating-point operations of an op that holds no bodies."""
        if self.terms is not None:
            return 2 * self.terms(op, operands)
        if self.work is Work.NONE or not op.results:
            return 0
        if self.work is Work.UPDATES:
            return operands[-1].item_count
        read = operands if self.work is Work.READS else ()
        return max(v.item_count for v in (*read, *op.results))


def alike(names: Iterable[str], facts: Primitive) -> dict[str, Primitive]:
    """A row for each of some names, with the same facts."""
    return dict.fromkeys(names, facts)
