"""Seconds of a listing: of each kernel, and of all of them where collectives run beside work.

A device has two streams, work and wires, each of which runs one kernel at a time: collectives run
beside the work that does not wait for them. Kernels run in the order in which XLA's latency-hiding
scheduler leaves them, which memory is counted in, too.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, combinations, groupby
from typing import TypeAlias

from autopar.cluster.catalog import entry_named
from autopar.cost.few_blocks import BlockCounts, FewBlocks
from autopar.cost.kernels import (
    ADDING,
    COPY,
    FILL,
    FROM_CACHE,
    FROM_NEAR_CACHE,
    NEAR_CACHE_BYTES,
    Kernel,
    Stored,
    moves_by_piece,
    stored_kernels,
)
from autopar.cost.line import read_line
from autopar.cost.merged_products import pays_to_merge
from autopar.cost.ops import LONGEST_ROW, is_fused_into_readers, is_product, is_reduction
from autopar.cost.order import (
    RowWork,
    begun_by_makers,
    combined,
    depth_first,
    moved_along_rows,
    needed,
)
from autopar.cost.picked import picked_bytes
from autopar.cost.prices import Prices
from autopar.cost.siblings import Iteration, at_hand, by_item
from autopar.cost.sizes import Sizes, product_dims
from autopar.cost.sums import AddedSums, added_sums
from autopar.cost.trips import (
    PieceTime,
    collective_kind,
    crossing_kinds,
    light_kernels,
    repeats_work,
)
from autopar.cost.views import View, product_views
from autopar.errors import GraphError
from autopar.ir.batching import Accumulator
from autopar.ir.compiler_options import MERGED_PRODUCTS, PIPELINED
from autopar.ir.control_flow import ControlFlow, PortKind
from autopar.ir.graph import Graph, Op
from autopar.ir.listing import (
    Block,
    Collective,
    Listing,
    ListingStep,
    LocalOp,
    Loop,
    Move,
    names_made,
    names_read,
)
from autopar.rules import HEAVY


@dataclass(frozen=True)
class Seconds:
    """Seconds of one run of a listing: work on the device, and collectives.

    `exposed` is the part of the collectives that no work hides, `arithmetic` the part of the work
    that the arithmetic units bound; memory bandwidth bounds the rest. `across` is the part of the
    collectives that the work of another trip of their loop hides.
    """

    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    arithmetic: float = 0.0
    across: float = 0.0

    @property
    def total(self) -> float:
        """From the start to the end."""
        return self.compute + self.exposed

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.compute + other.compute,
            self.communication + other.communication,
            self.exposed + other.exposed,
            self.arithmetic + other.arithmetic,
            self.across + other.across,
        )

    def times(self, runs: int) -> Seconds:
        """The same several times over, one after the other."""
        return Seconds(
            self.compute * runs, self.communication * runs, self.exposed * runs,
            self.arithmetic * runs, self.across * runs,
        )  # fmt: skip


_SUM_BYTES = 4  # of an item of what sums over rows make, which is f32


class KernelTimes:
    """Times the kernels of a block that are no loops."""

    def __init__(
        self,
        sizes: Sizes,
        prices: Prices,
        block: Block,
        stored: Stored,
        sums: AddedSums = AddedSums(),
    ) -> None:
        self._sizes, self._prices, self._block, self._stored = sizes, prices, block, stored
        self._sums = sums
        self._moves = moves_by_piece(block)
        kernels = stored.kernels
        self._copies = {name for k in kernels if k.at == COPY for name in k.makes}
        self._at_hand: Mapping[tuple[str, ...], frozenset[str]] = {}
        self._by_triton: Mapping[tuple[str, ...], frozenset[str]] = {}
        self._row_sums: Set[str] = frozenset()
        self._few_blocks: Mapping[tuple[str, ...], FewBlocks] = {}
        self._picked: Mapping[tuple[str, ...], Mapping[str, int]] = {}
        if sizes.platform == "gpu":
            work = [row_work(block, sizes, k) for k in kernels]
            along = moved_along_rows(kernels, work, stored.kept)
            self._row_sums = {
                n for k, w in zip(kernels, work, strict=True) if w and w.sums for n in k.makes
            }
            self._by_triton = {kernels[k].makes: found for k, found in along.items()}
            self._picked = picked_bytes(block, sizes, stored)
            counts = BlockCounts(block, sizes, stored, prices.filling_blocks)
            iterations = [self._by_item(k, counts) for k in kernels]
            shared = at_hand(kernels, iterations, stored.nbytes)
            self._few_blocks = counts.found(shared, self._by_triton)
            self._at_hand = {kernels[k].makes: found for k, (_, found) in shared.items()}

    def _by_item(self, kernel: Kernel, counts: BlockCounts) -> Iteration | None:
        """The iteration of element-wise work; None by Triton, and for what is with a scatter."""
        step = kernel.instruction(self._block)
        if not isinstance(step, LocalOp) or kernel.makes in self._by_triton:
            return None
        op = self._sizes.op(step.equation)
        if not is_fused_into_readers(op) or counts.scatter(kernel) is not None:
            return None
        return by_item(self._sizes.made(step, op))

    def seconds(self, kernel: Kernel) -> Seconds:
        """Seconds of one run of a kernel, with its collectives wholly exposed."""
        if kernel.at == ADDING:
            (name,) = kernel.reads
            added, turned = self._sums.nbytes[name], kernel.scratch_bytes
            taken = self._prices.elementwise(self._stored.nbytes[name] + 2 * added)
            return Seconds(taken + (self._prices.elementwise(2 * turned) if turned else 0.0))
        if kernel.at < 0:  # a copy
            copied = sum(self._stored.nbytes.get(name, 0) for name in kernel.makes)
            loaded = 0 if kernel.at == FILL else copied
            return Seconds(self._prices.elementwise(loaded + copied + kernel.wasted_bytes))
        if not self._sums.views.isdisjoint(kernel.makes):
            return Seconds()
        return self._own(kernel)

    def _own(self, kernel: Kernel) -> Seconds:
        step = self._block.instructions[kernel.at]
        if isinstance(step, Move):
            return self._moving(kernel)
        if isinstance(step, LocalOp):
            return self._run(step, kernel)
        return Seconds()

    def _moved(self, kernel: Kernel) -> int:
        """Bytes that a kernel loads and stores; of sums that it adds to itself, both."""
        added, nbytes = self._sums.nbytes, self._stored.nbytes
        moved = self._moved_once(kernel)
        if self._sums.adds(kernel):
            moved += sum(2 * added[n] - nbytes.get(n, 0) for n in kernel.makes if n in added)
        return moved

    def _moved_once(self, kernel: Kernel) -> int:
        nbytes, shared = self._stored.nbytes, self._at_hand.get(kernel.makes, frozenset())
        moved = self._by_triton.get(kernel.makes)
        if moved is None:
            moved = kernel.reads - shared | frozenset(kernel.makes)
        picked = self._picked.get(kernel.makes, {})
        return sum(picked.get(name, nbytes.get(name, 0)) for name in moved)

    def _moving(self, kernel: Kernel) -> Seconds:
        """A move's collectives; of several that run as one, one collective of all their bytes.

        One without, which takes a slice, may make a copy of that in another order too.
        """
        parts = (self._moves[name] for name in kernel.makes if name in self._moves)
        moved = [move.collectives[j] for move, j in parts if move.collectives]
        if not moved:
            made = sum(self._stored.nbytes.get(name, 0) for name in kernel.makes)
            return Seconds(self._prices.elementwise(2 * made))
        first, nbytes = moved[0], sum(c.nbytes for c in moved)
        seconds = self._prices.collective(first.kind, nbytes, first.axes)
        if len(kernel.makes) == 1 and self._copies.isdisjoint(kernel.reads):  # with what it copies
            seconds += first.seconds - self._prices.joined(first.kind, nbytes, first.axes)
        return Seconds(0.0, seconds, seconds)

    def _run(self, run: LocalOp, kernel: Kernel) -> Seconds:
        op, nbytes = self._sizes.op(run.equation), self._moved(kernel)
        if op.kind == "sharding_constraint" and [*kernel.reads] == [run.operands[0]]:
            return Seconds()  # to a compiler a name for the same buffer
        if op.kind not in HEAVY or is_reduction(op):
            # XLA's model has element-wise work beside the loads and stores of its kernel, but knows
            # of Triton's kernels no more than their bytes.
            work = 0.0
            if kernel.makes not in self._by_triton:
                work, nbytes = kernel.work_bytes, nbytes + self._reread(run, op, kernel)
            taken = self._prices.elementwise(max(nbytes, work))
            if kernel.makes in self._at_hand:  # it runs with another
                taken = max(0.0, taken - self._prices.cluster.chip.launch_seconds)
            few = self._few_blocks.get(kernel.makes)
            if few is not None and few.loaded:
                taken = max(taken, self._prices.in_blocks(few.loaded, few.count, few.stored))
            elif few is not None:
                taken = 0.0
            arithmetic = taken if work > nbytes else 0.0
            if run.parts:  # their sum
                summed = math.prod(run.parts) + 1
                made = sum(self._stored.nbytes.get(name, 0) for name in kernel.makes)
                taken += self._prices.elementwise(summed * made)
            return Seconds(taken, arithmetic=arithmetic)
        dims = product_dims(op, run, self._sizes) if self._sizes.platform == "gpu" else None
        if dims is not None:
            taken, fewest = (self._prices.product(op, n, dims) for n in (nbytes, 0))
        else:
            share = run.share(self._prices.mesh)
            taken, fewest = (self._prices.kernel(op, n, share) for n in (nbytes, 0))
        return Seconds(taken, arithmetic=taken if taken <= fewest else 0.0)

    def _reread(self, run: LocalOp, op: Op, kernel: Kernel) -> int:
        """Bytes that could be loaded while sums over rows are read once more for each item.

        XLA's model for GPUs has them come from the cache, of each item by itself.
        """
        sums = [self._stored.nbytes.get(r, 0) for r in kernel.reads & self._row_sums]
        if not sums or not kernel.is_light:
            return 0
        shape = self._sizes.shard(run, op) if is_reduction(op) else self._sizes.made(run, op)
        items = math.prod(shape)
        near = sum(n < self._prices.gpu.cores * NEAR_CACHE_BYTES for n in sums)
        again = near / FROM_NEAR_CACHE + (len(sums) - near) / FROM_CACHE
        return int(items * _SUM_BYTES * again)


def row_work(block: Block, sizes: Sizes, kernel: Kernel) -> RowWork | None:
    """The rows that a kernel goes over, if one tile holds a row.

    What is turned over, and lies as it did, has the rows that it had.
    """
    step = kernel.instruction(block)
    if not isinstance(step, LocalOp) or not kernel.is_light:
        return None
    op = sizes.op(step.equation)
    if is_reduction(op):
        return _row_sum(sizes, step, op)
    shape = sizes.made(step, op)
    if op.kind == "transpose":
        innermost = read_line(block, sizes).orders.innermost(step.results[0], shape)
        given = sizes.shard(step, op)
        if innermost is not None and op.ints("permutation")[innermost] == len(given) - 1:
            shape = given
    return RowWork(shape, sums=False) if shape and shape[-1] <= LONGEST_ROW else None


def _row_sum(sizes: Sizes, step: LocalOp, op: Op) -> RowWork | None:
    """A reduction over the last dim alone."""
    if op.rule is None or not op.rule.operands or not op.rule.operands[0]:
        return None
    *outer, last = op.rule.operands[0]
    left = {f for dim in op.rule.results[0] for f in dim}
    shape = sizes.shard(step, op)
    if not left.isdisjoint(last) or any(not left.issuperset(dim) for dim in outer):
        return None
    return RowWork(shape, sums=True) if shape[-1] <= LONGEST_ROW else None


def entering(flow: ControlFlow, loop: Loop, b: int, nbytes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of what a body is given; of what a scan goes through, one trip's slice."""
    body = loop.bodies[b]
    if flow.kind != "scan":
        return dict.fromkeys(body.inputs, 0)
    outer = [0 if o is None else nbytes.get(o, 0) for o in loop.operands]
    trips = max(1, flow.trips)
    sizes = [n // trips if p.by_row else n for n, p in zip(outer, flow.operands, strict=True)]
    return dict(zip(body.inputs, sizes, strict=True))


# -- collectives beside work -----------------------------------------------------------------------


# Of what may run beside another trip of its loop this stays exposed, from the steady trips of three
# scanned models of 4 layers: 0.02 to 0.16 of it, and all of it in one trip that the wires fill.
_UNHIDDEN_ACROSS = 0.1
_ROUNDING = 1e-9  # of the seconds, by which sums in another order may differ
# XLA knows what kernels take on GPUs from Hopper on. Of others its scheduler guesses: so much for a
# collective, for a product and for element-wise work, and for any other kernel.
_TIMED_FROM, _GUESSES = 9, (5000.0, 1000.0, 1.0)
_CONVOLUTION_SECONDS = 10e-6  # whatever it is: XLA's model has none of cuDNN's times
_MOMENT_SECONDS = 1e-6  # that it takes a view for, or what lies between two kernels


def timed_listing(
    graph: Graph,
    program: Listing,
    prices: Prices,
    sizes: Sizes | None = None,
    sums: Sequence[Accumulator] | None = None,
) -> Timed:
    """Times one run of a listing of `graph`, kernel by kernel.

    Element-wise work is fused as `stored_kernels` has it, and pays for what it loads and stores;
    equal collectives run as one, as `combined` has it; loops wait for what is before them.
    `sizes` are those of the graph on the mesh, where another reads the listing too. What the
    compiler is asked to pipeline is chosen, and if it merges products, unless the listing is a
    part's, beside others': it comes with the `sums` that it adds to.
    """
    sizes = sizes or Sizes(graph, prices.mesh, prices.platform)
    best = _best_pipelined(graph, program, prices, sizes, sums)
    if sums is not None or prices.platform != "gpu":
        return best
    asked = dict(prices.options).get(MERGED_PRODUCTS)
    if asked is None:
        asked = pays_to_merge(program.block, prices, sizes, best.seconds.total)
    return replace(best, merges=bool(asked))


def _best_pipelined(
    graph: Graph, program: Listing, prices: Prices, sizes: Sizes, sums: Sequence[Accumulator] | None
) -> Timed:
    """The run with those kinds of collectives pipelined of which most seconds are hidden."""
    given = sizes.inputs(program)
    pipelined, asked = prices.pipelined, dict(prices.options)
    timer = _Timer(sizes, prices, pipelined, added_sums(graph, program, sizes, sums or ()))
    best = timer.block(program.block, given)
    if sums is not None:
        return best
    if timer.repeats_work and PIPELINED["all-gather"] not in asked:
        pipelined -= {"all-gather"}
        timer = _Timer(sizes, prices, pipelined)
        best = timer.block(program.block, given)
    if not timer.is_short:
        return best
    # A loop of few trips pipelines only some kinds: it had better be those that take longest. What
    # takes little is mostly hidden beside the work of its own trip.
    free = [k for k in sorted(pipelined) if PIPELINED[k] not in asked]
    for left_out in (set(c) for n in range(1, len(free) + 1) for c in combinations(free, n)):
        other = _Timer(sizes, prices, pipelined - left_out).block(program.block, given)
        if other.crossing_seconds > best.crossing_seconds * (1 + _ROUNDING):
            best = other
    return best


@dataclass(frozen=True)
class Trips:
    """A loop's body in time, and how many of the loop's trips go so."""

    timed: Timed
    runs: int


@dataclass(frozen=True)
class Timed:
    """A block in time: its kernels on two streams, and by kernel the bodies of its loops.

    `pipelined` are the kinds of collectives that XLA is asked to run beside another trip; the
    compiler `merges` products of one value, or is asked not to.
    """

    block: Block
    kernels: tuple[Kernel, ...]
    streams: Streams
    bodies: Mapping[int, tuple[Trips, ...]]
    known: Known
    fills: Mapping[int, Seconds] = field(default_factory=dict[int, Seconds])  # of loops' stacks
    pipelined: frozenset[str] = frozenset()
    merges: bool = False

    @property
    def seconds(self) -> Seconds:
        """Seconds of all of it."""
        return self.streams.seconds

    def blocks(self) -> Iterator[Timed]:
        """This block and the bodies of its loops, inner ones too."""
        yield self
        for trips in self.bodies.values():
            for trip in trips:
                yield from trip.timed.blocks()

    @property
    def crossing_seconds(self) -> float:
        """Seconds of all collectives that run beside another trip of their loop."""
        crossing = sorted(self.streams.crossing)
        own = sum(self.streams.spent[k].communication for k in crossing)
        trips = (t for body in self.bodies.values() for t in body)
        return own + sum(t.runs * t.timed.crossing_seconds for t in trips)

    def spent(self) -> Iterator[tuple[Block, Kernel, Seconds]]:
        """Each kernel that is no loop, in bodies too, with its block and what all its runs take.

        A loop comes with the filling of its stacks. The seconds of all add up to the block's,
        `exposed` ones too.
        """
        alone = self.streams.alone
        for k, (kernel, own) in enumerate(zip(self.kernels, self.streams.spent, strict=True)):
            if k not in self.bodies:
                waiting, across = alone[k], self.streams.across(k, alone[k])
                if across:
                    waiting, own = own.communication - across, replace(own, across=across)
                yield self.block, kernel, replace(own, exposed=waiting)
                continue
            if k in self.fills:
                yield self.block, kernel, self.fills[k]
            for _, same in groupby(self.bodies[k], lambda trips: id(trips.timed.block)):
                trips = list(same)
                for rows in zip(*(t.timed.spent() for t in trips), strict=True):
                    block, inner, _ = rows[0]
                    pairs = zip(rows, trips, strict=True)
                    taken = sum((once.times(t.runs) for (_, _, once), t in pairs), Seconds())
                    yield block, inner, taken


def sent(timed: Timed) -> Iterator[tuple[Move, int, Seconds]]:
    """The collectives, each as its move and its number in it, with the seconds of all its runs.

    Neighbors that run as one share that by their bytes; all add up to the listing's seconds.
    """
    known: dict[int, Mapping[str, tuple[Move, int]]] = {}
    for block, kernel, spent in timed.spent():
        if not spent.communication:
            continue
        if id(block) not in known:
            known[id(block)] = moves_by_piece(block)
        parts = [known[id(block)][name] for name in kernel.makes]
        whole = sum(move.collectives[j].nbytes for move, j in parts)
        for move, j in parts:
            share = move.collectives[j].nbytes / whole
            yield move, j, Seconds(0.0, spent.communication * share, spent.exposed * share)


def moved_seconds(timed: Timed) -> dict[tuple[str, tuple[str, ...]], float]:
    """Seconds of the collectives of each kind over the same axes."""
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for move, j, seconds in sent(timed):
        made = move.collectives[j]
        key = made.kind, made.axes
        found[key] = found.get(key, 0.0) + seconds.communication
    return found


class _Timer:
    """Times blocks, loops by their bodies, with such kinds of collectives pipelined.

    It `is_short` once it has met a loop that has too few trips for all that could cross them, and
    `repeats_work` once one in which XLA would run products twice to gather a trip ahead.
    """

    def __init__(
        self,
        sizes: Sizes,
        prices: Prices,
        pipelined: frozenset[str],
        sums: AddedSums = AddedSums(),
    ) -> None:
        self._sizes, self._prices, self._pipelined = sizes, prices, pipelined
        self._sums = sums
        self.is_short = self.repeats_work = False
        entry = entry_named(prices.cluster.chip.name)
        gpu = entry.target if entry is not None else None
        self._guesses = gpu is not None and gpu.major < _TIMED_FROM

    def block(self, block: Block, given: Mapping[str, int]) -> Timed:
        """The whole of a block on two streams."""
        stored = stored_kernels(block, self._sizes, given, _nothing_inside)
        if self._sums.nbytes:
            stored = self._sums.with_adding(stored, block, self._sizes)
        stored = depth_first(combined(stored), block.outputs)
        times = KernelTimes(self._sizes, self._prices, block, stored, self._sums)
        spent: list[Seconds] = []
        bodies: dict[int, tuple[Trips, ...]] = {}
        fills: dict[int, Seconds] = {}
        for k, kernel in enumerate(stored.kernels):
            step = kernel.instruction(block)
            if isinstance(step, Loop):
                bodies[k] = tuple(self._bodies(step, stored.nbytes))
                if stacking := self._stacking(step, stored.nbytes):
                    fills[k] = Seconds(stacking)
                taken = (trips.timed.seconds.times(trips.runs) for trips in bodies[k])
                spent.append(sum(taken, fills.get(k, Seconds())))
            else:
                spent.append(times.seconds(kernel))
        kernels, kinds = stored.kernels, self._prices.beside
        beside = [collective_kind(block, k) in kinds for k in kernels]
        products = frozenset(k for k, kern in enumerate(kernels) if self._is_product(block, kern))
        takes = [
            self._scheduled_as(block, kernel, s, on_wires)
            for kernel, s, on_wires in zip(kernels, spent, beside, strict=True)
        ]
        found = product_views(block, self._sizes)
        views = {k: found.get(kernels[k].makes[0], {}) for k in products}
        convolutions = frozenset(k for k in products if self._is_convolution(block, kernels[k]))
        moved = {
            name: self._moved_as(move.collectives[j])
            for name, (move, j) in moves_by_piece(block).items()
            if move.collectives
        }
        known = Known(takes, products, convolutions, self._guesses, views, moved)
        streams = in_two_streams(kernels, spent, beside, known)
        return Timed(block, kernels, streams, bodies, known, fills, self._pipelined)

    def _stacking(self, loop: Loop, nbytes: Mapping[str, int]) -> float:
        """Seconds that a scan's stacks take beside the work of its trips.

        Element-wise work that nothing else reads is computed where it is stacked; all else is made,
        and then copied there. Each stack counts once more, as if zeros were written first, though
        most begin as memory that is found: without that, forms of a step that keep much come out
        ahead which take 5 to 12 % longer by XLA's timeline (two towers, a Mamba).
        """
        flow = self._sizes.op(loop.equation).control_flow
        if self._sizes.platform != "gpu" or flow is None or flow.kind != "scan":
            return 0.0
        filled = sum(nbytes.get(r, 0) for r in flow.results_of(loop.results, PortKind.STACKED))
        copied = [nbytes.get(loop.results[r], 0) for r in self._copied(loop, flow)]
        copies = (self._prices.elementwise(2 * n / max(1, loop.runs)) for n in copied)
        return self._prices.elementwise(filled) + loop.runs * sum(copies)

    def _copied(self, loop: Loop, flow: ControlFlow) -> Iterator[int]:
        """The results of a scan whose rows are copied into their stacks."""
        body = loop.bodies[0]
        left = list(zip(body.outputs, flow.outputs[0], strict=True))
        reads = {o for o, port in left if port.is_carry}
        makers = dict[str, ListingStep]()
        for step in body.instructions:
            reads.update(names_read(step))
            makers.update(dict.fromkeys(names_made(step), step))
        for o, port in left:
            if o is None or port.kind is not PortKind.STACKED or port.result is None:
                continue
            maker = makers.get(o)
            is_light = isinstance(maker, LocalOp) and is_fused_into_readers(
                self._sizes.op(maker.equation)
            )
            if o in reads or not is_light:
                yield port.result

    def _scheduled_as(self, block: Block, kernel: Kernel, spent: Seconds, on_wires: bool) -> float:
        """The time that XLA's scheduler takes a kernel for, in seconds or as it guesses."""
        collective, product, other = _GUESSES
        if on_wires:
            return collective if self._guesses else spent.communication
        if self._guesses:
            is_long = self._is_product(block, kernel) or self._is_loop_fusion(block, kernel)
            return product if is_long else other
        return _CONVOLUTION_SECONDS if self._is_convolution(block, kernel) else spent.total

    def _moved_as(self, collective: Collective) -> tuple[float, float]:
        """The time of a collective by itself, and beside others with which it runs as one."""
        if self._guesses:
            return _GUESSES[0], 0.0
        what = collective.kind, collective.nbytes, collective.axes
        return self._prices.collective(*what), self._prices.joined(*what)

    def _is_product(self, block: Block, kernel: Kernel) -> bool:
        step = kernel.instruction(block)
        return isinstance(step, LocalOp) and is_product(self._sizes.op(step.equation))

    def _is_convolution(self, block: Block, kernel: Kernel) -> bool:
        step = kernel.instruction(block)
        if not isinstance(step, LocalOp):
            return False
        return self._sizes.op(step.equation).kind == "conv_general_dilated"

    def _is_loop_fusion(self, block: Block, kernel: Kernel) -> bool:
        """True for what XLA calls a loop fusion: element-wise work that turns nothing over."""
        if kernel.at == ADDING:
            return not kernel.scratch_bytes
        step = kernel.instruction(block)
        return isinstance(step, LocalOp) and is_fused_into_readers(self._sizes.op(step.equation))

    def _bodies(self, loop: Loop, nbytes: Mapping[str, int]) -> Iterator[Trips]:
        """The trips of a loop, of which XLA pipelines the collectives that may leave their trip.

            a trip by itself    gather w | h = f(h, w) | reduce dw
            a steady trip       h = f(h, w) beside gather w' and reduce dw"

        The first gathers are before the loop, the last reductions behind it: they are waited for as
        those of one trip by itself are.
        """
        flow = self._sizes.op(loop.equation).control_flow
        assert flow is not None
        for b, body in enumerate(loop.bodies):
            alone = self.block(body, entering(flow, loop, b, nbytes))
            found = frozenset[int]()
            if flow.kind == "scan" and loop.runs > 1:
                found = self._crossing(alone, flow, b, loop.runs)
            if not found:
                yield Trips(alone, loop.runs)
                continue
            own = alone.streams
            streams = in_two_streams(alone.kernels, own.spent, own.beside, alone.known, found)
            if streams.seconds.exposed >= own.seconds.exposed:
                yield Trips(alone, loop.runs)
                continue
            yield Trips(alone, 1)
            yield Trips(replace(alone, streams=streams), loop.runs - 1)

    def _crossing(self, body: Timed, flow: ControlFlow, b: int, runs: int) -> frozenset[int]:
        """The collectives of a scan's body that XLA runs beside another trip."""
        block, kernels = body.block, body.kernels
        is_light = light_kernels(block, kernels, self._sizes)
        if "all-gather" in self._pipelined:
            self.repeats_work |= repeats_work(block, kernels, flow, b, is_light)
        found, is_short = crossing_kinds(block, kernels, flow, b, is_light, runs, self._pipelined)
        self.is_short |= is_short
        return frozenset(found)


@dataclass(frozen=True)
class Known:
    """The times of kernels that XLA's scheduler knows, and which of them are `products`.

    It takes each for so long, in seconds, or in a unit of its own where they are `guessed`. Of each
    product, `views` are those that it has of pieces; `convolutions` read pieces as they are. What a
    collective makes is `moved` in a time by itself, and in another beside what it runs as one with.
    """

    takes: Sequence[float]
    products: frozenset[int] = frozenset()
    convolutions: frozenset[int] = frozenset()
    guessed: bool = False
    views: Mapping[int, Mapping[str, View]] = field(default_factory=dict[int, Mapping[str, View]])
    moved: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])


