"""A block's listing as the kernels that a compiler makes of it: what each loads and stores.

Element-wise work is left out of memory where computing it again in its readers moves fewer bytes
than storing it, so a kernel reads the stored pieces behind everything that is fused into it. Which
ops those are, and which compute what they read, is as XLA's compilers for GPUs and TPUs have it.
"""

from __future__ import annotations

import itertools
import math
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from autopar.cost.layouts import wasted_bytes
from autopar.cost.line import Line, read_line
from autopar.cost.ops import (
    ADDITIONS,
    features,
    gpu_bytes,
    has_filter,
    is_fused_into_readers,
    is_product,
    is_reduction,
    made_by,
    operand_shape,
    slides_forward,
    split_bytes,
    sums_up_batches,
    terms_of_product,
    work_bytes,
    works_in_place,
)
from autopar.cost.sizes import Sizes
from autopar.ir.graph import Op
from autopar.ir.listing import (
    IN_ROWS,
    Block,
    Fence,
    ListingStep,
    LocalOp,
    Loop,
    Move,
)
from autopar.ir.sharding import MeshShape
from autopar.ir.values import item_bytes
from autopar.rules import primitive

Pieces = frozenset[str]
_NONE: Pieces = frozenset()
# The more kernels compute a piece, the less it pays: beyond so many, counting is not worth while.
_READERS = 6
# What stands between a product and the end of gelu, and how many times larger than biases it is.
_IN_GELU = frozenset(
    "add broadcast_in_dim convert_element_type integer_pow mul reshape tanh".split()
)
_LARGER = 16
_TURNING = frozenset({"reshape", "transpose"})
_SHIFTING = frozenset({"concatenate", "dynamic_slice", "gather", "pad", "rev", "slice"})
_PLACE_BYTES = 4  # of one of an iota's places, whatever it is cast to
# Of DeepSeek's scores on v5p those of 512 MiB in f32 are computed once more, and four of their sums
# run as one; those of 8 GiB are not.
LARGE_ON_TPU_BYTES = 2**30


NUMBER_BYTES = 8  # of one number, which is not shared: each kernel has it at hand
# What a kernel loads once more for each item comes from a cache that is, to XLA's model of GPUs, so
# many times as fast as memory, or from one next to each core that holds 2 KiB of a piece.
FROM_CACHE, FROM_NEAR_CACHE, NEAR_CACHE_BYTES = 2.5, 20, 2048
_CORES, _ITEM_BYTES = 132, 4  # of an H100, as others have about; of what is loaded so
COPY, OUTSIDE, ADDING, FILL = -1, -2, -3, -4  # in place of an instruction's index


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: pieces that it makes and reads, and scratch that lives as long as it runs.

    `at` is its instruction's index in the block, or below 0 for what is no instruction: a `COPY`,
    be it in another order or what a loop cuts out, what runs `OUTSIDE` its loop, the `ADDING` of
    the one piece that it reads to a sum, and the `FILL` of a piece with one number. Of a move of
    several collectives each is a kernel, `part` its number. `group` are the kind, axes and dtype of
    a collective that may be combined with its like, the dtype "" of gathers, which may be of
    several. A light one may be fused with others that read the same, such as one that `picks` items
    of what it reads, but for what Triton runs `alone`; an early one need not wait for its readers'
    turn: it gathers. `wasted_bytes` are loaded beside those that it reads, where it loads them item
    by item; `work_bytes` could be loaded while it computes.
    """

    at: int
    makes: tuple[str, ...]
    reads: Pieces
    scratch_bytes: int = 0
    in_place: bool = False
    group: tuple[str, tuple[str, ...], str] | None = None
    moved_bytes: int = 0
    is_light: bool = False
    picks: bool = False
    alone: bool = False
    is_early: bool = False
    wasted_bytes: int = 0
    work_bytes: float = 0.0
    part: int = 0

    def instruction(self, block: Block) -> ListingStep | None:
        """The instruction of its block that it runs; None where it is none."""
        return block.instructions[self.at] if self.at >= 0 else None


@dataclass(frozen=True)
class Stored:
    """The kernels of a block in order, the bytes of every stored piece, and what lives on.

    `behind` are the pieces that stand for the block's outputs and for the operands of its loops.
    `visits` number values as a compiler visits them from the outputs on; kernels that are none of
    the block's come with their `operands` in that order, by the first piece that they make. Where
    the compiler `gives_tuples`, what is no result of element-wise work alone comes in one. What a
    collective has `sent` it holds until it ends: until the kernel is over that makes another piece.
    """

    kernels: tuple[Kernel, ...]
    nbytes: Mapping[str, int]
    kept: Pieces  # pieces behind the block's outputs
    behind: Mapping[str, Pieces] = field(default_factory=dict[str, Pieces])
    visits: Mapping[str, int] = field(default_factory=dict[str, int])
    operands: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    gives_tuples: bool = False
    sent: Mapping[str, str] = field(default_factory=dict[str, str])

    def read_by(self, kernel: Kernel) -> list[str]:
        """The pieces that a kernel reads, those that a compiler visits first in front."""
        found = list[str]()
        for name in kernel.makes:
            found += self.operands.get(name, ())
        known = {*found}
        return found + sorted(kernel.reads - known, key=self.visit)

    def visit(self, name: str) -> tuple[int, str]:
        """The key that sorts pieces as a compiler visits them, what is moved in parts with it."""
        at = self.visits.get(name)
        return self.visits.get(name.split(" ", 1)[0], -1) if at is None else at, name


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
        return sizes.once(Stored, block, given, lambda: _written(block, sizes, given, inner_bytes))
    return _written(block, sizes, given, inner_bytes, slices, stacked)


def _written(
    block: Block,
    sizes: Sizes,
    given: Mapping[str, int],
    inner_bytes: InnerBytes,
    slices: Mapping[str, int] | None = None,
    stacked: Pieces = _NONE,
) -> Stored:
    line = read_line(block, sizes)
    writer = _Writer(block, line, sizes, given, inner_bytes, stacked)
    for name, nbytes in (slices or {}).items():
        writer.cut(name, nbytes)
    for i, step in enumerate(block.instructions):
        if line.alive[i]:
            writer.visit(i, step, line.roots[i])
    return writer.stored(block)


def _pays(work: float, once: int, again: int, readers: int, nbytes: int) -> bool:
    """True if readers had better do the work of a piece of so many bytes themselves.

    They load `again` bytes for it, all together; a kernel that stores it would load them `once`.
    """
    return again + readers * work <= once + work + nbytes * (1 + readers)


class _Joined:
    """Pieces behind some others, put together once they are asked for.

    Along a sum of many fused terms, as of a global norm, each term would copy those before it.
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: _Behind) -> None:
        self.parts = parts

    def pieces(self) -> Pieces:
        """The pieces."""
        found: set[str] = set()
        seen: set[_Joined] = {self}
        waiting: list[_Joined] = [self]
        while waiting:
            for part in waiting.pop().parts:
                if not isinstance(part, _Joined):
                    found |= part
                elif part not in seen:
                    seen.add(part)
                    waiting.append(part)
        pieces = frozenset(found)
        self.parts = (pieces,)
        return pieces


