"""The listing that every device of one mesh runs: local ops and moves between shardings.

The same listing is priced, printed and executed, so the plan's collectives are the program's. Its
traffic is those collectives by kind and axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from autopar.errors import GraphError
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.values import Value


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind over the same axes in a step, together."""

    kind: str
    axes: tuple[str, ...]
    count: int
    nbytes: int
    seconds: float

    def verify(self, meshes: Iterable[MeshShape]) -> None:
        """Raise GraphError unless it is a collective over axes of one of the meshes."""
        known = any(set(self.axes) <= set(mesh.names) for mesh in meshes)
        once = len(set(self.axes)) == len(self.axes)
        if self.kind not in COLLECTIVES or not known or not once:
            raise GraphError(f"there is no {self.kind} over {'+'.join(self.axes)} here")
        if min(self.count, self.nbytes, self.seconds) < 0:
            raise GraphError(f"the figures of {self.kind} cannot be negative")


def traffic_of(
    program: Listing, seconds: Mapping[tuple[str, tuple[str, ...]], float]
) -> tuple[Traffic, ...]:
    """Collectives by kind and axes, in a fixed order; `seconds` are of all runs of each."""
    table: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for _, c in program.collectives():
        count, nbytes = table.get((c.kind, c.axes), (0, 0))
        table[c.kind, c.axes] = (count + c.runs, nbytes + c.nbytes * c.runs)
    keys = sorted(table, key=kind_order)
    return tuple(Traffic(*key, *table[key], seconds.get(key, 0.0)) for key in keys)


CollectiveKind = Literal[
    "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"
]
COLLECTIVES: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
IN_ROWS = "in-rows"  # a step of a move, which copies
REDUCTIONS = ("all-reduce", "reduce-scatter")  # those that combine what devices have


def kind_order(key: tuple[str, tuple[str, ...]]) -> tuple[int, tuple[str, ...]]:
    """The order of collectives by kind, then by axes, wherever their seconds do not order them."""
    return COLLECTIVES.index(key[0]), key[1]


@dataclass(frozen=True)
class MoveStep:
    """A step of a move: a collective, or a local "slice", "mask" or "in-rows".

    `dim` is the dim that gains or loses `axes`; an all-to-all takes them from `dim` to `to_dim`;
    a collective-permute leaves `dim` sharded over `to_axes` instead of `axes`. A mask keeps a
    whole value on the first device of `axes` and zeros elsewhere, which is a partial sum. In rows
    is a piece that lies in the order of its dims, the last innermost, however it was made.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int = -1
    to_dim: int = -1
    to_axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" dim {self.dim}" if self.dim >= 0 else ""
        to = f"->{self.to_dim}" if self.to_dim >= 0 else ""
        over = f"({'+'.join(self.axes)})" if self.axes else ""
        return f"{self.kind}{over}{where}{to}"


@dataclass(frozen=True)
class Collective:
    """A collective of the program: bytes are of the local buffer before it is scattered or
    after it is gathered, once; `runs` multiplies over the loops around it."""

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    seconds: float
    runs: int = 1


@dataclass(frozen=True, slots=True)
class LocalOp:
    """An op on this device's pieces. An operand None is the equation's own literal.

    `equation` is the path of the op in the graph: indices into ops, and through bodies
    (op, body, op, ...). A product that is `swapped` is made as that of the second operand by the
    first, and turned over. A sum of all rows is made in `parts` first: so many of each leading dim.
    """

    equation: tuple[int, ...]
    operands: tuple[str | None, ...]
    results: tuple[str, ...]
    operand_shardings: tuple[Sharding, ...]
    result_shardings: tuple[Sharding, ...]
    swapped: bool = False
    parts: tuple[int, ...] = ()

    def share(self, mesh: MeshShape) -> int:
        """Over how many devices the op's work is divided: every axis that an operand lies over."""
        laid = (*self.operand_shardings, *self.result_shardings)
        axes = {a for s in laid for dim in s.dims for a in dim}
        return mesh.size(sorted(axes))


@dataclass(frozen=True, slots=True)
class Move:
    """A value taken from one sharding to another, for an op of the user's line."""

    value: Value
    source: str
    result: str
    before: Sharding
    after: Sharding
    steps: tuple[MoveStep, ...]
    combiner: str = "sum"
    collectives: tuple[Collective, ...] = ()
    region: str = "forward"
    line: str = ""
    repeat: int = 0  # how many equal moves earlier regions made: this one must not be merged with

    def joins_inside(self, kind: str) -> bool:
        """True if it ends in a collective of this kind along a dim that is not the first.

        XLA for GPUs gathers along the dim that lies outermost. A product reads that as it lies, but
        what a program gives back lies in the order of its dims, and is written once more. What an
        all-to-all joins lies one device's part behind another's, which is the order of no dims:

            [a, b/2] [a, b/2]  --all-gather-->  [b, a]  --copy-->  [a, b]
            [a, b/2] [a, b/2]  --all-to-all-->  [2, a/2, b/2]  for  [a/2, b]
        """
        if not self.steps or self.steps[-1].kind != kind:
            return False
        return any(n > 1 for n in self.value.shape[: self.steps[-1].dim])


