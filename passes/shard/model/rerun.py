"""The kernels of a step in which the backward pass makes chosen values of the forward pass again.

What such a step would hold is read off its kernels, as that of every step is: nothing is traced,
sharded or lowered for it. For the values it is given, that is within some percent of what the
rewritten step then holds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.cost.kernels import COPY, Kernel, Pieces, Stored
from autopar.cost.memory import StepKernels, region_of
from autopar.ir.graph import Graph
from autopar.ir.listing import Block, LocalOp, Loop, Move
from autopar.passes.shard.model.costs import is_elementwise

_NONE: Pieces = frozenset()


@dataclass(frozen=True)
class Brought:
    """Stacks that a backward scan no longer reads, and what it holds instead, in bytes."""

    backward: int
    dropped: frozenset[str]
    stacks: Mapping[str, int]
    reads: tuple[str, ...]
    inside: int


class Passes:
    """The kernels of a step by pass: what each piece is of, who makes it and who reads it.

    That is the same whatever is made again.
    """

    def __init__(self, graph: Graph, step: StepKernels) -> None:
        self.graph, self.block, self.stored = graph, step.block, step.stored
        self.value_of = dict(values_of(graph, step.block))
        self.makers = {name: k for k in step.stored.kernels for name in k.makes}
        self._regions = dict(_regions_of(graph, step.block))
        self._are_backward = list(self._backward_kernels())
        self.last: dict[str, int] = {}  # the last kernel that reads each piece
        self.readers = Counter[str]()  # the kernels of the backward pass that do
        for at, kernel, is_backward in self.walked():
            self.last.update(dict.fromkeys(kernel.reads, at))
            self.readers.update(kernel.reads if is_backward else ())

    def walked(self) -> Iterator[tuple[int, Kernel, bool]]:
        """The kernels in order, each with its number, and if it is of the backward pass."""
        return zip(itertools.count(), self.stored.kernels, self._are_backward, strict=False)

    def pieces_of(self, values: Collection[str]) -> set[str]:
        """The pieces of some values that the forward pass makes; a copy is of what it copies."""
        found = set[str]()
        for _, kernel, is_backward in self.walked():
            copied = kernel.at == COPY and any(self.value_of.get(r) in values for r in kernel.reads)
            for name in () if is_backward else kernel.makes:
                if self.value_of[name] in values if name in self.value_of else copied:
                    found.add(name)
        return found

    def _backward_kernels(self) -> Iterator[bool]:
        """For each kernel, True if it is of the backward pass; a copy is of its reader's."""
        regions = [""]
        for kernel in reversed(self.stored.kernels):
            regions.append(self._region(kernel) if kernel.at >= 0 else regions[-1])
        return (region == "backward" for region in reversed(regions[1:]))

    def _region(self, kernel: Kernel) -> str:
        """The region of a kernel; of collectives that run as one, the latest of theirs."""
        regions = {self._regions[n] for n in kernel.makes if n in self._regions}
        return next((r for r in ("update", "backward", "forward") if r in regions), "")


