"""The values held at the peak, in the user's terms: paths, modules, lines and kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.kernels import Kernel
from autopar.cost.liveness import Moment
from autopar.ir.graph import Graph, Op
from autopar.ir.graph import Origin as OpOrigin
from autopar.ir.peak import SHOWN_ITEMS, HeldItem, HeldKind, Peak
from autopar.ir.sharding import Sharding
from autopar.ir.spmd import Block, Fence, Instruction, LocalOp, Loop, Move, SpmdProgram
from autopar.ir.values import Role, Value


@dataclass(frozen=True)
class _Made:
    """A piece by what makes it: the value, how it lies, and the op or collective."""

    value: Value
    sharding: Sharding
    what: str
    origin: OpOrigin
    is_collective: bool = False


def peak_of(
    graph: Graph,
    program: SpmdProgram,
    given: Mapping[str, int],
    moments: Sequence[Moment],
    peak_bytes: int,
) -> Peak:
    """The peak that some moments, outermost first, come to beside the step's arguments.

    Of the `peak_bytes`, what no value accounts for is temporary: scratch, and what is set aside.
    """
    items = list(_arguments(graph, program, given))
    for depth, moment in enumerate(moments):
        items += _pieces(graph, moment, at_top=depth == 0)
    totals = Counter[HeldKind]()
    for item in items:
        totals[item.kind] += item.local_bytes
    totals[HeldKind.TEMPORARY] += peak_bytes - totals.total()
    largest = sorted(items, key=lambda i: -i.local_bytes)[:SHOWN_ITEMS]
    what, origin = _running(graph, moments[-1])
    outer = moments[0]
    return Peak(
        op=what,
        module=origin.module,
        region=origin.region,
        line=origin.line,
        step_share=(outer.at + 1) / max(1, len(outer.stored.kernels)),
        items=tuple(i for i in largest if i.local_bytes),
        totals=tuple((kind, totals[kind]) for kind in HeldKind if totals[kind]),
    )


def argument_kinds(
    graph: Graph, program: SpmdProgram, given: Mapping[str, int]
) -> Counter[HeldKind]:
    """Bytes of the step's arguments, by kind."""
    totals = Counter[HeldKind]()
    for item in _arguments(graph, program, given):
        totals[item.kind] += item.local_bytes
    return totals


def piece_kinds(graph: Graph, moment: Moment, at_top: bool) -> dict[str, HeldKind]:
    """The kinds of all pieces that a moment's block stores."""
    made = dict(_makers(graph, moment.block, moment.stored.nbytes))
    readers = _reader_regions(graph, moment, made) if at_top else {}
    return {name: _kind(piece, readers.get(name, ()), at_top) for name, piece in made.items()}


def _arguments(graph: Graph, program: SpmdProgram, given: Mapping[str, int]) -> Iterator[HeldItem]:
    trained = _read_before_update(graph)
    for i, sharding in zip(graph.inputs, program.input_shardings, strict=True):
        value = i.value
        if i.role is Role.STATE:
            kind = HeldKind.PARAMETER if value.name in trained else HeldKind.OPTIMIZER
        else:
            kind = HeldKind.BATCH if i.role is Role.BATCH else HeldKind.CONSTANT
        name = i.path or value.name
        yield HeldItem(name, kind, value.shape, value.dtype, sharding, given[value.name], "")


def _read_before_update(graph: Graph) -> set[str]:
    """Values that the forward or backward pass reads."""
    return {
        name for op in graph.ops if op.origin.region != "update" for name in op.value_operands()
    }


def _pieces(graph: Graph, moment: Moment, at_top: bool) -> Iterator[HeldItem]:
    held = dict(moment.held)
    made = dict(_makers(graph, moment.block, held))
    readers = _reader_regions(graph, moment, held) if at_top else {}
    paths = {i.value.name: i.path for i in graph.inputs if i.path}
    for name, nbytes in held.items():
        piece = made.get(name)
        if piece is None:  # cut out of an argument of a loop, or a fence's ticket
            continue
        kind = _kind(piece, readers.get(name, set()), at_top)
        subject = paths.get(piece.value.name) or piece.origin.module
        text = f"{piece.what} of {subject}" if piece.is_collective and subject else ""
        yield HeldItem(
            text or " ".join(p for p in (piece.origin.module, piece.what) if p),
            kind, piece.value.shape, piece.value.dtype, piece.sharding, nbytes, piece.origin.line,
        )  # fmt: skip


def _kind(piece: _Made, readers: Collection[str], at_top: bool) -> HeldKind:
    region = piece.origin.region
    if at_top and region == "backward" and "update" in readers:
        return HeldKind.GRADIENT
    if piece.is_collective:
        return HeldKind.COLLECTIVE
    if at_top and region == "forward" and "backward" in readers:
        return HeldKind.ACTIVATION
    return HeldKind.TEMPORARY


def _makers(graph: Graph, block: Block, wanted: Collection[str]) -> Iterator[tuple[str, _Made]]:
    modules: dict[str, OpOrigin] = {}  # of every value that the block makes
    for step in block.instructions:
        if isinstance(step, Fence):
            continue
        if isinstance(step, Move):
            if step.result in wanted:
                yield step.result, _moved(step, modules)
            continue
        op = graph.op_at(step.equation)
        laid = zip(step.results, op.results, step.result_shardings, strict=True)
        for name, value, sharding in laid:
            modules[value.name] = op.origin
            if name in wanted:
                yield name, _Made(value, sharding, op.kind, op.origin)


def _moved(step: Move, modules: Mapping[str, OpOrigin]) -> _Made:
    origin = modules.get(step.value.name)
    what = step.steps[-1].kind if step.steps else "copy"
    module = origin.module if origin is not None else ""
    line = step.line or (origin.line if origin is not None else "")
    placed = OpOrigin(step.region, module, line)
    return _Made(step.value, step.after, what, placed, bool(step.collectives))


def _reader_regions(graph: Graph, moment: Moment, wanted: Collection[str]) -> dict[str, set[str]]:
    """In which regions each piece is read, by kernels that fuse others too."""
    found: dict[str, set[str]] = {name: set() for name in wanted}
    for kernel in moment.stored.kernels:
        region = _region(graph, moment.block.instructions[kernel.at]) if kernel.at >= 0 else ""
        for name in kernel.reads:
            if name in found:
                found[name].add(region)
    return found


def _region(graph: Graph, step: Instruction) -> str:
    if isinstance(step, LocalOp | Loop):
        return graph.op_at(step.equation).origin.region
    return step.region if isinstance(step, Move) else ""


def _running(graph: Graph, moment: Moment) -> tuple[str, OpOrigin]:
    """The op or collective that runs at a moment, and its origin."""
    kernel: Kernel | None = moment.kernel
    if kernel is None or not moment.block.instructions:
        return "", OpOrigin()
    if kernel.at < 0:
        return "copy", OpOrigin()
    step = moment.block.instructions[kernel.at]
    if isinstance(step, LocalOp | Loop):
        op: Op = graph.op_at(step.equation)
        return op.kind, op.origin
    if isinstance(step, Move):
        what = step.steps[-1].kind if step.steps else "copy"
        return what, OpOrigin(step.region, "", step.line)
    return "fence", OpOrigin()