@dataclass(frozen=True, slots=True)
class Fence:
    """Values that a later computation may not be merged with: remat's recomputation.

    Where they are `tied`, nobody may have them before the last of them is there. Where they are
    `stored`, all readers get the same bits: none computes them again and rounds otherwise.
    """

    sources: tuple[str, ...]
    results: tuple[str, ...]
    tied: bool = False
    stored: bool = False


@dataclass(frozen=True)
class Block:
    """A straight line of instructions with inputs and outputs; the body of a loop or a step."""

    inputs: tuple[str, ...]
    instructions: tuple[ListingStep, ...]
    outputs: tuple[str | None, ...]


@dataclass(frozen=True)
class Loop:
    """A scan, while or cond whose bodies are blocks; `runs` is the trip count.

    It is handed operands that are `turned` with another dim than the first outermost: the number of
    the operand, and the dim.
    """

    equation: tuple[int, ...]
    operands: tuple[str | None, ...]
    results: tuple[str, ...]
    result_shardings: tuple[Sharding, ...]
    bodies: tuple[Block, ...]
    runs: int = 1
    turned: tuple[tuple[int, int], ...] = ()


ListingStep = LocalOp | Move | Fence | Loop


def names_read(step: ListingStep) -> Sequence[str | None]:
    """The names that an instruction reads, None for literals; a loop's bodies have their own."""
    if isinstance(step, Move):
        return (step.source,)
    return step.sources if isinstance(step, Fence) else step.operands


def names_made(step: ListingStep) -> Sequence[str]:
    """The names of what an instruction makes."""
    return (step.result,) if isinstance(step, Move) else step.results


@dataclass(frozen=True)
class Listing:
    """The whole step on one mesh: a block, and how its inputs and outputs lie."""

    block: Block
    input_shardings: tuple[Sharding, ...]
    output_shardings: tuple[Sharding, ...]

    def moves(self) -> Iterator[tuple[Move, int]]:
        """The moves, each with how often it runs in one step."""
        yield from _moves(self.block, 1)

    def collectives(self) -> tuple[tuple[Move, Collective], ...]:
        """The collectives, each with the move it belongs to, `runs` filled in."""
        return tuple(
            (m, Collective(c.kind, c.axes, c.nbytes, c.seconds, runs))
            for m, runs in self.moves()
            for c in m.collectives
        )

    def __str__(self) -> str:
        return "\n".join(_lines(self.block, ""))


def _moves(block: Block, runs: int) -> Iterator[tuple[Move, int]]:
    for step in block.instructions:
        if isinstance(step, Move):
            yield step, runs
        elif isinstance(step, Loop):
            for body in step.bodies:
                yield from _moves(body, runs * step.runs)


def _lines(block: Block, indent: str) -> Iterator[str]:
    yield f"{indent}inputs {', '.join(block.inputs)}"
    for step in block.instructions:
        if isinstance(step, LocalOp):
            operands = ", ".join(o or "literal" for o in step.operands)
            where = ".".join(map(str, step.equation))
            how = " swapped" * step.swapped
            how += f" in {'x'.join(map(str, step.parts))} parts" if step.parts else ""
            yield f"{indent}{', '.join(step.results)} = run {where}{how}({operands})"
        elif isinstance(step, Move):
            how = ", ".join(map(str, step.steps))
            yield f"{indent}{step.result} = move {step.source} {step.before} -> {step.after}: {how}"
        elif isinstance(step, Fence):
            how = " tied" * step.tied + " stored" * step.stored
            yield f"{indent}{', '.join(step.results)} = fence{how} {', '.join(step.sources)}"
        else:
            turned = {k: f" along {dim}" for k, dim in step.turned}
            named = enumerate(step.operands)
            operands = ", ".join((o or "literal") + turned.get(k, "") for k, o in named)
            results = ", ".join(step.results)
            yield f"{indent}{results} = loop {step.equation}({operands}) x{step.runs}"
            for body in step.bodies:
                yield from _lines(body, indent + "  ")
    yield f"{indent}return {', '.join(o or 'literal' for o in block.outputs)}"
