"""The peak memory of a device that runs a listing: its bytes, its moment, and what is held then.

What is held is told in the user's terms: paths, modules, lines and kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cluster.chip import Platform
from autopar.cost.kernels import (
    Kernel,
    Pieces,
    Sizes,
    Stored,
    is_product,
    pieces_of,
    stored_kernels,
)
from autopar.cost.liveness import BlockSpans, Moment, busiest, held_kinds, most_bytes, piece_spans
from autopar.cost.order import ahead, combined, depth_first, known_before, least_first, lightened
from autopar.cost.sums import added_sums
from autopar.cost.timeline import Timed, beside_moves, entering
from autopar.ir.batching import Accumulator
from autopar.ir.control_flow import PortKind
from autopar.ir.graph import Graph, Op
from autopar.ir.graph import Origin as OpOrigin
from autopar.ir.listing import (
    REDUCTIONS,
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
            made = enumerate(pieces_of(step))
            yield from ((name, _moved(step, j, modules)) for j, name in made if name in wanted)
            continue
        op = graph.op_at(step.equation)
        laid = zip(step.results, op.results, step.result_shardings, strict=True)
        for name, value, sharding in laid:
            modules[value.name] = op.origin
            if name in wanted:
                yield name, _Made(value, sharding, op.kind, op.origin)


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
        return "copy", OpOrigin()
    step = moment.block.instructions[kernel.at]
    if isinstance(step, LocalOp | Loop):
        op: Op = graph.op_at(step.equation)
        return op.kind, op.origin
    if isinstance(step, Move):
        return _what_moves(step, kernel.part), OpOrigin(step.region, "", step.line)
    return "fence", OpOrigin()


_NONE: Pieces = frozenset()
# Of what a step holds beside its arguments: for what its compiler's scheduler does that is not
# followed here, and for the holes that its allocator leaves.
SPARE_SHARE = 0.05
# The same of the trips of a scan, whose pieces pack badly among the stacks around them. Where it
# gathers or reduces across trips, XLA takes the first or the last out of the loop, too, and its
# scheduler moves that work about among the step's. From the buffers of six scanned models on one
# device, and of a diffusion transformer and two towers on eight: 0.05 to 0.29.
SPARE_OF_TRIPS = 0.2
# Of what a trip could make before what its loop carries is there, and without what it gathers: so
# much is made early. From the buffers of encoders, decoders and both: 0.2 to 0.7.
_EARLY_SHARE = 0.6
# The same where a trip gathers nothing. From the buffers of low-rank adapters and of a state space.
_EARLY_SHARE_ALONE = 0.75


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
    peak_bytes = argument_bytes + beside_arguments(moment)
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

    A loop is one of its trips. What is held for no piece that is known (see `SPARE_SHARE`) is held
    in proportion to the rest. `sizes` are those of the graph on the mesh, `timed` is the listing in
    time.
    """
    walk = _Walk(sizes, timed)
    given, moment = walk.step(graph, program)
    whole = replace(moment, nbytes=beside_arguments(moment))
    arguments = argument_kinds(graph, program, given)
    for level in walk.levels(graph, whole, at_top=True):
        yield replace(level, by_kind=level.by_kind + arguments)


@dataclass(frozen=True)
class StepKernels:
    """The kernels of a step before they are ordered, to weigh it with others in their place.

    `written` are all pieces that the step or a body of its loops stores.
    """

    block: Block
    stored: Stored
    written: Pieces
    outside: Collection[str]
    timed: Timed | None

    def moment(self, stored: Stored) -> Moment:
        """The moment at which the step holds the most, were these its kernels."""
        return _scheduled(self.block, stored, self.outside, self.timed)


def step_kernels(graph: Graph, program: Listing, sizes: Sizes, timed: Timed) -> StepKernels:
    """Reads the kernels of a step that is `timed`, its loops being as they are."""
    walk = _Walk(sizes, timed)
    given, outside = walk.around(graph, program)
    stored = walk.kernels(program.block, given)
    written = frozenset(walk.written(program.block, stored))
    own = walk.timed(program.block)
    return StepKernels(program.block, stored, written, outside, own)


