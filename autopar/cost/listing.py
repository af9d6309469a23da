"""Seconds of the kernels of a listing on each device of its mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.kernels import Kernel, Sizes, Stored
from autopar.cost.prices import Prices
from autopar.ir.control_flow import ControlFlow
from autopar.ir.listing import Block, LocalOp, Loop, Move
from autopar.rules import HEAVY


@dataclass(frozen=True)
class Seconds:
    """Seconds of one run of a listing: work on the device, and collectives.

    `exposed` is the part of the collectives that no work hides, `arithmetic` the part of the work
    that the arithmetic units bound; memory bandwidth bounds the rest.
    """

    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    arithmetic: float = 0.0

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
        )

    def times(self, runs: int) -> Seconds:
        """The same several times over, one after the other."""
        return Seconds(
            self.compute * runs, self.communication * runs, self.exposed * runs,
            self.arithmetic * runs,
        )  # fmt: skip


class KernelTimes:
    """Times the kernels of a block that are no loops."""

    def __init__(self, sizes: Sizes, prices: Prices, block: Block, stored: Stored) -> None:
        self._sizes, self._prices, self._block, self._stored = sizes, prices, block, stored
        self._moves = {m.result: m for m in block.instructions if isinstance(m, Move)}

    def seconds(self, kernel: Kernel) -> Seconds:
        """Seconds of one run of a kernel, with its collectives wholly exposed."""
        if kernel.at < 0:  # a copy
            copied = sum(self._stored.nbytes.get(name, 0) for name in kernel.makes)
            return Seconds(self._prices.elementwise(2 * copied))
        step = self._block.instructions[kernel.at]
        if isinstance(step, Move):
            return self._moving([self._moves[name] for name in kernel.makes], kernel)
        if isinstance(step, LocalOp):
            return self._run(step, self._moved(kernel))
        return Seconds()

    def _moved(self, kernel: Kernel) -> int:
        nbytes = self._stored.nbytes
        return sum(nbytes.get(name, 0) for name in (*kernel.makes, *kernel.reads))

    def _moving(self, moves: Sequence[Move], kernel: Kernel) -> Seconds:
        """A move's collectives; of several that run as one, one collective of all their bytes."""
        if not any(m.collectives for m in moves):
            return Seconds(self._prices.elementwise(self._moved(kernel)))
        if len(moves) == 1:
            seconds = sum(c.seconds for c in moves[0].collectives)
        else:
            first = moves[0].collectives[0]
            nbytes = sum(c.nbytes for m in moves for c in m.collectives)
            seconds = self._prices.collective(first.kind, nbytes, first.axes)
        return Seconds(0.0, seconds, seconds)

    def _run(self, run: LocalOp, nbytes: int) -> Seconds:
        op = self._sizes.op(run.equation)
        if op.kind not in HEAVY:  # and so bound by memory
            return Seconds(self._prices.elementwise(nbytes))
        share = run.share(self._prices.mesh)
        taken, fewest = (self._prices.kernel(op, n, share) for n in (nbytes, 0))
        return Seconds(taken, arithmetic=taken if taken <= fewest else 0.0)


def entering(flow: ControlFlow, loop: Loop, b: int, nbytes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of what a body is given; of what a scan goes through, one trip's slice."""
    body = loop.bodies[b]
    if flow.kind != "scan":
        return dict.fromkeys(body.inputs, 0)
    outer = [0 if o is None else nbytes.get(o, 0) for o in loop.operands]
    trips = max(1, flow.trips)
    sizes = [n // trips if p.by_row else n for n, p in zip(outer, flow.operands, strict=True)]
    return dict(zip(body.inputs, sizes, strict=True))