@dataclass(frozen=True)
class Streams:
    """Kernels in time: what each takes by itself, whether it runs `beside` work on the wires.

    Kernel k starts `starts[k]` seconds after the first. Those `crossing` belong to another trip of
    a loop: nothing here waits for them, nor they for anything.
    """

    spent: Sequence[Seconds]
    beside: Sequence[bool]
    starts: Sequence[float]
    crossing: frozenset[int] = frozenset()

    @cached_property
    def seconds(self) -> Seconds:
        """Seconds of all together; raises GraphError if that cannot be."""
        total = sum(self.spent, Seconds())
        if any(self.beside):
            waiting = max(end for _, end in self.spans) - total.compute
            for k, alone in enumerate(self.alone if self.crossing else ()):
                across = self.across(k, alone)
                total = replace(total, across=total.across + across)
                if k in self.crossing:
                    waiting += self.spent[k].communication - alone - across
            total = replace(total, exposed=waiting)
        slack = _ROUNDING * total.total
        if not -slack <= total.exposed <= total.communication + slack:
            raise GraphError(
                f"of {total.communication} s of collectives {total.exposed} s are waited for"
            )
        return replace(total, exposed=min(max(total.exposed, 0.0), total.communication))

    def across(self, k: int, alone: float) -> float:
        """Seconds of kernel k that another trip's work hides; for `alone` seconds none does."""
        hidden = self.spent[k].communication - alone if k in self.crossing else 0.0
        return (1 - _UNHIDDEN_ACROSS) * hidden

    @cached_property
    def spans(self) -> list[tuple[float, float]]:
        """The start and end of each kernel, in seconds from the first."""
        return [
            (start, start + (s.communication if beside else s.total))
            for s, beside, start in zip(self.spent, self.beside, self.starts, strict=True)
        ]

    @property
    def alone(self) -> list[float]:
        """The seconds of each kernel's collectives that run while no work does."""
        spans = self.spans
        rows = zip(spans, self.beside, strict=True)
        work = sorted(s for s, beside in rows if not beside and s[0] < s[1])
        found = [s.exposed for s in self.spent]
        first = 0
        for start, k in sorted((spans[k][0], k) for k, beside in enumerate(self.beside) if beside):
            end = spans[k][1]
            while first < len(work) and work[first][1] <= start:
                first += 1
            covered, w = 0.0, first
            while w < len(work) and work[w][0] < end:
                covered += min(end, work[w][1]) - max(start, work[w][0])
                w += 1
            found[k] = max(0.0, end - start - covered)
        return found