def beside_arguments(moment: Moment) -> int:
    """Bytes of a step's moment, and what is held then for no piece that is known."""
    spare = (moment.nbytes - sum(n for _, n in moment.apart)) * SPARE_SHARE
    return moment.nbytes + int(spare)


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
        self._trips: dict[tuple[str, ...], _FirstTrip] = {}
        self._inside: dict[tuple[str, ...], Moment] = {}
        self._bodies: dict[tuple[str, ...], list[Moment]] = {}

    def timed(self, block: Block) -> Timed | None:
        """A block in time, where its compiler's scheduler goes by it."""
        return self._timed.get(id(block))

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
        block, stored = program.block, self.kernels(program.block, given)
        apart = _NONE
        if sums is not None:
            stored = self._with_sums(graph, program, stored, sums)
            apart = stored.kept.difference(outside)
        return given, _scheduled(block, stored, outside, self.timed(block), apart)

    def _with_sums(
        self, graph: Graph, program: Listing, stored: Stored, accumulators: Sequence[Accumulator]
    ) -> Stored:
        """The kernels where some results are added to sums that were given, in place.

        A matrix product, or element-wise work, adds its result itself, unless another reads that
        too. What else is summed is gone once it is added.
        """
        sums = added_sums(graph, program, self._sizes, accumulators)
        piece_of = dict(zip(map(str, graph.outputs), program.block.outputs, strict=True))
        summed = {p for a in accumulators if (p := piece_of[a.value]) is not None}
        again = {name for kernel in stored.kernels for name in kernel.reads}
        nbytes = {name: sums.widened.get(name, n) for name, n in stored.nbytes.items()}
        for kernel in stored.kernels:
            mine = summed.difference(again) if kernel.is_light else sums.products
            nbytes.update(dict.fromkeys(mine.intersection(kernel.makes), 0))
            nbytes.update(dict.fromkeys(sums.views.intersection(kernel.makes), 0))
        return replace(stored, nbytes=nbytes, kept=stored.kept - summed)

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
        given: Mapping[str, int],
        outside: Collection[str],
        slices: Mapping[str, int] | None = None,
        stacked: Pieces = frozenset(),
    ) -> Moment:
        """The moment of a block, its loops at their own moments."""
        stored = self.kernels(block, given, slices, stacked)
        return _scheduled(block, stored, outside, self.timed(block))

    def kernels(
        self,
        block: Block,
        given: Mapping[str, int],
        slices: Mapping[str, int] | None = None,
        stacked: Pieces = _NONE,
    ) -> Stored:
        """The kernels of a block, collectives combined, in no order yet."""
        stored = stored_kernels(block, self._sizes, given, self._inner, slices, stacked)
        return combined(self._with_first_trips(block, stored))

    def _with_first_trips(self, block: Block, stored: Stored) -> Stored:
        """The kernels, and what loops' first trips make before they need what the loops carry.

        Where a loop adds up over devices what it stacks, XLA takes the first trip out of it, and
        its scheduler runs as much of that as it can beside earlier work:

            as listed    loss | d loss | (f g | dg df) x n
            as it runs   loss, f g | d loss | dg df | (f g | dg df) x (n - 1)

        Trips of loops that do not wait for each other run side by side, and products that make
        gradients then wait for those of the other.
        """
        if not self._trips:
            return stored
        alongside = self._alongside(block, stored.kernels)
        kernels, nbytes = list[Kernel](), dict(stored.nbytes)
        for k, kernel in enumerate(stored.kernels):
            trip = self._taken_out(block, kernel)
            if trip is not None:
                early, begins = f"first trip {kernel.at}", f"trips {kernel.at}"
                nbytes[early], nbytes[begins] = trip.early_bytes, 0
                if k in alongside:
                    nbytes[early] = trip.most_bytes + trip.late_bytes
                    nbytes[begins] = trip.late_bytes
                kernels.append(Kernel(-1, (early,), kernel.reads - trip.waits, is_early=True))
                kernels.append(Kernel(-1, (begins,), kernel.reads & trip.waits | {early}))
                kernel = replace(kernel, reads=kernel.reads | {begins})
            kernels.append(kernel)
        return replace(stored, kernels=tuple(kernels), nbytes=nbytes)

    def _taken_out(self, block: Block, kernel: Kernel) -> _FirstTrip | None:
        """The first trip of a loop that runs before the loop."""
        step = kernel.instruction(block)
        return self._trips.get(step.results) if isinstance(step, Loop) else None

    def _alongside(self, block: Block, kernels: Sequence[Kernel]) -> set[int]:
        """The loops whose first trip runs beside that of another."""
        loops = [k for k, kernel in enumerate(kernels) if self._taken_out(block, kernel)]
        found, after = set[int](), dict[str, set[int]]()  # of each piece, the loops before it
        for k, kernel in enumerate(kernels if len(loops) > 1 else ()):
            before = set[int]().union(*(after[name] for name in kernel.reads if name in after))
            if k in loops:
                apart = {other for other in loops if other < k} - before
                if apart:
                    found |= {k, *apart}
                before = {k, *before}
            if before:
                after.update(dict.fromkeys(kernel.makes, before))
        return found

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
            return self.busiest(body, dict.fromkeys(body.inputs, 0), body.inputs)
        sizes = entering(flow, loop, b, nbytes)
        ports = flow.inputs[b]
        slices = {n: sizes[n] for n, p in zip(body.inputs, ports, strict=True) if p.by_row}
        given = {n: size for n, size in sizes.items() if n not in slices}
        left = [(o, p) for o, p in zip(body.outputs, flow.outputs[b], strict=True) if o is not None]
        carried = {o for o, port in left if port.is_carry}
        stacked = frozenset(o for o, port in left if not port.is_carry) - carried
        moment = self.busiest(body, given, given, slices, stacked)
        if self._sizes.platform != "gpu" or loop.runs == 1:
            return moment
        carries = [n for n, p in zip(body.inputs, ports, strict=True) if p.is_carry]
        gathered, sums = self._gathered_before(moment, carries), _stacks_sums(moment, stacked)
        spare = int(moment.nbytes * SPARE_OF_TRIPS)
        moment = replace(moment, nbytes=moment.nbytes + spare + gathered)
        if sums:
            early = _made_early(moment.stored, carries)
            starts = flow.operands_of(loop.operands, PortKind.CARRY)
            waits = frozenset(o for o in starts if o is not None)
            most = max(early, moment.nbytes)
            late = _bytes_read_for_sums(moment.stored)
            self._trips[loop.results] = _FirstTrip(early, most, late, waits)
        return moment

    def _gathered_before(self, moment: Moment, carries: Collection[str]) -> int:
        """Bytes that XLA gathers for the next trip while a body runs."""
        block, kernels = moment.block, moment.stored.kernels
        is_light = [self._is_light(kernel.instruction(block)) for kernel in kernels]
        return sum(
            moment.stored.nbytes[name]
            for k in known_before(kernels, carries, is_light)
            if kernels[k].is_early and isinstance(kernels[k].instruction(block), Move)
            for name in kernels[k].makes
        )

    def _is_light(self, step: ListingStep | None) -> bool:
        if isinstance(step, LocalOp):
            return not is_product(self._sizes.op(step.equation))
        return not isinstance(step, Loop) and not (isinstance(step, Move) and step.collectives)


