"""The peak memory of a device that runs a listing: its bytes, its moment, and what is held then.

What is held is told in the user's terms: paths, modules, lines and kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cluster.chip import Platform
from autopar.cost.heap import Buffer, heap_bytes
from autopar.cost.kernels import (
    ADDING,
    COPY,
    FILL,
    Kernel,
    Pieces,
    Stored,
    pieces_of,
    stored_kernels,
)
from autopar.cost.line import Fill, filled_with, read_line
from autopar.cost.liveness import (
    BlockSpans,
    Moment,
    buffers,
    busiest,
    held_kinds,
    most_bytes,
    piece_spans,
)
from autopar.cost.merged_products import products_alike, with_products_merged
from autopar.cost.ops import begins_as_found
from autopar.cost.order import (
    ahead,
    along_rows,
    combined,
    depth_first,
    least_first,
    lightened,
    post_order,
)
from autopar.cost.siblings import Iteration, iteration_of, with_siblings
from autopar.cost.sizes import Sizes
from autopar.cost.sums import added_sums
from autopar.cost.timeline import Timed, beside_moves, entering, piece_times, row_work
from autopar.cost.trips import (
    PIPELINED_IN_TURN,
    Leaving,
    PieceTime,
    Unrolled,
    crossing_kinds,
    light_kernels,
    steady_trip,
    zeros_of,
)
from autopar.ir.batching import Accumulator
from autopar.ir.control_flow import ControlFlow, PortKind
from autopar.ir.graph import Graph, Op
from autopar.ir.graph import Origin as OpOrigin
from autopar.ir.listing import (
    Block,
    Fence,
    Listing,
    ListingStep,
    LocalOp,
    Loop,
    Move,
)
from autopar.ir.peak import SHOWN_ITEMS, HeldItem, HeldKind, Peak
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.values import Literal, Role, Value


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
    program: Listing,
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


def argument_kinds(graph: Graph, program: Listing, given: Mapping[str, int]) -> Counter[HeldKind]:
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


def _arguments(graph: Graph, program: Listing, given: Mapping[str, int]) -> Iterator[HeldItem]:
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
    return {name for op in graph.ops if op.origin.region != "update" for name in op.value_operands}


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
    """The wanted pieces that are known, those of trips outside of their loop too."""
    same = dict[str, list[str]]()
    for name in wanted:
        same.setdefault(name.rsplit(" ", 1)[-1] if name.startswith("%") else name, []).append(name)
    modules: dict[str, OpOrigin] = {}  # of every value that the block makes
    for step in block.instructions:
        if isinstance(step, Fence):
            continue
        if isinstance(step, Move):
            for j, name in enumerate(pieces_of(step)):
                names = [name] if name in wanted else same.get(name, ())
                yield from ((n, _moved(step, j, modules)) for n in names)
            continue
        op = graph.op_at(step.equation)
        laid = zip(step.results, op.results, step.result_shardings, strict=True)
        for name, value, sharding in laid:
            modules[value.name] = op.origin
            made = _Made(value, sharding, op.kind, op.origin)
            yield from ((n, made) for n in same.get(name, ()))
        for body in step.bodies if isinstance(step, Loop) else ():
            for name, made in _makers(graph, body, same):
                yield from ((n, made) for n in same[name] if n != name)


def _moved(step: Move, part: int, modules: Mapping[str, OpOrigin]) -> _Made:
    origin = modules.get(step.value.name)
    what = _what_moves(step, part)
    module = origin.module if origin is not None else ""
    line = step.line or (origin.line if origin is not None else "")
    placed = OpOrigin(step.region, module, line)
    return _Made(step.value, step.after, what, placed, bool(step.collectives))


def _what_moves(step: Move, part: int) -> str:
    """The collective of a move that makes a piece, or what is done to it behind the last."""
    if part + 1 < len(step.collectives):
        return step.collectives[part].kind
    return step.steps[-1].kind if step.steps else "copy"


def _reader_regions(graph: Graph, moment: Moment, wanted: Collection[str]) -> dict[str, set[str]]:
    """In which regions each piece is read, by kernels that fuse others too."""
    found: dict[str, set[str]] = {name: set() for name in wanted}
    for kernel in moment.stored.kernels:
        region = region_of(graph, moment.block.instructions[kernel.at]) if kernel.at >= 0 else ""
        for name in kernel.reads:
            if name in found:
                found[name].add(region)
    return found


def region_of(graph: Graph, step: ListingStep) -> str:
    """The region of an instruction: forward, backward or update; "" for a fence."""
    if isinstance(step, LocalOp | Loop):
        return graph.op_at(step.equation).origin.region
    return step.region if isinstance(step, Move) else ""


def _running(graph: Graph, moment: Moment) -> tuple[str, OpOrigin]:
    """The op or collective that runs at a moment, and its origin."""
    kernel: Kernel | None = moment.kernel
    if kernel is None or not moment.block.instructions:
        return "", OpOrigin()
    if kernel.at < 0:
        made = dict(_makers(graph, moment.block, kernel.makes)).get(kernel.makes[0])
        return ("copy", OpOrigin()) if made is None else (made.what, made.origin)
    step = moment.block.instructions[kernel.at]
    if isinstance(step, LocalOp | Loop):
        op: Op = graph.op_at(step.equation)
        return op.kind, op.origin
    if isinstance(step, Move):
        return _what_moves(step, kernel.part), OpOrigin(step.region, "", step.line)
    return "fence", OpOrigin()


_NONE: Pieces = frozenset()
# Of what a step holds beside its arguments: for the holes that allocators of other platforms than
# GPUs leave, and for the order in which XLA for GPUs runs the work of trips that it takes out of
# loops, which is followed only so far.
SPARE_SHARE, SPARE_SHARE_OF_TRIPS = 0.05, 0.02


@dataclass(frozen=True)
class Held:
    """Bytes of the arguments, the most that is held at once, arguments included, and when.

    What is held then is told on demand: few plans that are weighed are shown.
    """

    argument_bytes: int
    peak_bytes: int
    _told: Callable[[], Peak]

    @cached_property
    def peak(self) -> Peak:
        """The moment of the most, and what is held then."""
        return self._told()


def held_bytes(
    graph: Graph,
    program: Listing,
    sizes: Sizes,
    timed: Timed | None = None,
    sums: Sequence[Accumulator] | None = None,
) -> Held:
    """Bytes that one device of a platform holds over a step, or over a part of one.

    `sizes` are those of the graph on its mesh and platform; `timed` is the listing in time, by
    which XLA for GPUs orders kernels; without it gathers start early, as on other platforms. A part
    comes with the `sums` that it adds to in place.

    The listing becomes kernels, as compilers fuse it; collectives are combined and kernels
    ordered as XLA does. A stored piece lives from the kernel that makes it to the last that
    reads it. Arguments are held throughout, and state that comes back takes their buffers. A
    loop holds what its body holds at most, beside what is held around it.
    """
    walk = _Walk(sizes, timed)
    given, moment = walk.step(graph, program, sums)
    argument_bytes = sum(given.values())
    peak_bytes = argument_bytes + walk.laid_out(moment)
    moments = walk.inward(moment)
    return Held(
        argument_bytes, peak_bytes, lambda: peak_of(graph, program, given, moments, peak_bytes)
    )


@dataclass(frozen=True)
class HeldWhile:
    """Bytes that one device holds while a kernel of a block runs, by kind, arguments included."""

    block: Block
    kernel: Kernel
    by_kind: Counter[HeldKind]


def held_while(graph: Graph, program: Listing, sizes: Sizes, timed: Timed) -> Iterator[HeldWhile]:
    """Bytes held over a step, kernel by kernel; the most is the peak of `held_bytes`.

    A loop is one of its trips. What is held for no piece that is known, as the heap's holes are, is
    held in proportion to the rest. `sizes` are those of the graph on the mesh, `timed` is the
    listing in time.
    """
    walk = _Walk(sizes, timed)
    given, moment = walk.step(graph, program)
    whole = replace(moment, nbytes=walk.laid_out(moment))
    arguments = argument_kinds(graph, program, given)
    for level in walk.levels(graph, whole, at_top=True):
        yield replace(level, by_kind=level.by_kind + arguments)


@dataclass(frozen=True)
class StepKernels:
    """The kernels of a step before they are joined or ordered, to weigh others in their place.

    `written` are all pieces that the step or a body of its loops stores.
    """

    block: Block
    stored: Stored
    written: Pieces
    outside: Collection[str]
    timed: Timed | None
    elsewhere: Mapping[str, PieceTime]  # the times of what is made outside of its loop
    joined: Callable[[Block, Stored], Stored]  # joins those of which several run as one
    laid_out: Callable[[Moment], int]  # the bytes that a moment of the step takes

    def moment(self, stored: Stored) -> Moment:
        """The moment at which the step holds the most, were these its kernels."""
        joined = self.joined(self.block, stored)
        return _scheduled(self.block, joined, self.outside, self.timed, (), self.elsewhere)


def step_kernels(graph: Graph, program: Listing, sizes: Sizes, timed: Timed) -> StepKernels:
    """Reads the kernels of a step that is `timed`, its loops being as they are."""
    walk = _Walk(sizes, timed)
    given, outside = walk.around(graph, program)
    stored = walk.unrolled(program.block, given)
    written = frozenset(walk.written(program.block, stored))
    own = walk.timed(program.block)
    return StepKernels(
        program.block, stored, written, outside, own, walk.elsewhere, walk.joined, walk.laid_out
    )


def held_spans(
    graph: Graph, program: Listing, mesh: MeshShape, platform: Platform = "gpu"
) -> BlockSpans:
    """From which kernel to which each stored piece of a listing is held, by the rules above."""
    walk = _Walk(Sizes(graph, mesh, platform))
    _, moment = walk.step(graph, program)
    return walk.spans(moment)


class _Walk:
    """Goes through a block and the loops in it, and keeps what each loop holds at most."""

    def __init__(self, sizes: Sizes, timed: Timed | None = None) -> None:
        self._sizes = sizes
        blocks = timed.blocks() if timed is not None and sizes.platform == "gpu" else ()
        self._timed = {id(t.block): t for t in blocks}
        self._pipelined = timed.pipelined if timed is not None else frozenset(PIPELINED_IN_TURN)
        self._merges = timed is not None and timed.merges
        self._crossed: dict[tuple[str, ...], tuple[Stored, Leaving]] = {}
        # How kernels that run outside of their loop go over what they read, by what they make.
        self._outside_iterations: dict[str, Iteration] = {}
        # The number that each stack is filled with, its dtype and shape.
        self._fills: dict[str, Fill] = {}
        self.elsewhere: dict[str, PieceTime] = {}  # times of what is made outside of its loop
        self._inside: dict[tuple[str, ...], Moment] = {}
        self._bodies: dict[tuple[str, ...], list[Moment]] = {}

    def timed(self, block: Block) -> Timed | None:
        """A block in time, where its compiler's scheduler goes by it."""
        return self._timed.get(id(block))

    def laid_out(self, moment: Moment) -> int:
        """Bytes beside the arguments of a step whose moment this is."""
        apart = sum(n for _, n in moment.apart)
        if self._sizes.platform != "gpu":
            return moment.nbytes + int((moment.nbytes - apart) * SPARE_SHARE)
        found: list[Buffer] = []
        self._lay(moment, 0, found)
        laid_out = heap_bytes(found)
        return apart + laid_out + (int(laid_out * SPARE_SHARE_OF_TRIPS) if self._crossed else 0)

    def _lay(self, moment: Moment, now: int, found: list[Buffer]) -> int:
        """Find the buffers of a block that begins now, and of its loops; returns its end."""
        times: list[tuple[int, int]] = []
        for kernel in moment.stored.kernels:
            begin, step = now, kernel.instruction(moment.block)
            bodies = self._bodies.get(step.results, ()) if isinstance(step, Loop) else ()
            if bodies and kernel.scratch_bytes == max(b.nbytes for b in bodies):
                for body in bodies:
                    now = self._lay(body, now, found)
            elif kernel.scratch_bytes:
                found.append(Buffer(kernel.scratch_bytes, now, now))
            times.append((begin, now))
            now += 1
        times.append((now, now))
        outside = {*moment.outside, *(name for name, _ in moment.apart)}
        for _, nbytes, (first, last) in buffers(moment.stored, outside):
            if nbytes:
                found.append(Buffer(nbytes, times[first][0], times[last][1]))
        return now

    def spans(self, moment: Moment) -> BlockSpans:
        """The spans of a moment's block, and of the bodies of its loops."""
        inner: list[tuple[int, BlockSpans]] = []
        for k, kernel in enumerate(moment.stored.kernels):
            step = kernel.instruction(moment.block)
            if isinstance(step, Loop):
                inner += [(k, self.spans(body)) for body in self._bodies[step.results]]
        spans, length = piece_spans(moment.stored), len(moment.stored.kernels)
        return BlockSpans(moment.block.inputs, spans, length, tuple(inner))

    def written(self, block: Block, stored: Stored) -> Iterator[str]:
        """The pieces that a block and the bodies of its loops store."""
        for kernel in stored.kernels:
            yield from kernel.makes
            step = kernel.instruction(block)
            for body in self._bodies[step.results] if isinstance(step, Loop) else ():
                yield from self.written(body.block, body.stored)

    def around(self, graph: Graph, program: Listing) -> tuple[dict[str, int], set[str]]:
        """The bytes of a step's arguments; the pieces that are in the arguments' buffers."""
        given, block = self._sizes.inputs(program), program.block
        returned = {block.outputs[o] for o, _ in graph.donated}
        return given, {*given, *(o for o in returned if o is not None)}

    def step(
        self, graph: Graph, program: Listing, sums: Sequence[Accumulator] | None = None
    ) -> tuple[dict[str, int], Moment]:
        """The bytes of a step's arguments, and its moment; those of a part, where it adds to sums.

        Each result of a part has a buffer of its own.
        """
        given, outside = self.around(graph, program)
        block = program.block
        stored = self.unrolled(block, given)
        if sums is None:
            copied = sorted(outside & read_line(block, self._sizes).lying_turned)
            stored = self.joined(block, _beside(stored, copied))
            return given, self.busiest(block, stored, outside, copied=copied)
        stored = self.joined(block, stored)
        stored, added = self._with_sums(graph, program, stored, sums)
        outside |= added
        return given, self.busiest(block, stored, outside, stored.kept.difference(outside))

    def _with_sums(
        self, graph: Graph, program: Listing, stored: Stored, accumulators: Sequence[Accumulator]
    ) -> tuple[Stored, Pieces]:
        """The kernels where some results are added to sums that were given, and those sums.

        A matrix product, or element-wise work, adds its result itself, unless another reads that
        too. What else is summed is gone once it is added.
        """
        sums = added_sums(graph, program, self._sizes, accumulators)
        piece_of = dict(zip(map(str, graph.outputs), program.block.outputs, strict=True))
        summed = {p for a in accumulators if (p := piece_of[a.value]) is not None}
        again = {name for kernel in stored.kernels for name in kernel.reads}
        stored = sums.with_adding(stored, program.block, self._sizes)
        nbytes, added = dict(stored.nbytes), set[str]()
        for kernel in stored.kernels:
            if kernel.at == ADDING:
                added.update(kernel.makes)
            mine = summed.difference(again) if kernel.is_light else sums.products
            for name in mine.intersection(kernel.makes):
                added.add(name)
                nbytes[name] = sums.nbytes.get(name, nbytes[name])
            nbytes.update(dict.fromkeys(sums.views.intersection(kernel.makes), 0))
        return replace(stored, nbytes=nbytes, kept=stored.kept - summed), frozenset(added)

    def levels(self, graph: Graph, moment: Moment, at_top: bool) -> Iterator[HeldWhile]:
        """Bytes held over a block beside those held around it; the most are those of its moment."""
        held = list(held_kinds(moment, piece_kinds(graph, moment, at_top)))
        most = max((level.total() for level in held), default=0)
        for kernel, level in zip(moment.stored.kernels, held, strict=True):
            unknown = (moment.nbytes - most) * level.total() // max(1, most)
            level[HeldKind.TEMPORARY] += unknown
            inner = self._within(moment.block, kernel)
            if inner is None:
                yield HeldWhile(moment.block, kernel, level)
                continue
            level[HeldKind.TEMPORARY] -= inner.nbytes
            for trip in self.levels(graph, inner, at_top=False):
                yield replace(trip, by_kind=trip.by_kind + level)

    def _within(self, block: Block, kernel: Kernel | None) -> Moment | None:
        """The moment of the loop that a kernel is."""
        step = kernel.instruction(block) if kernel is not None else None
        return self._inside.get(step.results) if isinstance(step, Loop) else None

    def busiest(
        self,
        block: Block,
        stored: Stored,
        outside: Collection[str],
        apart: Collection[str] = (),
        follows: Mapping[str, str] | None = None,
        copied: Collection[str] = (),
    ) -> Moment:
        """The moment of a block with such kernels, its loops at their own moments."""
        timed, follows = self.timed(block), follows or {}
        return _scheduled(block, stored, outside, timed, apart, self.elsewhere, follows, copied)

    def joined(self, block: Block, stored: Stored) -> Stored:
        """The kernels of which several run as one joined: collectives, and element-wise work."""
        if self._sizes.platform == "gpu":
            if self._merges:
                stored = with_products_merged(stored, products_alike(block, self._sizes))
            stored = self._filled_at_once(block, stored)
            stored = self._along_rows(block, stored)
        if self._sizes.platform != "cpu":
            found = self._iterations(block, stored)
            stored = with_siblings(stored, [found.get(k.makes[0]) for k in stored.kernels])
        return combined(stored)

    def _filled_at_once(self, block: Block, stored: Stored) -> Stored:
        """The kernels, those joined that fill buffers alike with one number.

        To XLA that is one value, of which everybody who writes into it gets a copy: it makes all of
        them when it makes the first.
        """
        first_of: dict[Fill, int] = {}
        kernels = list(stored.kernels)
        for k, kernel in enumerate(kernels):
            key = self._filled_with(block, kernel)
            first = first_of.setdefault(key, k) if key is not None else k
            if first != k:
                makes = (*kernels[first].makes, *kernel.makes)
                kernels[first] = replace(kernels[first], makes=makes)
                kernels[k] = replace(kernel, makes=())
        return replace(stored, kernels=tuple(kernel for kernel in kernels if kernel.makes))

    def _filled_with(self, block: Block, kernel: Kernel) -> Fill | None:
        """The number that a kernel fills a buffer with, and its dtype and shape."""
        if kernel.at == FILL:
            (name,) = kernel.makes
            return self._fills.get(name) or read_line(block, self._sizes).fills.get(name)
        step = kernel.instruction(block)
        op = self._sizes.op(step.equation) if isinstance(step, LocalOp) else None
        if not isinstance(step, LocalOp) or op is None or kernel.reads:
            return None
        number = op.operands[0] if op.kind == "broadcast_in_dim" else None
        if not isinstance(number, Literal):
            return None
        return filled_with(number, self._sizes.made(step, op))

    def _along_rows(self, block: Block, stored: Stored) -> Stored:
        """The kernels, those that Triton makes one of joined."""
        return along_rows(stored, [row_work(block, self._sizes, k) for k in stored.kernels])

    def _iterations(self, block: Block, stored: Stored) -> dict[str, Iteration]:
        """The iterations of kernels over what they read, by what these make first."""
        found = dict(self._outside_iterations)
        for kernel in stored.kernels:
            own = iteration_of(block, self._sizes, kernel)
            if own is not None:
                found[kernel.makes[0]] = own
        return found

    def unrolled(
        self,
        block: Block,
        given: Mapping[str, int],
        slices: Mapping[str, int] | None = None,
        stacked: Pieces = _NONE,
    ) -> Stored:
        """The kernels of a block, those of trips among them that are taken out of their loops."""
        stored = stored_kernels(block, self._sizes, given, self._inner, slices, stacked)
        if self._sizes.platform == "gpu":
            stored = self._with_stacks(block, stored)
        if not self._crossed:
            return stored
        kernels, nbytes, operands = list[Kernel](), dict(stored.nbytes), dict(stored.operands)
        for kernel in stored.kernels:
            step = kernel.instruction(block)
            crossed = self._crossed.get(step.results) if isinstance(step, Loop) else None
            flow = self._sizes.op(step.equation).control_flow if isinstance(step, Loop) else None
            if not isinstance(step, Loop) or crossed is None or flow is None:
                kernels.append(kernel)
                continue
            body, leaving = crossed
            timed = self.timed(step.bodies[0])
            times = piece_times(timed, body.nbytes) if timed is not None else {}
            unrolled = Unrolled(kernel, step, flow, body, stored, leaving, times)
            named = unrolled.named.items()
            iterations = self._iterations(step.bodies[0], body)
            # Sums and turns do not run as one outside.
            self._outside_iterations.update(
                (n, iterations[o]) for n, o in named
                if o in iterations and iterations[o].kind in ("items", "groups")
            )  # fmt: skip
            masks = self._masks(block, stored, step.bodies[0], body)
            for made in unrolled.kernels:
                read = masks.get(unrolled.named.get(made.makes[0], ""), _NONE)
                kernels.append(replace(made, reads=made.reads | read) if read else made)
            nbytes.update(unrolled.nbytes)
            operands.update(unrolled.operands)
            self.elsewhere.update(unrolled.times)
        return replace(stored, kernels=tuple(kernels), nbytes=nbytes, operands=operands)

    def _masks(
        self, block: Block, stored: Stored, inner: Block, body: Stored
    ) -> Mapping[str, Pieces]:
        """By piece of a loop's body, the masks that a trip reads which runs outside of the loop.

        A mask is made of nothing, and stored where a loop is given it. To XLA it is the one that a
        trip computes for itself, once that runs in the same block: but not if a device has one
        place of a dim, which XLA leaves out of what no loop is given.
        """
        line, outside = read_line(inner, self._sizes), read_line(block, self._sizes)
        stored_as: dict[int, str] = {}
        for kernel in stored.kernels:
            step, name = kernel.instruction(block), kernel.makes[0]
            if isinstance(step, LocalOp) and name in outside.counted:
                if 1 not in self._sizes.made(step, self._sizes.op(step.equation)):
                    stored_as[outside.counted[name]] = name
        read: dict[str, Pieces] = {}
        for name, number in line.counted.items():
            mask, roots = stored_as.get(number), line.roots[line.maker[name]]
            for kernel in body.kernels if mask is not None else ():
                if kernel.at in roots:
                    made = kernel.makes[0]
                    read[made] = read.get(made, _NONE) | {str(mask)}
        return read

    def _with_stacks(self, block: Block, stored: Stored) -> Stored:
        """The kernels, and those that begin the stacks of scans, which scans write into.

        Of stacks of one value XLA keeps the first, but for those that the block gives back.
        """
        kernels, nbytes, same = list[Kernel](), dict(stored.nbytes), dict[str, str]()
        for kernel in stored.kernels:
            reads = [same.get(name, name) for name in kernel.reads]
            step = kernel.instruction(block)
            op = self._sizes.op(step.equation) if isinstance(step, Loop) else None
            flow = op.control_flow if op is not None else None
            if isinstance(step, Loop) and op is not None and flow is not None:
                first_of: dict[str, str] = {}
                for at, stacked in _stacks(step, flow):
                    r = step.results[at]
                    first = first_of.setdefault(stacked, r)
                    if first != r and r not in stored.kept:
                        same[r], nbytes[r] = first, 0
                        continue
                    zeros = zeros_of(r)
                    value, sharding = op.results[at], step.result_shardings[at]
                    shape = self._sizes.local(sharding, value.shape)
                    if not begins_as_found(op, self._sizes.platform):
                        self._fills[zeros] = "0", value.dtype, shape
                    nbytes[zeros] = nbytes[r]
                    kernels.append(Kernel(FILL, (zeros,), _NONE))
                    reads.append(zeros)
            kernels.append(replace(kernel, reads=frozenset(reads)))
        behind = _behind_as(stored, same)
        return replace(stored, kernels=tuple(kernels), nbytes=nbytes, behind=behind)

    def inward(self, moment: Moment) -> tuple[Moment, ...]:
        """A moment and, where a loop runs in it, those of its body, outermost first."""
        found: list[Moment] = []
        inner: Moment | None = moment
        while inner is not None:
            found.append(inner)
            inner = self._within(inner.block, inner.kernel)
        return tuple(found)

    def _inner(self, loop: Loop, op: Op, nbytes: Mapping[str, int]) -> int:
        """Bytes of a loop's body at its busiest, beside the loop's operands and results."""
        moments = [self._body(loop, op, b, nbytes) for b in range(len(loop.bodies))]
        self._bodies[loop.results] = moments
        worst = max(moments, key=lambda m: m.nbytes, default=None)
        if worst is None:
            return 0
        self._inside[loop.results] = worst
        return worst.nbytes

    def _body(self, loop: Loop, op: Op, b: int, nbytes: Mapping[str, int]) -> Moment:
        body = loop.bodies[b]
        flow = op.control_flow
        if flow is None or flow.kind != "scan":
            stored = self.unrolled(body, dict.fromkeys(body.inputs, 0))
            return self.busiest(body, self.joined(body, stored), body.inputs)
        sizes = entering(flow, loop, b, nbytes)
        ports = flow.inputs[b]
        slices = {n: sizes[n] for n, p in zip(body.inputs, ports, strict=True) if p.by_row}
        given = {n: size for n, size in sizes.items() if n not in slices}
        left = [(o, p) for o, p in zip(body.outputs, flow.outputs[b], strict=True) if o is not None]
        carried = {o for o, port in left if port.is_carry}
        stacked = frozenset(o for o, port in left if not port.is_carry) - carried
        stored = self.unrolled(body, given, slices, stacked)
        if self._sizes.platform != "gpu" or loop.runs == 1:
            return self.busiest(body, self.joined(body, stored), given)
        stored = _cut_for_triton(self._along_rows(body, stored), slices)
        leaving = self._leaving(loop, flow, b, stored)
        steady = steady_trip(stored, leaving)
        joined = self.joined(body, steady.stored)
        if leaving != Leaving():
            self._crossed[loop.results] = stored, leaving
        return self.busiest(body, joined, given, follows=steady.follows)

    def _leaving(self, loop: Loop, flow: ControlFlow, b: int, body: Stored) -> Leaving:
        """The kernels of a scan that XLA runs in another trip."""
        block = loop.bodies[b]
        is_light = light_kernels(block, body.kernels, self._sizes)
        kinds = self._pipelined
        found, _ = crossing_kinds(block, body.kernels, flow, b, is_light, loop.runs, kinds)
        return Leaving.of(body.kernels, found)