class Rerun:
    """The kernels of a step in which backward ones make chosen values again.

    1. Each piece of a chosen value is made again before the first backward kernel that reads it;
       from then on all read the new piece:

           b: a   c: b  ...  g: c, d    becomes    b: a   c: b  ...  b': a   c': b'   g: c', d

       so the piece of the forward pass is gone when that has read it last, and what its kernel
       reads is held until it is made again.
    2. That begins behind a fence, which waits for another piece that the reader needs (d).
    3. Element-wise work that one backward kernel reads is computed in that kernel.
    4. A collective's result that is gone by then is moved again.
    5. What a paired backward scan makes again, its partner does not stack.
    """

    def __init__(
        self, passes: Passes, chosen: Collection[str], scans: Mapping[int, Brought]
    ) -> None:
        self._passes, self._scans = passes, scans
        self._nbytes: dict[str, int] = dict(passes.stored.nbytes)
        self._chosen = passes.pieces_of(chosen)
        again = (passes.makers[name].reads for name in self._chosen)
        self._readers = passes.readers + Counter(itertools.chain.from_iterable(again))
        self._instead: dict[str, Pieces] = {}  # what is read where a piece was
        self._kernels: list[Kernel] = []
        self._of_backward: set[str] = set()  # pieces of the backward pass so far
        # Pieces that wait for a kernel further down, as for others of a combined collective.
        self._unmade, self._waiting = set(passes.makers), set[str]()
        self._latest: Pieces = _NONE  # the latest of the backward pass that waits for none

    def stored(self) -> Stored:
        """The kernels in order, and their pieces."""
        entries = {b.backward: b for b in self._scans.values()}
        dropped = _NONE.union(*(b.dropped for b in self._scans.values()))
        for name in self._nbytes:  # the stack of a trip outside its loop ends in the stack's name
            if self._passes.value_of.get(name.rsplit(" ", 1)[-1]) in dropped:
                self._nbytes[name] = 0
        for at, kernel, is_backward in self._passes.walked():
            scan = self._scan(kernel)
            if scan in self._scans:
                stacks = self._scans[scan].stacks
                self._nbytes.update(stacks)
                kernel = replace(kernel, makes=(*kernel.makes, *stacks))
            if scan in entries:
                given = (*entries[scan].stacks, *entries[scan].reads)
                reads = kernel.reads.union(n for n in given if n in self._nbytes)
                scratch = kernel.scratch_bytes + entries[scan].inside
                kernel = replace(kernel, reads=reads, scratch_bytes=scratch)
            if is_backward:
                kernel = replace(kernel, reads=self._reads(kernel, at))
            self._note(kernel, is_backward)
            self._kernels.append(kernel)
        return replace(self._passes.stored, kernels=tuple(self._kernels), nbytes=self._nbytes)

    def _note(self, kernel: Kernel, is_backward: bool) -> None:
        """Mark what a kernel makes, and if it is there with all that it was made from."""
        self._unmade.difference_update(kernel.makes)
        self._of_backward.update(kernel.makes if is_backward else ())
        if not (self._unmade.isdisjoint(kernel.reads) and self._waiting.isdisjoint(kernel.reads)):
            self._waiting.update(kernel.makes)
        elif is_backward:
            self._latest = frozenset(kernel.makes[-1:])

    def _reads(self, kernel: Kernel, at: int) -> Pieces:
        """The pieces that a kernel reads, those made again in place of the first ones."""
        if self._chosen.isdisjoint(kernel.reads):
            return kernel.reads
        fence, first, known = f"fence before {at}", len(self._kernels), len(self._instead)
        reads = _NONE.union(*(self._again(n, at, fence) for n in sorted(kernel.reads)))
        again = self._kernels[first:]
        if again or fence in reads:
            starts = _NONE.union(*(k.reads for k in again))
            starts -= {fence, *(made for k in again for made in k.makes)}
            # All that reads what is made again waits for the fence, not this reader alone: so the
            # fence must not wait for one of them.
            near = [
                name
                for name in sorted(self._of_backward & kernel.reads)
                if name not in self._waiting or not self._waits_for_reader(name, known)
            ]
            trigger = frozenset(near[-1:]) or self._latest
            self._nbytes[fence] = 0
            self._kernels.insert(first, Kernel(COPY, (fence,), starts | trigger))
        return reads

    def _waits_for_reader(self, name: str, known: int) -> bool:
        """True if a piece waits for a kernel further down that reads what may be made again.

        That is any chosen piece, and what is read otherwise since so many pieces were.
        """
        pieces = self._chosen.union(itertools.islice(self._instead, known, None))
        found, waiting = {name}, [name]
        while waiting:
            piece = waiting.pop()
            reads = self._passes.makers[piece].reads
            if piece in self._unmade and not reads.isdisjoint(pieces):
                return True
            late = {n for n in reads if n in self._unmade or n in self._waiting} - found
            found |= late
            waiting += sorted(late)
        return False

    def _again(self, name: str, at: int, fence: str) -> Pieces:
        """The pieces that are read at a kernel in place of one."""
        if name in self._instead:
            return self._instead[name]
        maker = self._passes.makers.get(name)
        is_gone = maker is not None and self._passes.last.get(name, -1) < at and self._moves(maker)
        if maker is None or not (name in self._chosen or is_gone):
            return frozenset((name,))
        reads = _NONE.union(*(self._again(n, at, fence) for n in sorted(maker.reads)), {fence})
        if self._readers[name] <= 1 and self._is_elementwise(maker):
            self._instead[name] = reads
            return reads
        for made in maker.makes:
            self._instead[made] = frozenset((f"{made}'",))
            self._nbytes[f"{made}'"] = self._nbytes[made]
        self._kernels.append(replace(maker, makes=tuple(f"{m}'" for m in maker.makes), reads=reads))
        return self._instead[name]

    def _moves(self, kernel: Kernel) -> bool:
        """True if it moves what a value is kept as, which need not be kept as well."""
        step = kernel.instruction(self._passes.block)
        return isinstance(step, Move) and step.source == step.value.name

    def _is_elementwise(self, kernel: Kernel) -> bool:
        step = kernel.instruction(self._passes.block)
        return isinstance(step, LocalOp) and is_elementwise(self._passes.graph.op_at(step.equation))

    def _scan(self, kernel: Kernel) -> int:
        """The position of the op that is a loop; -1 for others."""
        step = kernel.instruction(self._passes.block)
        return step.equation[0] if isinstance(step, Loop) else -1


def values_of(graph: Graph, block: Block) -> Iterator[tuple[str, str]]:
    """The value that each piece is of, bodies of loops included."""
    for step in block.instructions:
        if isinstance(step, Move):
            yield step.result, step.value.name
        elif isinstance(step, LocalOp | Loop):
            op = graph.op_at(step.equation)
            yield from ((n, v.name) for n, v in zip(step.results, op.results, strict=True))
        for body in step.bodies if isinstance(step, Loop) else ():
            yield from values_of(graph, body)


def _regions_of(graph: Graph, block: Block) -> Iterator[tuple[str, str]]:
    """The region of what makes each piece."""
    for step in block.instructions:
        region = region_of(graph, step)
        results = (step.result,) if isinstance(step, Move) else step.results
        yield from ((name, region) for name in results)