@dataclass(frozen=True)
class _FirstTrip:
    """A loop's first trip: the bytes that it makes before it reads what the loop `waits` for, the
    most that it holds, and what the gradients that are reduced at once are made from.
    """

    early_bytes: int
    most_bytes: int
    late_bytes: int
    waits: Pieces


def _scheduled(
    block: Block,
    stored: Stored,
    outside: Collection[str],
    timed: Timed | None,
    apart: Collection[str] = (),
) -> Moment:
    """The busiest moment in the order that XLA would choose.

    1. Of two orders it takes that which holds less.
    2. On GPUs its latency-hiding scheduler then moves collectives, and weight gradients to run
       beside them. Else gathers start early.
    """
    deep, light = depth_first(stored, block.outputs), least_first(stored)
    is_deep = most_bytes(deep, outside) <= most_bytes(light, outside)
    order = deep if is_deep else light
    order = ahead(order) if timed is None else lightened(beside_moves(order, timed))
    return busiest(block, order, outside, apart)


def _bytes_read_for_sums(stored: Stored) -> int:
    """Bytes of the stored pieces that the makers of what reductions add up have read."""
    makers = {name: kernel for kernel in stored.kernels for name in kernel.makes}
    reduced = (k for k in stored.kernels if k.group is not None and k.group[0] in REDUCTIONS)
    summed = [makers[name] for k in reduced for name in k.reads if name in makers]
    read = _NONE.union(*(kernel.reads for kernel in summed)) & makers.keys()
    return sum(stored.nbytes[name] for name in read)


def _stacks_sums(moment: Moment, stacked: Pieces) -> bool:
    """True if a loop adds up over devices what it stacks."""
    summed = {
        m.result
        for m in moment.block.instructions
        if isinstance(m, Move) and m.collectives and m.collectives[-1].kind in REDUCTIONS
    }
    ends = (k for k in moment.stored.kernels if not stacked.isdisjoint(k.makes))
    return any(not summed.isdisjoint((*k.makes, *k.reads)) for k in ends)


def _made_early(stored: Stored, carried: Collection[str]) -> int:
    """Bytes that a first trip makes before it needs what the loop carries, and reads with it.

    XLA's scheduler begins a trip early to hide what it gathers, so that all that comes of that is
    there, and a part of what else is free of the carry: more of it where a trip gathers nothing, as
    then no collective is ahead of it.
    """
    bound, gathered = set(carried), set[str]()
    free: dict[str, int] = {}
    made = of_gathers = 0
    for kernel in stored.kernels:
        if not bound.isdisjoint(kernel.reads):
            bound.update(kernel.makes)
            for name in free.keys() & kernel.reads:
                nbytes = free.pop(name)
                made += nbytes
                of_gathers += nbytes if name in gathered else 0
            continue
        free.update((name, stored.nbytes[name]) for name in kernel.makes)
        if kernel.is_early or not gathered.isdisjoint(kernel.reads):
            gathered.update(kernel.makes)
    share = _EARLY_SHARE if of_gathers else _EARLY_SHARE_ALONE
    return of_gathers + int(share * (made - of_gathers))