def _cut_for_triton(body: Stored, slices: Mapping[str, int]) -> Stored:
    """The kernels of a trip, and those that cut out what Triton's kernels read of it.

    Other element-wise kernels cut it out themselves.
    """
    read = frozenset[str]().union(*(k.reads for k in body.kernels if k.alone))
    cut = sorted(name for name in read & slices.keys() if not body.nbytes[name])
    if not cut:
        return body
    kernels = (*(Kernel(COPY, (name,), _NONE) for name in cut), *body.kernels)
    return replace(body, kernels=kernels, nbytes={**body.nbytes, **{n: slices[n] for n in cut}})


def _beside(stored: Stored, names: Collection[str]) -> Stored:
    """The kernels, some results of which are written beside the arguments whose buffers they take.

    A kernel that turns over what it gives back would write over arguments before it reads them.
    They are copied at the end.
    """
    if not names:
        return stored
    beside = {name: _beside_of(name) for name in names}
    kernels = list[Kernel]()
    for kernel in stored.kernels:
        makes = tuple(beside.get(name, name) for name in kernel.makes)
        reads = frozenset(beside.get(name, name) for name in kernel.reads)
        in_place = kernel.in_place and makes == kernel.makes
        kernels.append(replace(kernel, makes=makes, reads=reads, in_place=in_place))
    nbytes = {**stored.nbytes, **{new: stored.nbytes[name] for name, new in beside.items()}}
    behind = _behind_as(stored, beside)
    kept = frozenset(beside.get(name, name) for name in stored.kept)
    return replace(stored, kernels=tuple(kernels), nbytes=nbytes, behind=behind, kept=kept)


