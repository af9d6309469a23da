"""A block's listing as the kernels that a compiler makes of it: what each loads and stores.

Element-wise work is left out of memory where computing it again in its readers moves fewer bytes
than storing it, so a kernel reads the stored pieces behind everything that is fused into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cluster.chip import Platform
from autopar.cost import fusion
from autopar.cost.reads import Line, read_line
from autopar.ir.graph import Graph, Op
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.spmd import Block, Fence, Instruction, LocalOp, Loop, Move, SpmdProgram
from autopar.ir.values import Value, item_bytes

Pieces = frozenset[str]
_NONE: Pieces = frozenset()
_BITS = 63
# The more kernels compute a piece, the less it pays: beyond so many, counting is not worth while.
_READERS = 6


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: pieces that it makes and reads, and scratch that lives as long as it runs.

    `at` is its instruction's index in the block, -1 for what is no instruction: a slice that a loop
    cuts out, a copy in another order. `group` are the kind, axes and dtype of a collective that
    may be combined with its like. A light one may be fused with others that read the same; an early
    one need not wait for its readers' turn: it gathers.
    """

    at: int
    makes: tuple[str, ...]
    reads: Pieces
    scratch_bytes: int = 0
    in_place: bool = False
    group: tuple[str, tuple[str, ...], str] | None = None
    moved_bytes: int = 0
    is_light: bool = False
    is_early: bool = False


@dataclass(frozen=True)
class Stored:
    """The kernels of a block in order, the bytes of every stored piece, and what lives on."""

    kernels: tuple[Kernel, ...]
    nbytes: Mapping[str, int]
    kept: Pieces  # pieces behind the block's outputs


class Sizes:
    """Looks up ops and weighs pieces on one mesh of devices of a platform.

    The kernels of blocks are kept, so that what weighs a listing and what times it read it once.
    """

    def __init__(self, graph: Graph, mesh: MeshShape, platform: Platform = "gpu") -> None:
        self._graph, self._mesh = graph, mesh
        self.platform: Platform = platform
        self._known: dict[tuple[tuple[int, ...], str, Sharding], int] = {}
        self._stored: list[tuple[Block, Mapping[str, int], Stored]] = []

    def stored(self, block: Block, given: Mapping[str, int], write: Callable[[], Stored]) -> Stored:
        """The kernels of a block without loops on such inputs, written where they are not known."""
        for known, lying, stored in self._stored:
            if known is block and lying == given:
                return stored
        stored = write()
        self._stored.append((block, dict(given), stored))
        return stored

    def of(self, value: Value, sharding: Sharding) -> int:
        """Bytes of one device's piece of a value."""
        key = (value.shape, value.dtype, sharding)
        found = self._known.get(key)
        if found is None:
            found = sharding.local_bytes(value, self._mesh)
            self._known[key] = found
        return found

    def inputs(self, program: SpmdProgram) -> dict[str, int]:
        """Bytes of one device's pieces of the step's arguments."""
        lying = zip(self._graph.inputs, program.input_shardings, strict=True)
        return {i.value.name: self.of(i.value, s) for i, s in lying}

    def op(self, path: tuple[int, ...]) -> Op:
        """The op that an instruction runs."""
        return self._graph.ops[path[0]] if len(path) == 1 else self._graph.op_at(path)

    def shard(self, run: LocalOp, op: Op) -> tuple[int, ...]:
        """The shape of the piece of an op's first operand."""
        rule = op.rule
        if rule is None or not rule.operands:
            return ()
        shape = [math.prod(rule.factors[f].size for f in dim) for dim in rule.operands[0]]
        return run.operand_shardings[0].shard_shape(shape, self._mesh)


InnerBytes = Callable[[Loop, Op, Mapping[str, int]], int]


def stored_kernels(
    block: Block,
    sizes: Sizes,
    given: Mapping[str, int],
    inner_bytes: InnerBytes,
    slices: Mapping[str, int] | None = None,
    stacked: Pieces = _NONE,
) -> Stored:
    """The kernels of a block.

    `given` are the bytes of the inputs that are held outside, `slices` those of inputs that a loop
    cuts out of them; `stacked` are outputs that a loop writes into place as they are made.
    `inner_bytes` says what the body of a loop holds at most.
    """
    looped = any(isinstance(step, Loop) for step in block.instructions)
    if not (looped or slices or stacked):
        return sizes.stored(block, given, lambda: _written(block, sizes, given, inner_bytes))
    return _written(block, sizes, given, inner_bytes, slices, stacked)