def in_two_streams(
    kernels: Sequence[Kernel],
    spent: Sequence[Seconds],
    beside: Sequence[bool],
    known: Known,
    crossing: frozenset[int] = frozenset(),
) -> Streams:
    """Kernels in time, those that may run `beside` work on a stream of their own.

    They run in the order that the scheduler leaves: a kernel waits for its turn and for what it
    reads, and work for the collectives that end before it. Those `crossing` wait for nothing, and
    nothing waits for them.
    """
    if not any(beside):
        return Streams(spent, beside, [0.0, *accumulate(s.total for s in spent)][: len(spent)])
    needs = [
        [] if k in crossing else [n for n in need if n not in crossing]
        for k, need in enumerate(needed(kernels))
    ]
    starts, ends = [0.0] * len(kernels), [0.0] * len(kernels)
    turn = work = wires = 0.0  # how far the order has come, and when each stream is free
    for k, is_end in _latency_hiding_order(kernels, needs, beside, known):
        if is_end:
            turn = turn if k in crossing else max(turn, ends[k])
            work = max(work, turn)
            continue
        starts[k] = max([turn, wires if beside[k] else work, *(ends[n] for n in needs[k])])
        if beside[k]:
            wires = ends[k] = starts[k] + spent[k].communication
        else:
            turn = work = ends[k] = starts[k] + spent[k].total
    return Streams(spent, beside, starts, crossing)


