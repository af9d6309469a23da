"""A step cut into microbatches: what runs once, what runs in every microbatch, what is summed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.text import columns
from autopar.ir.values import Role, Value

COMBINERS = ("sum", "max", "min", "and", "or", "xor", "mul", "same")


class When(Enum):
    """The times at which an op of the step runs."""

    FREE = "free"  # once, at any time: nothing of the batch is in it
    LOOP = "loop"  # once for each microbatch
    ONCE = "once"  # once, after the loop whose sums it reads


@dataclass(frozen=True)
class Moment:
    """The moment at which an op runs.

    A loop op runs in each of `loops`, of which all but one have it only to recompute what is
    cheap; a once op runs when loop `loops[0]` has ended; a free op has none.
    """

    when: When
    loops: tuple[int, ...] = ()

    def verify(self, count: int) -> None:
        """Raise GraphError unless its loops are some of so many, and none where it needs none."""
        known = all(0 <= loop < count for loop in self.loops)
        if not known or bool(self.loops) == (self.when is When.FREE):
            raise GraphError(f"no op runs {self}: there are {count} loops")

    def __str__(self) -> str:
        return " ".join([self.when.value, *map(str, self.loops)])


FREE = Moment(When.FREE)


@dataclass(frozen=True)
class Rows:
    """The rows of the batch in a value: dim `dim` is outer x batch x inner."""

    dim: int
    outer: int = 1
    inner: int = 1

    def verify(self, value: Value) -> None:
        """Raise GraphError unless the value has such rows."""
        around = self.outer * self.inner
        has_dim = 0 <= self.dim < len(value.shape)
        if not has_dim or min(self.outer, self.inner) < 1 or value.shape[self.dim] % around:
            raise GraphError(f"{value} has no rows at {self}")

    def __str__(self) -> str:
        around = (
            f" ({self.outer} x rows x {self.inner})" if (self.outer, self.inner) != (1, 1) else ""
        )
        return f"dim {self.dim}{around}"


@dataclass(frozen=True)
class Accumulator:
    """A result of a loop op that is combined over the microbatches: "sum", "max", "min", ..."""

    value: str
    loop: int
    combiner: str = "sum"
    dtype: str = ""  # what it is accumulated in; empty: the value's own


@dataclass(frozen=True)
class Hoist:
    """Values that every microbatch reads but the whole batch decides, such as a mask's count.

    `graph` computes them on the whole batch, once, before the first loop; its outputs are
    `values` of the microbatch's graph, in order, and its inputs bear the step's paths.
    """

    graph: Graph
    values: tuple[str, ...]
    # op i of the graph is equation equations[i] of the step as traced on the whole batch
    equations: tuple[int, ...] = ()

    def verify(self) -> None:
        """Raise GraphError unless it has an equation for each op, and an output for each value."""
        self.graph.verify()
        sizes = (len(self.equations), len(self.values))
        if (
            sizes != (len(self.graph.ops), len(self.graph.outputs))
            or min(self.equations, default=0) < 0
        ):
            raise GraphError(f"a hoist has {sizes[0]} equations and {sizes[1]} values")


@dataclass(frozen=True)
class BatchGraphs:
    """A step traced on the whole batch and on the rows of one microbatch: op for op alike.

    In `part` every constant that stems from the size of the batch is already the whole batch's.
    `index` is the input of `part` that holds the number of the microbatch; empty where none does.
    `sources` tell where values have rows that no operand gives them, bodies included: `part`
    makes them as they are in the whole batch, by its number where the rows are not all alike.
    """

    whole: Graph
    part: Graph
    microbatches: int
    index: str = ""
    sources: tuple[tuple[str, Rows], ...] = ()

    def __str__(self) -> str:
        return f"{self.part}\n# one of {self.microbatches} microbatches"


@dataclass(frozen=True)
class Rescale:
    """A once value that enters a later loop only as a factor of everything it reaches.

    The loop may run with 1 in its place, if the accumulators are multiplied by it afterwards.
    """

    value: str
    accumulators: tuple[str, ...]


@dataclass(frozen=True)
class Batching:
    """The graph of one microbatch, and how its ops and outputs make up the whole step.

    `rows` tell of every top-level value that holds rows of the batch. An output that holds rows
    is the concatenation over microbatches; all others are there once. `barrier` says that a
    later loop reads what an earlier one left for each microbatch, so that only a schedule with
    all forwards before all backwards is exact. `index` is the input that holds the number of
    the microbatch, where an op needs it.
    """

    graph: Graph
    microbatches: int = 1
    batch: int = 0  # rows of the whole batch
    moments: tuple[Moment, ...] = ()
    rows: tuple[tuple[str, Rows], ...] = ()
    accumulators: tuple[Accumulator, ...] = ()
    hoist: Hoist | None = None
    loops: int = 1
    barrier: bool = False
    index: str = ""
    rescales: tuple[Rescale, ...] = ()  # rewritings that would make do with fewer loops
    notes: tuple[str, ...] = ()

    @classmethod
    def whole(cls, graph: Graph) -> Batching:
        """The step as one microbatch, run once."""
        return cls(graph)

    @property
    def is_whole(self) -> bool:
        """True if the step is left as it is."""
        return not self.moments

    @cached_property
    def rows_of(self) -> Mapping[str, Rows]:
        """Value name -> where its rows are."""
        return dict(self.rows)

    @cached_property
    def accumulator_of(self) -> Mapping[str, Accumulator]:
        """Value name -> how it is accumulated."""
        return {a.value: a for a in self.accumulators}

    def verify(self) -> None:
        """Raise GraphError unless the moments and names are of the graph."""
        self.graph.verify()
        if self.is_whole:
            return
        if len(self.moments) != len(self.graph.ops):
            raise GraphError(f"{len(self.moments)} moments for {len(self.graph.ops)} ops")
        hoisted = self.hoist.values if self.hoist is not None else ()
        for name in (*self.rows_of, *self.accumulator_of, *hoisted):
            if name not in self.graph.values:
                raise GraphError(f"the batching names {name}, which {self.graph.name} has not")
        if self.microbatches < 1 or self.batch < 0 or self.batch % self.microbatches:
            raise GraphError(f"{self.batch} rows cannot be cut into {self.microbatches}")
        for moment in self.moments:
            moment.verify(self.loops)
        for a in self.accumulators:
            if not 0 <= a.loop < self.loops or a.combiner not in COMBINERS:
                raise GraphError(f"{a.value} cannot be combined by {a.combiner} in loop {a.loop}")
        for name, rows in self.rows:
            rows.verify(self.graph.values[name])
        if self.index and self.index not in {i.value.name for i in self.graph.inputs}:
            raise GraphError(f"{self.index}, the microbatch's number, is no input")
        if self.hoist is not None:
            self.hoist.verify()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """A step that is left whole prints as its graph."""
        if self.is_whole:
            yield str(self.graph)
            return
        yield (
            f"batch {self.graph.name}: {self.microbatches} microbatches of "
            f"{self.batch // self.microbatches} rows, {self.loops} loop(s)"
            + (", all forwards before all backwards" if self.barrier else "")
        )
        yield from (f"  {note}" for note in self.notes)
        yield from columns(
            [[a.value, a.combiner, f"loop {a.loop}"] for a in self.accumulators], "  "
        )


def moments_of_one(graph: Graph) -> tuple[Moment, ...]:
    """The moments of a step in one microbatch, by region: ops that read the batch are in a loop.

    But for updates, which run once. A forward op that reads a result of a backward op or of an
    update begins another loop:

        forward  backward  | update | forward  backward        (two gradient passes)
        loop 0   loop 0      once     loop 1   loop 1
    """
    moments: list[Moment] = []
    fresh = {i.value.name for i in graph.inputs if i.role is Role.BATCH}
    made: dict[str, tuple[Moment, bool]] = {}  # and whether it is past its loop's forward pass
    for op in graph.ops:
        reads = op.value_operands
        read = [made[n] for n in reads if n in made]
        if not read and fresh.isdisjoint(reads):
            moments.append(FREE)
            continue
        # The latest loop that it reads of. A loop op that reads an update's result there, or as a
        # forward op a backward one's, begins the next.
        loop, region = max((m.loops[0] for m, _ in read), default=0), op.origin.region
        if region == "update":
            moment = Moment(When.ONCE, (loop,))
        else:
            begins = any(
                m.when is When.ONCE or (late and region == "forward")
                for m, late in read
                if m.loops[0] == loop
            )
            moment = Moment(When.LOOP, (loop + begins,))
        moments.append(moment)
        made.update((r.name, (moment, region in ("backward", "update"))) for r in op.results)
    return tuple(moments)