def _written(
    block: Block,
    sizes: Sizes,
    given: Mapping[str, int],
    inner_bytes: InnerBytes,
    slices: Mapping[str, int] | None = None,
    stacked: Pieces = _NONE,
) -> Stored:
    line = read_line(block, sizes.op, sizes.platform)
    alive, roots = _roots(line, len(block.instructions), block)
    writer = _Writer(line, sizes, given, inner_bytes, stacked)
    for name, nbytes in (slices or {}).items():
        writer.cut(name, nbytes)
    for i, step in enumerate(block.instructions):
        if alive[i]:
            writer.visit(i, step, roots[i])
    return writer.stored(block)


def _roots(line: Line, count: int, block: Block) -> tuple[list[bool], list[int]]:
    """For each instruction, whether anyone wants it, and into which kernels it may be fused.

    The latter are bits of a number, kernel j's being bit j of its lowest 64: far kernels may
    share one, which only makes a count smaller. It is 0 where the result is stored in any case.
    """
    wanted = {o for o in block.outputs if o is not None}
    alive = [False] * count
    roots = [0] * count
    loaded, readers = line.loaded, line.readers
    for i in range(count - 1, -1, -1):
        fusible = line.fused[i]
        found, used = 0, False
        for m in line.makes[i]:
            used = used or m in wanted
            fusible = fusible and m not in loaded
            for j in readers.get(m, ()):
                if alive[j]:
                    used = True
                    found |= roots[j] or 1 << (j & _BITS)
        alive[i] = used
        if fusible:
            roots[i] = found
    return alive, roots