def beside_moves(
    stored: Stored, timed: Timed, elsewhere: Mapping[str, PieceTime] | None = None
) -> Stored:
    """Kernels of a block in the order in which XLA's latency-hiding scheduler leaves them.

    It leaves a block without collectives as it is.

    `elsewhere` are the times of pieces that are made outside of the loop that they come from.
    """
    kernels = stored.kernels
    times = {**piece_times(timed, stored.nbytes), **(elsewhere or {})}
    at = {_identity(k): n for n, k in enumerate(timed.kernels)}
    views: dict[int, Mapping[str, View]] = {}
    takes, beside = list[float](), list[bool]()
    products, convolutions = set[int](), set[int]()
    for k, kernel in enumerate(kernels):
        n = at.get(_identity(kernel))
        if n is not None and kernel.group is not None and kernel.makes != timed.kernels[n].makes:
            n = None  # others run as one where work that was joined waits for more
        if n is None and kernel.at == COPY:  # of several that run as one
            takes.append(sum(timed.known.takes[at[m,]] for m in kernel.makes if (m,) in at))
            beside.append(False)
            continue
        own = [times[m] for m in kernel.makes if m in times] if n is None else []
        takes.append(_in_all(own) if n is None else timed.known.takes[n])
        beside.append(any(t.is_beside for t in own) if n is None else timed.streams.beside[n])
        if n in timed.known.products or any(t.is_product for t in own):
            products.add(k)
        if n in timed.known.convolutions:
            convolutions.add(k)
        if n is not None and n in timed.known.views:
            views[k] = timed.known.views[n]
    if not any(beside):
        return stored
    known = replace(
        timed.known, takes=takes, products=frozenset(products),
        convolutions=frozenset(convolutions), views=views,
    )  # fmt: skip
    order = _latency_hiding_order(begun_by_makers(stored), needed(kernels), beside, known)
    left = tuple(kernels[k] for k, is_end in order if not is_end)
    return replace(stored, kernels=left, sent=_sent(kernels, order))


