"""How long a listing takes on each device of its mesh: its kernels, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost.compute import HEAVY
from autopar.cost.kernels import Kernel, Sizes, Stored, stored_kernels
from autopar.cost.prices import Prices
from autopar.ir.graph import Graph, Op
from autopar.ir.spmd import Block, Loop, Move, Run, SpmdProgram


@dataclass(frozen=True)
class Seconds:
    """What one run of a listing takes: work on the device, and collectives."""

    compute: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        """Both, as nothing overlaps."""
        return self.compute + self.communication

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.compute + other.compute, self.communication + other.communication)

    def times(self, runs: int) -> Seconds:
        """The same several times over."""
        return Seconds(self.compute * runs, self.communication * runs)


def listing_seconds(graph: Graph, program: SpmdProgram, prices: Prices) -> Seconds:
    """One run of a listing of `graph`.

    Element-wise work is fused as `stored_kernels` has it, and pays for what it loads and stores.
    """
    sizes = Sizes(graph, prices.mesh)
    given = {
        i.value.name: sizes.of(i.value.shape, i.value.dtype, s)
        for i, s in zip(graph.inputs, program.input_shardings, strict=True)
    }
    return _Timer(sizes, prices).block(program.block, given)


class _Timer:
    """Times blocks, loops by their bodies."""

    def __init__(self, sizes: Sizes, prices: Prices) -> None:
        self._sizes, self._prices = sizes, prices

    def block(self, block: Block, given: Mapping[str, int]) -> Seconds:
        """Every kernel of a block."""
        stored = stored_kernels(block, self._sizes, given, _nothing_inside)
        total = Seconds()
        for kernel in stored.kernels:
            if kernel.at >= 0:
                total += self._kernel(block, kernel, stored)
        return total

    def _kernel(self, block: Block, kernel: Kernel, stored: Stored) -> Seconds:
        step = block.instructions[kernel.at]
        moved = sum(stored.nbytes.get(name, 0) for name in (*kernel.makes, *kernel.reads))
        if isinstance(step, Move):
            return Seconds(0.0, sum(c.seconds for c in step.collectives))
        if isinstance(step, Loop):
            return self._loop(step, stored)
        if isinstance(step, Run):
            return Seconds(self._run(step, moved))
        return Seconds()

    def _run(self, run: Run, nbytes: int) -> float:
        op = self._sizes.op(run.equation)
        if op.kind not in HEAVY:
            return self._prices.elementwise(nbytes)
        return self._prices.compute(op.flops / self._share(run), nbytes, op.results[0].dtype)

    def _share(self, run: Run) -> int:
        """Over how many devices the op's work is divided: every axis that an operand lies over."""
        laid = (*run.operand_shardings, *run.result_shardings)
        axes = {a for s in laid for dim in s.dims for a in dim}
        return self._prices.mesh.size(sorted(axes))

    def _loop(self, loop: Loop, stored: Stored) -> Seconds:
        op = self._sizes.op(loop.equation)
        total = Seconds()
        for body in loop.bodies:
            total += self.block(body, _entering(op, loop, body, stored.nbytes))
        return total.times(loop.runs)


def _entering(op: Op, loop: Loop, body: Block, nbytes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of what a body is given; of what a scan goes through, one trip's slice."""
    outer = [0 if o is None else nbytes.get(o, 0) for o in loop.operands]
    if op.kind != "scan":
        return dict.fromkeys(body.inputs, 0)
    start = op.whole("num_consts") + op.whole("num_carry")
    length = max(1, op.whole("length"))
    sizes = [n if k < start else n // length for k, n in enumerate(outer)]
    return dict(zip(body.inputs, sizes, strict=True))


def _nothing_inside(loop: Loop, op: Op, nbytes: Mapping[str, int]) -> int:
    del loop, op, nbytes
    return 0