_Behind = Pieces | _Joined
_FEW_BEHIND = 64  # that are put together at once


def _pieces(behind: _Behind) -> Pieces:
    return behind.pieces() if isinstance(behind, _Joined) else behind


def _joined(behind: Sequence[_Behind]) -> _Behind:
    count = 0
    for part in behind:
        count += _FEW_BEHIND + 1 if isinstance(part, _Joined) else len(part)
    if count > _FEW_BEHIND:
        return _Joined(*behind)
    return _NONE.union(*(part for part in behind if not isinstance(part, _Joined)))


class _Writer:
    """Goes through the instructions in order and writes a kernel for each that stores."""

    def __init__(
        self,
        block: Block,
        line: Line,
        sizes: Sizes,
        given: Mapping[str, int],
        inner_bytes: InnerBytes,
        stacked: Pieces,
    ) -> None:
        self._block, self._line, self._sizes = block, line, sizes
        self._outputs = {o for o in block.outputs if o is not None}
        self._inner_bytes = inner_bytes
        self._stacked = stacked
        self._nbytes: dict[str, int] = dict(given)
        self._bitcasts: dict[str, int] = {}  # stored values under other names, with other dims
        self._behind: dict[str, _Behind] = {name: frozenset((name,)) for name in given}
        self._work: dict[str, float] = {}  # of a fused piece, in bytes
        # Of a fused piece, the bytes that are loaded of pieces from which something is picked.
        self._picked: dict[str, Mapping[str, int]] = {}
        # Of a fused piece, the instructions whose work takes time of its own, with its bytes.
        self._dear: dict[str, Mapping[int, float]] = {}
        # Of what is stored as it would cost to compute it again: its work, what is picked for it,
        # and if that is computed while what it is made of is loaded.
        self._weighed: dict[str, tuple[float, Mapping[str, int], bool]] = {}
        self._epilogues: dict[str, str] = {}  # products' results, and what is made of them alone
        self._spread = set[str]()  # pieces that are spread over more items than they have
        self._sums = set[str]()  # those of them that products add a piece to
        # What lies behind element-wise work, and its bytes, though it may be stored as well.
        self._computed: dict[str, tuple[_Behind, int]] = {}
        self._kernels: list[Kernel] = []
        self._written_at: dict[str, int] = {}  # of what element-wise work stores, its kernel
        self._makers: dict[str, Kernel] = {}  # of the first so many kernels, by what they make
        self._found_makers = 0

    def stored(self, block: Block) -> Stored:
        """The pieces that were written."""
        loops = (step for step in block.instructions if isinstance(step, Loop))
        asked = {*self._outputs, *(o for loop in loops for o in loop.operands if o is not None)}
        behind = {o: _pieces(self._behind.get(o, _NONE)) for o in asked}
        kept = _NONE.union(*(behind[o] for o in self._outputs))
        kernels = self._with_epilogues(kept)
        if self._weighed:
            kernels = self._computed_again(kernels, self._line.loaded.union(*behind.values()))
        return Stored(
            tuple(kernels), {**self._nbytes, **self._bitcasts}, kept, behind, self._line.visits,
            gives_tuples=self._sizes.platform == "gpu",
        )  # fmt: skip

    def cut(self, name: str, nbytes: int) -> None:
        """An input that a loop cuts out: element-wise readers do it themselves."""
        if name in self._line.loaded:
            self._nbytes[name] = nbytes
            self._kernels.append(Kernel(COPY, (name,), _NONE))
        else:
            self._nbytes[name] = 0
        self._behind[name] = frozenset((name,))

    def visit(self, i: int, step: ListingStep, roots: Set[int]) -> None:
        """Fuse an instruction into its readers, or write its kernel."""
        copies = i in self._line.copied
        convolution = self._convolution_before(i)
        reads = self._line.reads[i]
        if convolution is not None:
            self._with_vector(i, convolution)
            reads = (convolution,)
        sources = self._copied(i) if copies else self._sources(reads)
        if i in self._line.filled:
            sources = _joined((sources, self._filled(i)))
        if isinstance(step, Fence):
            self._fence(i, step)
            return
        if self._counts_places(i, step) or self._spreads_mask(i, step):
            return
        nbytes = self._result_bytes(i, step)
        if self._turns_anew(i, sources, nbytes[0]):
            return
        if self._is_made_so(i) or self._is_bitcast(i, nbytes[0]):
            self._behind[self._line.makes[i][0]] = sources
            return
        if self._line.copied and self._line.fused[i]:
            self._computed[self._line.makes[i][0]] = sources, nbytes[0]
        readers = min(_READERS, len(roots))
        may_fuse = readers and i not in self._line.repeated and not self._adds_to_product(i)
        if may_fuse and self._fused(i, step, sources, sum(nbytes), readers):
            return
        makes = tuple(self._line.makes[i])
        for name, size in zip(makes, nbytes, strict=True):
            in_stack = name in self._stacked and self._line.fused[i]
            self._nbytes[name] = 0 if in_stack and not self._line.readers.get(name) else size
            self._behind[name] = frozenset((name,))
        if self._line.fused[i] and self._sizes.platform == "gpu":
            self._written_at.update(dict.fromkeys(makes, len(self._kernels)))
        if isinstance(step, Move):
            sources = self._turned_before(step, _pieces(sources))
            mesh = self._sizes.mesh
            for kernel, size in _move_kernels(i, step, _pieces(sources), nbytes[0], mesh):
                self._nbytes[kernel.makes[0]] = size
                self._kernels.append(kernel)
        elif i in self._line.windowed:
            self._scatter_windows(i, makes[0], nbytes[0])
        else:
            self._kernels.append(self._kernel(i, step, makes, _pieces(sources)))
        if i in self._line.turned:
            turned = f"{makes[0]} in order"
            self._nbytes[turned], self._behind[makes[0]] = nbytes[0], frozenset((turned,))
            self._kernels.append(Kernel(COPY, (turned,), frozenset(makes), is_light=True))

    def _scatter_windows(self, i: int, made: str, nbytes: int) -> None:
        """Writes the gradient of the largest in windows: it is scattered into a copy of zeros.

        XLA for GPUs finds their places before, a number for each dim, with the largest themselves.
        The gradient has a buffer beside the copy's.
        """
        op, (source, image) = self._line.ops[i], self._line.reads[i]
        assert op is not None
        behind = _pieces(self._behind.get(image, _NONE))
        zeros, dims = f"{made} begun", range(len(op.results[0].shape))
        found = tuple(f"{made} found along {d}" for d in dims)
        share = math.prod(operand_shape(op, 0)) / op.results[0].item_count
        items = round(share * nbytes / item_bytes(op.results[0].dtype))
        places = items * _PLACE_BYTES
        self._nbytes.update({zeros: nbytes, **dict.fromkeys(found, places)})
        given = _pieces(self._behind.get(source, _NONE))
        self._kernels += (
            Kernel(COPY, found, behind, scratch_bytes=places),
            Kernel(COPY, (zeros,), self._filled(i), in_place=True),
            Kernel(i, (made,), given.union(found, (zeros,))),
        )

    def _filled(self, i: int) -> Pieces:
        """The pieces full of one number that an instruction loads."""
        names = self._line.filled[i]
        for name in names:
            if name not in self._nbytes:
                _, dtype, shape = self._line.fills[name]
                self._nbytes[name] = math.prod(shape) * item_bytes(dtype)
                self._kernels.append(Kernel(FILL, (name,), _NONE))
        return frozenset(names)

    def _counts_places(self, i: int, step: ListingStep) -> bool:
        """Notes an iota along a dim that devices share, and tells if an instruction is one.

        Where a device's part begins depends on the device: XLA for GPUs stores the places in that,
        a vector, for all that reads them.
        """
        op = self._line.ops[i]
        if self._sizes.platform != "gpu" or op is None or op.kind != "iota":
            return False
        assert isinstance(step, LocalOp)
        dim = op.whole("dimension")
        axes = step.result_shardings[0].dims[dim]
        if self._sizes.mesh.size(axes) == 1:
            return False
        places = f"places along {', '.join(axes)} of {op.results[0].shape[dim]}"
        if places not in self._nbytes:
            self._nbytes[places] = self._sizes.made(step, op)[dim] * _PLACE_BYTES
            self._kernels.append(Kernel(i, (places,), _NONE, is_light=True))
        self._behind[self._line.makes[i][0]] = frozenset((places,))
        return True

    def _spreads_mask(self, i: int, step: ListingStep) -> bool:
        """Notes a mask that is spread over more dims, and tells if an instruction does that.

        What is computed of iotas and numbers alone XLA for TPUs stores before that, for all that
        spread the same.
        """
        op = self._line.ops[i]
        if not self._line.into_products or op is None or not isinstance(step, LocalOp):
            return False
        number = self._line.counted.get(step.operands[0] or "") if step.operands else None
        if number is None or op.kind != "broadcast_in_dim":
            return False
        mask = f"mask {number}"
        if mask not in self._nbytes:
            items = math.prod(self._sizes.shard(step, op))
            self._nbytes[mask] = items * item_bytes(op.results[0].dtype)
            self._kernels.append(Kernel(i, (mask,), _NONE, is_light=True))
        self._behind[step.results[0]] = frozenset((mask,))
        return True

    def _is_made_so(self, i: int) -> bool:
        """True for a batched product's result in the order in which BLAS writes it for its readers.

        It leaves as much between the rows as the other matrices take, where there is one dim of
        batch on a device, which is not to lie innermost, as of attention's heads:

            [heads, query, width]    for    [query, heads width]
        """
        line, op = self._line, self._line.ops[i]
        if self._sizes.platform != "gpu" or op is None or op.kind not in _TURNING:
            return False
        turns, at = list[tuple[int, ...]](), i
        while op is not None and op.kind in _TURNING:
            if op.kind == "transpose":
                turns.append(op.ints("permutation"))
            elif turns:  # which dims are turned over is not known
                return False
            (name,) = line.reads[at]
            maker = line.maker.get(name)
            if maker is None or len(line.readers[name]) != 1 or name in line.copied.get(at, ()):
                return False
            at, op = maker, line.ops[maker]
        step = self._block.instructions[at]
        if op is None or not turns or not isinstance(step, LocalOp) or not sums_up_batches(op):
            return False
        assert op.rule is not None
        makers, local = made_by(op.rule), self._sizes.made(step, op)
        dims: Sequence[int] = range(len(local))
        for turn in reversed(turns):
            dims = [dims[d] for d in turn]
        lying = [d for d in dims if local[d] > 1]
        runs = [maker for maker, _ in itertools.groupby(makers[d] for d in lying)]
        is_rising = all(a < b for a, b in itertools.pairwise(lying) if makers[a] == makers[b])
        one_batch = sum(makers[d] == 0 for d in lying) == 1
        return one_batch and len(runs) == len({*runs}) and runs[-1] != 0 and is_rising

    def _is_bitcast(self, i: int, nbytes: int) -> bool:
        """Notes a stored value that has other dims, and tells if an instruction makes one.

        XLA for GPUs reads it where it lies. What the block gives back has a buffer of its own.
        """
        line, op = self._line, self._line.ops[i]
        if self._sizes.platform != "gpu" or op is None or op.kind != "reshape":
            return False
        ((name,), (made,)) = line.reads[i], line.makes[i]
        stored = self._nbytes.get(name, self._bitcasts.get(name))
        is_turned = line.orders.is_turned(name) or name in line.transposed or name in line.in_parts
        if is_turned or stored != nbytes or made in self._outputs or i in line.copied:
            return False
        self._bitcasts[made] = nbytes
        return True

    def _turns_anew(self, i: int, sources: _Behind, nbytes: int) -> bool:
        """Writes a value in another order where XLA for TPUs computes it once more for that.

        It does where a sum of two products leads to it, from these: there the order is changed,
        which costs nothing, so that they are held beside their sum. It keeps what is large.

            s = x @ y + z @ w    p = f(s)    p.T
        """
        op = self._line.ops[i]
        if not self._line.into_products or op is None or op.kind != "transpose":
            return False
        before = self._line.maker.get(self._line.reads[i][0])
        if before is None or not self._line.fused[before] or nbytes > LARGE_ON_TPU_BYTES:
            return False
        reads = self._with_sums_apart(_pieces(sources), nbytes)
        if reads is None:
            return False
        (name,) = self._line.makes[i]
        self._nbytes[name], self._behind[name] = nbytes, frozenset((name,))
        self._kernels.append(Kernel(i, (name,), reads, is_light=True))
        return True

    def _with_sums_apart(self, pieces: Pieces, nbytes: int) -> Pieces | None:
        """The products, and what is smaller than so many bytes, that pieces are computed of.

        None if anything else leads to them that is as large, or no sum of two products does.
        """
        for written in self._kernels[self._found_makers :]:
            self._makers.update(dict.fromkeys(written.makes, written))
        self._found_makers = len(self._kernels)
        makers = self._makers
        found, waiting, seen, adds = set[str](), [*pieces], set[str](), False
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            kernel = makers.get(name)
            op = self._line.ops[kernel.at] if kernel is not None and kernel.at >= 0 else None
            if self._nbytes[name] < nbytes // 2 or (op is not None and is_product(op)):
                found.add(name)
            elif kernel is None or op is None or not is_fused_into_readers(op):
                return None
            else:
                adds = adds or (op.kind in ADDITIONS and len(kernel.reads) == 2)
                waiting += kernel.reads
        return frozenset(found) if adds else None

    def _turned_before(self, move: Move, sources: Pieces) -> Pieces:
        """The pieces that a move sends: a filter's gradient is turned over before it is scattered
        along another dim.

        It lies with the features that the filter makes outermost, and what is scattered lies there.
        """
        at = self._line.maker.get(move.source)
        op = self._line.ops[at] if at is not None else None
        if (
            self._sizes.platform != "gpu" or not move.steps or op is None
            or op.kind != "conv_general_dilated" or has_filter(op)
            or move.steps[0].kind != "reduce-scatter" or move.steps[0].dim == features(op)
        ):  # fmt: skip
            return sources
        turned = f"{move.source} turned for {move.result}"
        self._nbytes[turned] = self._nbytes[move.source]
        self._kernels.append(Kernel(COPY, (turned,), sources, is_light=True))
        return frozenset((turned,))

    def _with_epilogues(self, kept: Pieces) -> list[Kernel]:
        """The kernels, those of products with gelu or an addition that alone reads what they make.

        cuBLAS computes it before it stores: XLA for GPUs asks for that (its GemmRewriter). What is
        added may give its buffer to the sum.
        """
        if not self._epilogues:
            return list(self._kernels)
        readers = Counter(r for kernel in self._kernels for r in kernel.reads)
        product_of = {
            result: product
            for product, result in self._epilogues.items()
            if readers[product] == 1 and product not in kept
        }
        makers = {k.makes[0]: k for k in self._kernels if k.makes[0] in product_of.values()}
        left: list[Kernel] = []
        for kernel in self._kernels:
            name = kernel.makes[0]
            if name in product_of:
                product = product_of[name]
                own, added = makers[product].reads, kernel.reads - {product}
                # Only what is added gives its buffer, and not an operand that is as large.
                in_place = all(self._nbytes[r] != self._nbytes[name] for r in own)
                in_place = in_place and self._plain_product(product) is not None
                left.append(
                    replace(
                        makers[product], makes=kernel.makes, reads=own | added, in_place=in_place
                    )
                )
            elif name not in makers:
                left.append(kernel)
        return left

    def _computed_again(self, kernels: Sequence[Kernel], kept: Collection[str]) -> list[Kernel]:
        """The kernels, some of what is stored computed in those that read it after all.

        It was stored for all that is computed of it: some of that is stored itself, so that fewer
        kernels read it.

            m = x > 0    g = where(m, dy, 0)    three sums read g: it is stored, and m is not
        """
        readers: dict[str, list[int]] = {}
        for k, kernel in enumerate(kernels):
            for name in kernel.reads:
                readers.setdefault(name, []).append(k)
        found = list(kernels)
        for k in range(len(found) - 1, -1, -1):
            kernel = found[k]
            name, at = kernel.makes[0], readers.get(kernel.makes[0], [])
            if name not in self._weighed or name in kept or len(kernel.makes) > 1 or kernel.picks:
                continue
            by = [found[j] for j in at]
            if not self._pays_again(kernel, by):
                continue
            for j, reader in zip(at, by, strict=True):
                reads = reader.reads.difference((name,)) | kernel.reads
                work = reader.work_bytes + kernel.work_bytes
                found[j] = replace(reader, reads=reads, work_bytes=work)
            for r in kernel.reads:
                readers[r] = sorted({*readers[r], *at} - {k})
            found[k] = replace(kernel, makes=())
        return [kernel for kernel in found if kernel.makes]

    def _pays_again(self, kernel: Kernel, readers: Sequence[Kernel]) -> bool:
        """True if computing a piece in its readers is cheaper than storing it."""
        if not readers or not all(r.is_light and r.at >= 0 for r in readers):
            return False
        name = kernel.makes[0]
        work, picked, is_cheap = self._weighed[name]
        if (len(readers) > 1 and not is_cheap) or not self._is_in_place(kernel.at):
            return False
        once, again, op = 0, 0, self._line.ops[kernel.at]
        for piece in kernel.reads - self._line.fills.keys():
            loaded = picked.get(piece, 0) or self._loaded_for(piece, op, self._nbytes[name])
            once += loaded
            again += loaded * sum(piece not in r.reads for r in readers)
        return _pays(work, once, again, len(readers), self._nbytes[name])

    def _is_in_place(self, i: int) -> bool:
        """True if items of what an instruction makes are made of those in the same place, and read
        for theirs: no slice or pad is computed with it, before it or behind.
        """
        line, ways = self._line, [(i, False), (i, True)]
        seen = {*ways}
        while ways:
            at, is_behind = ways.pop()
            op = line.ops[at]
            if op is None or op.kind in _SHIFTING:
                return False
            if is_behind:
                found = [
                    j
                    for name in line.makes[at] if at == i or name not in self._nbytes
                    for j in line.readers.get(name, ()) if line.fused[j]
                ]  # fmt: skip
            else:
                computed = (name for name in line.reads[at] if name not in self._nbytes)
                found = [j for name in computed if (j := line.maker.get(name)) is not None]
            new = {(j, is_behind) for j in found} - seen
            seen |= new
            ways += sorted(new)
        return True

    def _product_before(self, i: int) -> str | None:
        """The product's result that an instruction makes gelu of, by tanh, with a bias or without.

        h = x @ w + b    y = 0.5 * h * (1 + tanh(0.8 * (h + 0.04 * h ** 3)))
        """
        line, last = self._line, self._line.ops[i]
        if self._sizes.platform != "gpu" or last is None or last.kind != "mul":
            return None
        kinds, sources, seen = set[str](), set[str](), set[str]()
        front = [*line.reads[i]]
        while front:
            name = front.pop()
            if name in seen:
                continue
            seen.add(name)
            at = line.maker.get(name)
            op = line.ops[at] if at is not None else None
            if at is None or op is None or name in self._nbytes:
                sources.add(name)
            elif op.kind in _IN_GELU:
                kinds.add(op.kind)
                front += line.reads[at]
            else:
                return None
        products = [n for n in sorted(sources) if self._plain_product(n)]
        if not kinds.issuperset(("tanh", "integer_pow")) or len(products) != 1:
            return None
        others = sum(self._nbytes.get(n, 0) for n in sources) - self._nbytes[products[0]]
        return products[0] if _LARGER * others <= self._nbytes[products[0]] else None

    def _product_added(self, i: int) -> str | None:
        """The product's result, with a bias or without, that an instruction adds a piece to.

        h = x @ w + b    y = h + c    or    y = c + h.T    or    y = h.T + (z @ v).T

        cuBLAS adds one piece, and XLA looks at the first product alone: what is added to one that
        adds already is added by itself.

            y = (c + x @ w) + z @ v    not    y = z @ v + (c + x @ w)
        """
        line, op = self._line, self._line.ops[i]
        reads = line.reads[i]
        if (
            self._sizes.platform != "gpu" or op is None
            or op.kind not in ADDITIONS or len({*reads}) != 2
        ):  # fmt: skip
            return None
        if self._adds_already(reads[0]):
            return None
        for one, other in (reads, reads[::-1]):
            product, added = self._moved_from(self._unbiased(one)), self._reshaped(other)
            made = self._plain_product(product) or self._adding_convolution(product)
            if made is None or made.results[0].dtype != op.results[0].dtype:
                continue
            if self._plain_product(self._moved_from(other)) is not None:
                added = self._moved_from(other)
            if self._nbytes.get(added) == self._nbytes.get(product, 0):
                return product
        return None

    def _adds_already(self, name: str) -> bool:
        """True if a value that is read once is what a product makes that adds a piece."""
        made = self._reshaped(name)
        return made in self._sums and len(self._line.readers[made]) == 1

    def _adding_convolution(self, name: str) -> Op | None:
        """The convolution that a value is the result of, if cuDNN may add something as large."""
        line, at = self._line, self._line.maker.get(name)
        op = line.ops[at] if at is not None else None
        if at is None or op is None or op.kind != "conv_general_dilated":
            return None
        is_read_once = len(line.readers[name]) == 1
        return op if is_read_once and slides_forward(op, line.turns_round(at)) else None

    def _adds_to_product(self, i: int) -> bool:
        """True if an instruction adds a piece to a product that nothing else reads.

        The product does it, however cheap it is for all that reads the sum.
        """
        product = self._product_added(i)
        return product is not None and len(self._line.readers[product]) == 1

    def _convolution_before(self, i: int) -> str | None:
        """The result of a convolution that an instruction adds a vector to, and nothing else reads.

        cuDNN adds it before it stores, so what reads the sum reads no vector:

            y = conv(x, w) + b
        """
        line, op, reads = self._line, self._line.ops[i], self._line.reads[i]
        if self._sizes.platform != "gpu" or op is None or op.kind != "add" or len(reads) != 2:
            return None
        for at, name in enumerate(reads):
            maker = line.maker.get(name)
            made = line.ops[maker] if maker is not None else None
            if (
                made is not None and made.kind == "conv_general_dilated" and name in self._nbytes
                and name not in line.padded and len(line.readers[name]) == 1
                and self._is_vector(op, 1 - at, reads[1 - at])
            ):  # fmt: skip
                return name
        return None

    def _with_vector(self, i: int, convolution: str) -> None:
        """Has a convolution's kernel wait for the vector that an instruction adds to its result.

        One that is made behind the kernel is left out.
        """
        vector = [name for name in self._line.reads[i] if name != convolution]
        pieces, later = _pieces(self._sources(vector)), set[str]()
        for k in range(len(self._kernels) - 1, -1, -1):
            kernel = self._kernels[k]
            if convolution in kernel.makes:
                reads = kernel.reads | (pieces - later)
                self._kernels[k] = replace(kernel, reads=reads)
                return
            later.update(kernel.makes)

    def _is_vector(self, op: Op, operand: int, name: str) -> bool:
        """True if an operand, which has a name here, is a vector, spread over other dims or not."""
        at = self._line.maker.get(name)
        maker = self._line.ops[at] if at is not None else None
        if maker is not None and maker.kind == "broadcast_in_dim":
            op, operand = maker, 0
        return sum(n > 1 for n in operand_shape(op, operand)) <= 1

    def _unbiased(self, name: str) -> str:
        """The value to which a vector is added where that makes another, or the value itself."""
        line, at = self._line, self._line.maker.get(name)
        op = line.ops[at] if at is not None and name not in self._nbytes else None
        if at is None or op is None or op.kind != "add" or len(line.reads[at]) != 2:
            return self._reshaped(name)
        one, other = line.reads[at]
        spread = line.maker.get(other)
        vector = line.ops[spread] if spread is not None else None
        if vector is None or vector.kind != "broadcast_in_dim" or len(operand_shape(vector, 0)) > 1:
            return self._reshaped(name)
        return self._reshaped(one)

    def _reshaped(self, name: str) -> str:
        """The stored value of which another is a reshape, or the value itself."""
        at = self._line.maker.get(name)
        op = self._line.ops[at] if at is not None and name not in self._nbytes else None
        if at is None or op is None or op.kind != "reshape":
            return name
        return self._reshaped(self._line.reads[at][0])

    def _plain_product(self, name: str) -> Op | None:
        """The matrix product without a dim of batch that a value is the result of."""
        at = self._line.maker.get(name)
        op = self._line.ops[at] if at is not None else None
        if op is None or op.kind != "dot_general" or terms_of_product(op) is None:
            return None
        return op

    def _copied(self, i: int) -> _Behind:
        """The pieces that a kernel reads, of which some are written out in another order before."""
        reads, copies = self._line.reads[i], self._line.copied[i]
        sources = self._sources([r for r in reads if r not in copies])
        for name, copy in copies.items():
            if copy not in self._nbytes:
                self._copy(name, copy)
            sources = _joined((sources, frozenset((copy,))))
            if (made := self._line.before.get(copy)) is not None:
                sources = _joined((sources, _pieces(self._behind.get(name, _NONE)) - {made}))
        return sources

    def _copy(self, name: str, copy: str) -> None:
        """Write a value in another order, on a GPU in the kernel that writes it as it lies.

        XLA makes one of element-wise kernels that read the same, if no two of them turn it over.
        """
        stored = self._behind.get(name, _NONE), self._nbytes.get(name, 0)
        behind, self._nbytes[copy] = self._computed.get(name, stored)
        if copy in self._line.before:
            behind = frozenset((self._line.before[copy],))
        padded = self._line.padded
        if copy in padded:  # which has another shape: no kernel writes both
            self._nbytes[copy] = round(self._nbytes[copy] / padded.get(name, 1) * padded[copy])
            behind, at = stored[0], None
        elif copy in self._line.grouped:
            behind, at = self._by_groups(name, copy, stored[0]), None
        else:
            at = self._written_at.pop(name, None)
        if at is not None:
            kernel = self._kernels[at]
            self._kernels[at] = replace(kernel, makes=(*kernel.makes, copy))
            return
        wasted = self._wasted(copy)
        self._kernels.append(
            Kernel(COPY, (copy,), _pieces(behind), is_light=True, wasted_bytes=wasted)
        )

    def _by_groups(self, name: str, copy: str, behind: _Behind) -> _Behind:
        """Weighs the copy of rows for each group, and tells what it is made from."""
        made = self._line.grouped[copy]
        self._nbytes[copy] *= made.count
        if made.turned is None:
            return _joined((behind, self._sources([made.sizes] if made.sizes else [])))
        if made.turned not in self._nbytes:
            self._copy(name, made.turned)
        return frozenset((made.turned,))

    def _wasted(self, copy: str) -> int:
        """Bytes that are loaded beside those that a copy is made from."""
        original = self._line.apart.get(copy)
        op = self._line.ops[self._line.maker[original]] if original is not None else None
        if original is None or op is None:
            return 0
        nbytes = self._nbytes.get(original, 0)
        return wasted_bytes(nbytes, op.results[0].dtype)

    def _sources(self, reads: Sequence[str]) -> _Behind:
        """The stored pieces behind some others."""
        if len(reads) == 1:
            return self._behind.get(reads[0], _NONE)
        behind = [b for b in map(self._behind.get, reads) if b]
        return behind[0] if len(behind) == 1 else _joined(behind)

    def _fence(self, i: int, step: Fence) -> None:
        """Renames pieces; what reads one of them waits for all.

        A value that is another in an order of its own may lie in any: the fence waits for that.
        """
        ticket = f"fence {i}"
        self._nbytes[ticket] = 0
        rows = zip(step.sources, step.results, strict=True)
        waits = [self._moved_from(s) for s, made in rows if not self._is_left_out(i, s, made)]
        self._kernels.append(Kernel(i, (ticket,), _pieces(self._sources(waits))))
        for name, source in zip(step.results, step.sources, strict=True):
            self._behind[name] = _joined((self._behind.get(source, _NONE), frozenset((ticket,))))

    def _is_left_out(self, i: int, source: str, result: str) -> bool:
        """True if XLA takes a value out of a fence: nothing reads what becomes of it, nor itself.

        Products read what a reshaped value was before.
        """
        line, at = self._line, self._line.maker.get(source)
        op = line.ops[at] if at is not None else None
        if op is None or op.kind != "reshape" or line.readers.get(result) or result in line.loaded:
            return False
        others = (line.ops[j] for j in line.readers[source] if j != i)
        return all(other is not None and is_product(other) for other in others)

    def _moved_from(self, name: str) -> str:
        """The value of which another is a transpose or a reshape."""
        at = self._line.maker.get(name)
        op = self._line.ops[at] if at is not None else None
        if at is None or op is None or op.kind not in _TURNING:
            return name
        return self._moved_from(self._line.reads[at][0])

    def _result_bytes(self, i: int, step: LocalOp | Move | Loop) -> list[int]:
        if isinstance(step, Move):
            return [self._sizes.of(step.value, step.after)]
        op = self._line.ops[i]
        assert op is not None
        if len(op.results) == 1:
            value = op.results[0]
            share = self._line.padded.get(step.results[0], 1.0)
            return [round(share * self._sizes.of(value, step.result_shardings[0]))]
        laid = zip(op.results, step.result_shardings, strict=True)
        return [self._sizes.of(v, s) for v, s in laid]

    def _fused(
        self, i: int, step: LocalOp | Move | Loop, sources: _Behind, nbytes: int, readers: int
    ) -> bool:
        """Decides if computing a piece in each reader is cheaper than storing it, and notes it."""
        op, reads = self._line.ops[i], self._line.reads[i]
        if self._sizes.platform == "gpu" and op is not None and op.kind == "broadcast_in_dim":
            self._spread |= _pieces(sources)
        work = sum(self._work.get(r, 0.0) for r in reads)
        if op is not None:
            work += nbytes / max(1, item_bytes(op.results[0].dtype)) * work_bytes(op)
        picked, dear = self._picked_inside(i, step, nbytes), self._computed_inside(i, nbytes)
        if readers > 1 and not self._is_only_picked_from(i):
            once = again = 0
            # A GPU computes what is cheap while it loads what that is made of.
            is_cheap = (
                self._sizes.platform == "gpu" and op is not None
                and sum(dear.values()) < nbytes and not self._is_spread(i, op)
            )  # fmt: skip
            beside = self._loaded_beside(i) if is_cheap else dict[str, frozenset[int]]()
            for piece in _pieces(sources):
                if piece in self._line.fills:  # XLA loads it only later, if it is there anyway
                    continue
                loaded = picked.get(piece, 0) or self._loaded_for(piece, op, nbytes)
                others = self._line.roots[i] - beside.get(piece, frozenset())
                once += loaded
                again += loaded * min(readers, len(others))
            is_turned = self._is_turned_over(i, sources, nbytes)
            if is_turned or not _pays(work, once, again, readers, nbytes):
                if self._sizes.platform == "gpu" and not is_turned:
                    self._weighed[self._line.makes[i][0]] = work, picked, is_cheap
                return False
        for name in self._line.makes[i]:
            self._behind[name], self._work[name] = sources, work
            if picked:
                self._picked[name] = picked
            if dear:
                self._dear[name] = dear
        return True

    def _loaded_for(self, piece: str, op: Op | None, nbytes: int) -> int:
        """The bytes that a kernel loads of a piece while it computes a result of an op.

        What is spread over a much larger result a GPU loads once more for each item, from its
        cache, as the highest of each row is for a softmax.
        """
        own = self._nbytes.get(piece, 0)
        if piece not in self._spread or op is None or not NUMBER_BYTES < own <= nbytes // 4:
            return own
        again = _ITEM_BYTES * nbytes // item_bytes(op.results[0].dtype) - own
        is_near = own < _CORES * NEAR_CACHE_BYTES
        return own + round(again / (FROM_NEAR_CACHE if is_near else FROM_CACHE))

    def _is_turned_over(self, i: int, sources: _Behind, nbytes: int) -> bool:
        """True if a value is spread out of smaller ones and XLA has it in two orders for products.

        A kernel that turned it over would load all that it is made of once more for each item:

            w = kept[:, :, None] * slot[:, None, :]    x @ w    and    w @ y, which sums over others
        """
        line, op = self._line, self._line.ops[i]
        (name, *others) = line.makes[i]
        if (
            self._sizes.platform != "gpu" or op is None or others or len(line.readers[name]) < 2
            or not self._is_spread_out_of(_pieces(sources), nbytes)
        ):  # fmt: skip
            return False
        orders = set[tuple[int, ...]]()
        for kernel in line.roots[i]:
            for made in line.makes[kernel] if kernel < len(line.makes) else ():  # not of copies
                orders.update(self._taken_by_products(made, op.results[0].shape))
        return any(
            [d for d in one if d in other] != [d for d in other if d in one]
            for one, other in itertools.combinations(sorted(orders), 2)
        )

    def _is_spread_out_of(self, pieces: Pieces, nbytes: int) -> bool:
        """True if so many bytes are computed of much smaller pieces, not of numbers alone."""
        most = max((self._nbytes.get(piece, 0) for piece in pieces), default=0)
        return NUMBER_BYTES < most <= nbytes // _LARGER

    def _taken_by_products(self, name: str, shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The orders in which XLA writes a value of a shape for batched products that read it."""
        for reader in self._line.readers.get(name, ()):
            op, step = self._line.ops[reader], self._block.instructions[reader]
            if op is None or op.kind != "dot_general" or op.rule is None:
                continue
            assert isinstance(step, LocalOp)
            for k, operand in enumerate(step.operands):
                if operand == name and tuple(operand_shape(op, k)) == tuple(shape):
                    local = self._sizes.local(step.operand_shardings[k], shape)
                    order = self._line.orders.written(op.rule, k, step.results[0], local)
                    if order:
                        yield order

    def _picked_inside(self, i: int, step: LocalOp | Move | Loop, nbytes: int) -> Mapping[str, int]:
        """The bytes of the pieces behind an instruction's results that need not be loaded whole.

        What looks something up loads as many of a piece's items as it makes, however many it has:

            x = table[i]    loads i and, of the table, as much as x has

        What adds more to it than a vector is stored, as a position's embedding beside a token's.
        """
        op, reads = self._line.ops[i], self._line.reads[i]
        is_pick = op is not None and primitive(op.kind).picks == 0 and bool(reads)
        if not is_pick and self._picked.keys().isdisjoint(reads):
            return {}
        loaded: dict[str, int] = {}
        for k, name in enumerate(reads):
            picked = self._picked.get(name, {})
            share = self._picked_share(i, step) if is_pick and k == 0 else 1.0
            for piece in _pieces(self._behind.get(name, _NONE)):
                whole = self._nbytes.get(piece, 0)
                own = int(share * picked.get(piece, whole))
                if not is_pick and own == whole and _LARGER * whole > nbytes:
                    return {}
                loaded[piece] = loaded.get(piece, 0) + own
        return {p: n for p, n in loaded.items() if n < self._nbytes.get(p, 0)}

    def _is_only_picked_from(self, i: int) -> bool:
        """True if all that reads an instruction's results looks something up in them."""
        line = self._line
        for name in line.makes[i]:
            for j in line.readers.get(name, ()):
                op = line.ops[j]
                if op is None or primitive(op.kind).picks != 0 or line.reads[j][0] != name:
                    return False
        return True

    def _is_spread(self, i: int, op: Op) -> bool:
        """True if the result of an op is read for more items than it has, once for each."""
        line, items = self._line, op.results[0].item_count
        readers = (line.ops[j] for name in line.makes[i] for j in line.readers.get(name, ()))
        return any(r is not None and r.results and r.results[0].item_count > items for r in readers)

    def _loaded_beside(self, i: int) -> Mapping[str, frozenset[int]]:
        """By piece that an instruction is computed of, the kernels that load it anyway.

        y = f(x, mean)    dx = g(dy, x, mean, y > 0)    y > 0 costs dx no loading of x
        """
        # 1. Back to the pieces, over all that is computed on the way.
        line, front, way, pieces = self._line, [*self._line.reads[i]], {i}, set[str]()
        while front:
            name = front.pop()
            at = line.maker.get(name)
            if name in self._nbytes or at is None or not line.fused[at]:
                pieces.add(name)
            elif at not in way:
                way.add(at)
                front += line.reads[at]
        # 2. From each piece that counts to the kernels that read it, but not by this instruction.
        found = dict[str, frozenset[int]]()
        for name in pieces:
            behind = _pieces(self._behind.get(name, _NONE))
            if all(self._nbytes.get(piece, 0) <= NUMBER_BYTES for piece in behind):
                continue
            kernels, front, seen = set[int](), [name], {i}
            while front:
                for j in line.readers.get(front.pop(), ()):
                    if j in way and j not in seen:
                        front += line.makes[j]
                    elif j not in seen and line.alive[j]:
                        kernels |= line.roots[j] or {j}
                    seen.add(j)
            found.update((p, found.get(p, frozenset()) | kernels) for p in behind)
        return found

    def _picked_share(self, i: int, step: LocalOp | Move | Loop) -> float:
        """Of the items of an instruction's first operand, the share that comes out."""
        op = self._line.ops[i]
        if op is None or not isinstance(step, LocalOp) or op.rule is None:
            return 1.0
        items = math.prod(self._sizes.shard(step, op))
        return min(1.0, math.prod(self._sizes.made(step, op)) / max(1, items))

    def _computed_inside(self, i: int, nbytes: int) -> Mapping[int, float]:
        """The dear instructions that a kernel of this one computes, with the bytes of each."""
        op = self._line.ops[i]
        found: dict[int, float] = {}
        for inside in map(self._dear.get, self._line.reads[i]):
            found.update(inside or {})
        if op is not None and self._line.fused[i] and gpu_bytes(op):
            found[i] = nbytes / item_bytes(op.results[0].dtype) * gpu_bytes(op)
        return found

    def _kernel(
        self, i: int, step: LocalOp | Loop, makes: tuple[str, ...], sources: Pieces
    ) -> Kernel:
        op = self._line.ops[i]
        assert op is not None
        if isinstance(step, Loop):
            # A loop's results take over the buffers that it starts from.
            scratch = self._inner_bytes(step, op, ChainMap(self._bitcasts, self._nbytes))
            return Kernel(i, makes, sources, scratch, in_place=True)
        scratch = 0
        if op.kind == "dot_general":
            items = self._nbytes[makes[0]] // item_bytes(op.results[0].dtype)
            shard = self._sizes.shard(step, op)
            scratch = split_bytes(op, items, step.operand_shardings[0], shard)
        light = self._line.fused[i] or is_reduction(op)
        in_place = works_in_place(op)
        work = 0.0
        product = self._product_before(i)
        if product is None and (product := self._product_added(i)) is not None:
            self._sums.add(makes[0])
        if product is not None:
            self._epilogues[product] = makes[0]
        if light and self._sizes.platform == "gpu":
            inside = self._computed_inside(i, self._result_bytes(i, step)[0])
            work = sum(inside[k] for k in sorted(inside))
        picks = (
            light
            and not is_reduction(op)
            and bool(self._picked_inside(i, step, self._nbytes[makes[0]]))
        )
        return Kernel(
            i, makes, sources, scratch, in_place, is_light=light, picks=picks, work_bytes=work
        )


# XLA combines these with their like, one kind after the other; each of the others runs by itself.
COMBINED = ("all-gather", "all-reduce", "reduce-scatter")


def moves_by_piece(block: Block) -> Mapping[str, tuple[Move, int]]:
    """By the name of a piece, its move and the number of the collective that makes it."""
    moves = (step for step in block.instructions if isinstance(step, Move))
    return {name: (move, j) for move in moves for j, name in enumerate(pieces_of(move))}


def pieces_of(move: Move) -> list[str]:
    """The names of the pieces that a move's collectives make, its result the last."""
    between = range(1, len(move.collectives))
    return [*(f"{move.result} after {j}" for j in between), move.result]


def _move_kernels(
    i: int, move: Move, sources: Pieces, result_bytes: int, mesh: MeshShape
) -> Iterator[tuple[Kernel, int]]:
    """A kernel for each collective of a move, with the bytes of the piece that it makes.

    Steps that are local run with the next collective, or with the last one.
    """
    moved, names, steps = move.collectives, pieces_of(move), list(move.steps)
    if not moved:
        is_copy = any(step.kind == IN_ROWS for step in steps)
        yield Kernel(i, (move.result,), sources, in_place=not is_copy), result_bytes
        return
    for j, (only, name) in enumerate(zip(moved, names, strict=True)):
        is_last = name == move.result
        end = next(k for k, step in enumerate(steps) if step.kind == only.kind)
        own = steps if is_last else steps[: end + 1]
        steps = steps[end + 1 :]
        gathered, scattered = only.kind == "all-gather", only.kind == "reduce-scatter"
        out = only.nbytes // mesh.size(only.axes) if scattered else only.nbytes
        # What a gather makes for a slice, or a slice for a scatter, lies nowhere else.
        is_between = (gathered and own[-1].kind != only.kind) or (
            scattered and own[0].kind != only.kind
        )
        group = (only.kind, only.axes, "" if gathered else move.value.dtype)
        kernel = Kernel(
            i, (name,), sources, only.nbytes if is_between else 0,
            in_place=only.kind == "all-reduce" and len(own) == 1,
            group=group if only.kind in COMBINED else None,
            # How much is combined counts by what comes out.
            moved_bytes=out if scattered else only.nbytes,
            is_early=gathered, part=j,
        )  # fmt: skip
        yield kernel, result_bytes if is_last else out
        sources = frozenset((name,))