def _sent(kernels: Sequence[Kernel], order: Iterable[tuple[int, bool]]) -> Mapping[str, str]:
    """By piece that a collective sends, what the last kernel makes that runs before its end.

    An all-reduce holds nothing that it is given: its result takes that buffer.
    """
    found, last = dict[str, str](), ""
    for k, is_end in order:
        group = kernels[k].group
        if not is_end:
            last = kernels[k].makes[0]
        elif group is None or group[0] != "all-reduce":
            found.update(dict.fromkeys(kernels[k].reads, last))
    return found


def piece_times(timed: Timed, nbytes: Mapping[str, int]) -> dict[str, PieceTime]:
    """By piece, its share of the time of the kernel that makes it, by its bytes.

    Of what collectives make, the time of one that makes nothing else.
    """
    found: dict[str, PieceTime] = {}
    for k, kernel in enumerate(timed.kernels):
        whole = sum(nbytes.get(name, 0) for name in kernel.makes)
        for name in kernel.makes:
            share = nbytes.get(name, 0) / whole if whole else 1 / len(kernel.makes)
            seconds = share * timed.known.takes[k]
            alone, joined = timed.known.moved.get(name, (seconds, seconds))
            is_beside = timed.streams.beside[k]
            found[name] = PieceTime(alone, joined, k in timed.known.products, is_beside)
    return found