class _Writer:
    """Goes through the instructions in order and writes a kernel for each that stores."""

    def __init__(
        self,
        line: Line,
        sizes: Sizes,
        given: Mapping[str, int],
        inner_bytes: InnerBytes,
        stacked: Pieces,
    ) -> None:
        self._line, self._sizes, self._inner_bytes = line, sizes, inner_bytes
        self._stacked = stacked
        self._nbytes: dict[str, int] = dict(given)
        self._behind: dict[str, Pieces] = {name: frozenset((name,)) for name in given}
        self._work: dict[str, float] = {}  # of a fused piece, in bytes
        # What lies behind element-wise work, and its bytes, though it may be stored as well.
        self._computed: dict[str, tuple[Pieces, int]] = {}
        self._kernels: list[Kernel] = []

    def stored(self, block: Block) -> Stored:
        """The pieces that were written."""
        kept = [self._behind.get(o, _NONE) for o in block.outputs if o is not None]
        return Stored(tuple(self._kernels), self._nbytes, _NONE.union(*kept))

    def cut(self, name: str, nbytes: int) -> None:
        """An input that a loop cuts out: element-wise readers do it themselves."""
        if name in self._line.loaded:
            self._nbytes[name] = nbytes
            self._behind[name] = frozenset((name,))
            self._kernels.append(Kernel(-1, (name,), _NONE))

    def visit(self, i: int, step: Instruction, roots: int) -> None:
        """Fuse an instruction into its readers, or write its kernel."""
        copies = i in self._line.copied
        sources = self._copied(i) if copies else self._sources(self._line.reads[i])
        if isinstance(step, Fence):
            self._fence(i, step, sources)
            return
        nbytes = self._result_bytes(i, step)
        if self._line.copied and self._line.fused[i]:
            self._computed[self._line.makes[i][0]] = sources, nbytes[0]
        readers = min(_READERS, roots.bit_count())
        if readers and self._fused(i, sources, sum(nbytes), readers):
            return
        makes = tuple(self._line.makes[i])
        for name, size in zip(makes, nbytes, strict=True):
            in_stack = name in self._stacked and self._line.fused[i]
            self._nbytes[name] = 0 if in_stack and not self._line.readers.get(name) else size
            self._behind[name] = frozenset((name,))
        self._kernels.append(self._kernel(i, step, makes, sources))

    def _copied(self, i: int) -> Pieces:
        """The pieces that a kernel reads, of which some are written out in another order before."""
        reads, copies = self._line.reads[i], self._line.copied[i]
        sources = self._sources([r for r in reads if r not in copies])
        for name, copy in copies.items():
            if copy not in self._nbytes:
                stored = self._behind.get(name, _NONE), self._nbytes.get(name, 0)
                behind, self._nbytes[copy] = self._computed.get(name, stored)
                self._kernels.append(Kernel(-1, (copy,), behind, is_light=True))
            sources |= {copy}
        return sources

    def _sources(self, reads: Sequence[str]) -> Pieces:
        """The stored pieces behind some others."""
        if len(reads) == 1:
            return self._behind.get(reads[0], _NONE)
        behind = [b for b in map(self._behind.get, reads) if b]
        return behind[0] if len(behind) == 1 else _NONE.union(*behind)

    def _fence(self, i: int, step: Fence, sources: Pieces) -> None:
        """Renames pieces; what reads one of them waits for all."""
        ticket = f"fence {i}"
        self._nbytes[ticket] = 0
        self._kernels.append(Kernel(i, (ticket,), sources))
        for name, source in zip(step.results, step.sources, strict=True):
            self._behind[name] = self._behind.get(source, _NONE) | {ticket}

    def _result_bytes(self, i: int, step: LocalOp | Move | Loop) -> list[int]:
        if isinstance(step, Move):
            return [self._sizes.of(step.value, step.after)]
        op = self._line.ops[i]
        assert op is not None
        if len(op.results) == 1:
            value = op.results[0]
            return [self._sizes.of(value, step.result_shardings[0])]
        laid = zip(op.results, step.result_shardings, strict=True)
        return [self._sizes.of(v, s) for v, s in laid]

    def _fused(self, i: int, sources: Pieces, nbytes: int, readers: int) -> bool:
        """Decides if computing a piece in each reader is cheaper than storing it, and notes it."""
        op, reads = self._line.ops[i], self._line.reads[i]
        work = sum(self._work.get(r, 0.0) for r in reads)
        if op is not None:
            work += nbytes / max(1, item_bytes(op.results[0].dtype)) * fusion.work_bytes(op)
        if readers > 1:
            again = sum(self._nbytes.get(s, 0) for s in sources) + work
            if readers * again > again + nbytes * (1 + readers):
                return False
        for name in self._line.makes[i]:
            self._behind[name], self._work[name] = sources, work
        return True

    def _kernel(
        self, i: int, step: LocalOp | Move | Loop, makes: tuple[str, ...], sources: Pieces
    ) -> Kernel:
        if isinstance(step, Move):
            return _move_kernel(i, step, makes, sources, self._nbytes[makes[0]])
        op = self._line.ops[i]
        assert op is not None
        if isinstance(step, Loop):
            # A loop's results take over the buffers that it starts from.
            scratch = self._inner_bytes(step, op, self._nbytes)
            return Kernel(i, makes, sources, scratch, in_place=True)
        scratch = 0
        if op.kind == "dot_general":
            items = self._nbytes[makes[0]] // item_bytes(op.results[0].dtype)
            shard = self._sizes.shard(step, op)
            scratch = fusion.split_bytes(op, items, step.operand_shardings[0], shard)
        light = self._line.fused[i] or fusion.is_reduction(op)
        in_place = fusion.works_in_place(op)
        return Kernel(i, makes, sources, scratch, in_place, is_light=light)


def _move_kernel(
    i: int, step: Move, makes: tuple[str, ...], sources: Pieces, result_bytes: int
) -> Kernel:
    moved = step.collectives
    gathers = bool(moved) and moved[-1].kind == "all-gather"
    if len(step.steps) == 1 and len(moved) == 1:
        only = moved[0]
        group = (only.kind, only.axes, step.value.dtype)
        in_place = only.kind == "all-reduce"
        # How much is combined counts by what comes out.
        out = result_bytes if only.kind == "reduce-scatter" else only.nbytes
        return Kernel(i, makes, sources, 0, in_place, group, out, is_early=gathers)
    # Between two collectives lies a piece that is neither the source nor the result.
    middle = list(moved)
    if middle and step.steps[0].kind == middle[0].kind != "all-gather":
        middle.pop(0)
    if middle and step.steps[-1].kind == middle[-1].kind != "reduce-scatter":
        middle.pop()
    scratch = max((c.nbytes for c in middle), default=0)
    return Kernel(i, makes, sources, scratch, in_place=not moved, is_early=gathers)