def _behind_as(stored: Stored, names: Mapping[str, str]) -> Mapping[str, Pieces]:
    """The pieces behind each value, some of them under other names."""
    return {
        o: frozenset(names.get(name, name) for name in pieces)
        for o, pieces in stored.behind.items()
    }


def _beside_of(name: str) -> str:
    return f"{name} beside"


def _stacks(loop: Loop, flow: ControlFlow) -> Iterator[tuple[int, str]]:
    """The results of a scan that it stacks, with the pieces of its body that a trip puts there."""
    if flow.kind == "scan":
        for output, port in zip(loop.bodies[0].outputs, flow.outputs[0], strict=True):
            if output is not None and port.kind is PortKind.STACKED and port.result is not None:
                yield port.result, output


def _scheduled(
    block: Block,
    stored: Stored,
    outside: Collection[str],
    timed: Timed | None,
    apart: Collection[str] = (),
    elsewhere: Mapping[str, PieceTime] | None = None,
    follows: Mapping[str, str] | None = None,
    copied: Collection[str] = (),
) -> Moment:
    """The busiest moment in the order that XLA would choose.

    Pieces that each follow another lie in its buffer, which is held outside, if that is read no
    more when they are made.

    1. Of three orders it takes that which holds least, the first of several.
    2. What was written beside its buffer is `copied` there at the end.
    3. On GPUs its latency-hiding scheduler then moves collectives, and weight gradients to run
       beside them. Else gathers start early.
    """
    orders = [least_first(stored), depth_first(stored, block.outputs)]
    if stored.visits:
        orders.append(post_order(stored, block.outputs))
    order = min(orders, key=lambda o: most_bytes(o, outside))
    copies = [Kernel(COPY, (name,), frozenset((_beside_of(name),))) for name in copied]
    kept = order.kept.difference(map(_beside_of, copied))
    order = replace(order, kernels=(*order.kernels, *copies), kept=kept)
    order = ahead(order) if timed is None else lightened(beside_moves(order, timed, elsewhere))
    if follows:
        outside = {*outside, *follows.values(), *_in_their_place(order.kernels, follows)}
    return busiest(block, order, outside, apart)


def _in_their_place(kernels: Sequence[Kernel], follows: Mapping[str, str]) -> Iterator[str]:
    """The pieces that are made after those that they follow were read last."""
    last = {name: k for k, kernel in enumerate(kernels) for name in kernel.reads}
    for k, kernel in enumerate(kernels):
        for name in kernel.makes:
            if name in follows and last.get(follows[name], -1) < k:
                yield name