def _in_all(pieces: Sequence[PieceTime]) -> float:
    """The time of a kernel that makes several pieces."""
    starting = max((t.seconds - t.joined_seconds for t in pieces), default=0.0)
    return starting + sum(t.joined_seconds for t in pieces)


def _identity(kernel: Kernel) -> tuple[int, int] | tuple[str, ...]:
    """The instruction of a kernel, as of one that runs it again; of a copy, what it makes."""
    return (kernel.at, kernel.part) if kernel.at >= 0 else kernel.makes


def _latency_hiding_order(
    kernels: Sequence[Kernel],
    needs: Sequence[Sequence[int]],
    on_wires: Sequence[bool],
    known: Known,
) -> list[tuple[int, bool]]:
    """The order in which XLA's latency-hiding scheduler leaves kernels that need others.

    A collective is in it twice: where it starts, and, as True, where work waits for its end.

        as given    gather a | da | dw1 | gather b | db | dw2
        as left     gather a | da | gather b | dw1 | db | dw2        dw1 runs while b is gathered

    It goes from the last kernel to the first, and so meets the end of a collective before its
    start:

    1. The end of a collective goes as soon as no other is under way; of several, that which ends
       the longest way of collectives, itself among them.
    2. Work that is ready goes before what is not. What a matrix product has just let go of is ready
       in a moment, as a view lies between them, and so is what has several results, which come in
       a tuple: what has waited for longer goes first, such as weight gradients. The view itself
       goes at once, whatever else is ready, a moment after what it is for has begun.
    3. A start whose time has come goes first where another collective waits for it, and last where
       no collective is ahead of it. Else it is work like other work that is ready, but for rule 5.
    4. What has the longest collectives ahead of it goes first.
    5. What takes closest to the time until something else is ready goes first, be it in a moment.
    6. What lets the most others go goes first: it alone still reads the most pieces.
    7. The last in the given order goes first.

    Raises GraphError where kernels wait for each other.
    """
    takes, products = known.takes, known.products
    moment = 1.0 if known.guessed else _MOMENT_SECONDS
    ahead = [0.0] * len(kernels)  # seconds of collectives before each kernel, on the longest way
    for k in range(len(kernels)):
        ahead[k] = max((ahead[n] + takes[n] * on_wires[n] for n in needs[k]), default=0.0)
    readers, ready_at = [0] * len(kernels), [0.0] * len(kernels)
    for n in chain.from_iterable(needs):
        readers[n] += 1

    # Kernels that nobody before them waits for; of ends, heaps of (-ahead, -kernel).
    work = _Work(kernels, ahead, takes, known.views)
    soon: list[tuple[float, float, int]] = []  # work behind the time at which it is ready
    ends: list[tuple[float, int]] = []
    under_way: tuple[float, int] | None = None  # when its start is ready, and the collective
    coming: list[float] = []  # a heap of the times at which kernels are ready
    order: list[tuple[int, bool]] = []
    now = 0.0

    def place(k: int, began: float) -> None:
        nonlocal now
        order.append((k, False))
        work.placed(k)
        several = {n for n in needs[k] if len(kernels[n].makes) > 1}
        has_views = k in products and k not in known.convolutions
        viewed = several.union(n for n in needs[k] if has_views or n in products)
        if several or any(readers[n] == 1 for n in viewed):
            now = max(now, began + moment)
        for n in needs[k]:
            ready_at[n] = max(ready_at[n], (now if n in viewed else began) + moment)
            readers[n] -= 1
            if not readers[n]:
                release(n)

    def release(k: int) -> None:
        if on_wires[k]:
            heapq.heappush(ends, (-ahead[k] - takes[k], -k))
        else:
            heapq.heappush(soon, (ready_at[k], -ahead[k], -k))
            expect(ready_at[k])

    def expect(at: float) -> None:
        if at > now:
            heapq.heappush(coming, at)

    for k in [k for k, count in enumerate(readers) if not count]:
        release(k)
    while work or soon or ends or under_way is not None:
        if ends and under_way is None:
            k = -heapq.heappop(ends)[1]
            under_way = now + takes[k], k
            expect(under_way[0])
            order.append((k, True))
        while soon and soon[0][0] <= now:
            work.add(-heapq.heappop(soon)[2])
        while coming and coming[0] < now:
            heapq.heappop(coming)
        if under_way is not None:
            at, k = under_way
            if work:
                is_first = 0 < ahead[k] and work.goes_behind(k, bool(coming))
                starts = at <= now and (bool(ends) or is_first)
            else:
                starts = not soon or at <= soon[0][0]
            if starts:
                now, under_way = max(now, at), None
                place(k, now)
                continue
        began = now
        if work:
            k = work.take(coming[0] - now if coming else None)
        else:
            began, _, k = heapq.heappop(soon)
            k = -k
        now = began + takes[k]
        place(k, began)
    if left_out := len(kernels) - sum(not is_end for _, is_end in order):
        raise GraphError(f"{left_out} of {len(kernels)} kernels wait for each other")
    return order[::-1]


_Read: TypeAlias = tuple[str, View | None]


class _Work:
    """Kernels that are ready, by the seconds of collectives ahead of them and what they take.

    Those that alone still read the most pieces let the most others go.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        ahead: Sequence[float],
        takes: Sequence[float],
        views: Mapping[int, Mapping[str, View]],
    ) -> None:
        self._ahead, self._takes = ahead, takes
        self._depths: list[float] = []  # a heap, the deepest first
        self._by_time: dict[float, list[tuple[float, int]]] = {}
        self._by_place: dict[float, list[tuple[int, int]]] = {}  # heaps, what lets go of most first
        self._ready = set[int]()
        # What a kernel reads: a piece, or its own view of one, which others may have as well.
        self._reads: list[list[_Read]] = []
        for k, kernel in enumerate(kernels):
            own = views.get(k, {})
            self._reads.append([(name, own.get(name)) for name in kernel.reads])
        self._lets_go = [0] * len(takes)
        # How many that read it are still to be placed, and the sum of their numbers. A view reads
        # its piece, with a number of its own.
        self._unplaced: dict[_Read, tuple[int, int]] = {}
        self._views: dict[_Read, int] = {}
        for k, reads in enumerate(self._reads):
            for read in reads:
                self._count(read, k)
                if read[1] is not None and read not in self._views:
                    self._views[read] = len(takes) + len(self._views)
                    self._count((read[0], None), self._views[read])
        for count, k in self._unplaced.values():
            if count == 1 and k < len(takes):
                self._lets_go[k] += 1

    def __bool__(self) -> bool:
        return bool(self._ready)

    def add(self, k: int) -> None:
        """A kernel becomes ready."""
        depth = self._ahead[k]
        found = self._by_time.setdefault(depth, [])
        if not found:
            heapq.heappush(self._depths, -depth)
            self._by_place[depth] = []
        insort(found, (self._takes[k], k))
        self._ready.add(k)
        self._put(k)

    def placed(self, k: int) -> None:
        """Counts a kernel as placed: what is left of its pieces' readers may let go of them."""
        for read in self._reads[k]:
            is_last = self._read_by(k, read)
            if is_last and read in self._views:
                self._read_by(self._views[read], (read[0], None))

    def _count(self, read: _Read, k: int) -> None:
        count, total = self._unplaced.get(read, (0, 0))
        self._unplaced[read] = count + 1, total + k

    def _read_by(self, k: int, read: _Read) -> bool:
        """Count one that reads something as placed; True if it was the last."""
        count, total = self._unplaced[read]
        self._unplaced[read] = count - 1, total - k
        last = total - k
        if count == 2 and last < len(self._takes):
            self._lets_go[last] += 1
            if last in self._ready:
                self._put(last)
        return count == 1

    def goes_behind(self, k: int, is_timed: bool) -> bool:
        """True if a kernel goes before all that are ready, or before those that are less deep."""
        depth = self._deepest()
        if is_timed or self._ahead[k] != depth:
            return self._ahead[k] > depth
        return (self._lets_go[k], k) > self._last(depth)

    def take(self, seconds: float | None) -> int:
        """Of the deepest, the one that takes closest to so long; else what lets go of the most."""
        depth = self._deepest()
        found = self._by_time[depth]
        if seconds is None:
            k = self._last(depth)[1]
        else:
            at = bisect_right(found, (seconds, len(self._takes)))
            near = [t for t, _ in (*found[max(0, at - 1) : at], *found[at : at + 1])]
            closest = min(near, key=lambda t: abs(t - seconds))
            equal = found[
                bisect_left(found, (closest, 0)) : bisect_right(found, (closest, len(self._takes)))
            ]
            k = max(equal, key=lambda t: (self._lets_go[t[1]], t[1]))[1]
        found.pop(bisect_left(found, (self._takes[k], k)))
        self._ready.remove(k)
        return k

    def _put(self, k: int) -> None:
        heapq.heappush(self._by_place[self._ahead[k]], (-self._lets_go[k], -k))

    def _deepest(self) -> float:
        while not self._by_time[-self._depths[0]]:
            heapq.heappop(self._depths)
        return -self._depths[0]

    def _last(self, depth: float) -> tuple[int, int]:
        """The one that lets the most others go, and the last of such, of what is so deep."""
        places = self._by_place[depth]
        while (k := -places[0][1]) not in self._ready or self._lets_go[k] != -places[0][0]:
            heapq.heappop(places)
        return -places[0][0], k


def _nothing_inside(loop: Loop, op: Op, nbytes: Mapping[str, int]) -> int:
    del loop, op, nbytes
    return 0
