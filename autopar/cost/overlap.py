"""How long a listing takes where collectives run beside the work that does not wait for them.

A device has two streams, work and wires, each of which runs one kernel at a time. Kernels are
placed from the last to the first, of those that may be placed the one with the longest way ahead of
it (list scheduling by critical path), as XLA's latency-hiding scheduler does.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.kernels import Kernel, Sizes, stored_kernels
from autopar.cost.listing import KernelTimes, Seconds, entering
from autopar.cost.order import combined, depth_first
from autopar.cost.prices import Prices
from autopar.ir.graph import Graph, Op
from autopar.ir.spmd import Block, Loop, Move, SpmdProgram

# Of what could be hidden this stays exposed: XLA combines collectives into few that start late and
# hold up much, and does not look far ahead. From its H100 timelines of GPT-1.3B: with dp, fsdp,
# megatron and auto 0.16 to 0.32 of it.
_UNHIDDEN_SHARE = 0.2


def listing_seconds(graph: Graph, program: SpmdProgram, prices: Prices) -> Seconds:
    """One run of a listing of `graph`.

    Element-wise work is fused as `stored_kernels` has it, and pays for what it loads and stores;
    neighboring collectives run as one, as `combined` has it; loops wait for what is before them.
    """
    sizes = Sizes(graph, prices.mesh, prices.cluster.chip.platform)
    return _Timer(sizes, prices).block(program.block, sizes.inputs(program))


class _Timer:
    """Times blocks, loops by their bodies."""

    def __init__(self, sizes: Sizes, prices: Prices) -> None:
        self._sizes, self._prices = sizes, prices

    def block(self, block: Block, given: Mapping[str, int]) -> Seconds:
        """The whole of a block on two streams."""
        stored = stored_kernels(block, self._sizes, given, _nothing_inside)
        stored = depth_first(combined(stored), block.outputs)
        times = KernelTimes(self._sizes, self._prices, block, stored)
        spent: list[Seconds] = []
        for kernel in stored.kernels:
            step = block.instructions[kernel.at] if kernel.at >= 0 else None
            if isinstance(step, Loop):
                spent.append(self._loop(step, stored.nbytes))
            else:
                spent.append(times.seconds(kernel))
        kernels, beside = stored.kernels, self._prices.beside
        return in_two_streams(kernels, spent, [_kind(block, k) in beside for k in kernels])

    def _loop(self, loop: Loop, nbytes: Mapping[str, int]) -> Seconds:
        op = self._sizes.op(loop.equation)
        total = Seconds()
        for body in loop.bodies:
            total += self.block(body, entering(op, loop, body, nbytes))
        return total.times(loop.runs)


def _kind(block: Block, kernel: Kernel) -> str:
    """The kind of a kernel's first collective, "" of work."""
    step = block.instructions[kernel.at] if kernel.at >= 0 else None
    return step.collectives[0].kind if isinstance(step, Move) and step.collectives else ""


def in_two_streams(
    kernels: Sequence[Kernel], spent: Sequence[Seconds], beside: Sequence[bool]
) -> Seconds:
    """What kernels take together, those that may run `beside` work on a stream of their own."""
    total = sum(spent, Seconds())
    if not any(beside):
        return total
    tasks = [
        _Task(s.communication, True) if is_beside else _Task(s.total, False)
        for s, is_beside in zip(spent, beside, strict=True)
    ]
    waiting = _makespan(kernels, tasks) - total.compute
    hidden = max(0.0, total.communication - waiting)
    return Seconds(total.compute, total.communication, waiting + _UNHIDDEN_SHARE * hidden)


@dataclass(frozen=True, slots=True)
class _Task:
    seconds: float
    on_wires: bool


def _makespan(kernels: Sequence[Kernel], tasks: Sequence[_Task]) -> float:
    """When the last kernel ends."""
    made = {name: k for k, kernel in enumerate(kernels) for name in kernel.makes}
    needs = [{made[r] for r in kernel.reads if r in made} - {k} for k, kernel in enumerate(kernels)]
    users: list[list[int]] = [[] for _ in kernels]
    for k, need in enumerate(needs):
        for n in need:
            users[n].append(k)
    ahead = [0.0] * len(kernels)
    for k, need in enumerate(needs):
        ahead[k] = tasks[k].seconds + max((ahead[n] for n in need), default=0.0)
    return _run(tasks, [len(u) for u in users], [sorted(n) for n in needs], ahead)


def _run(
    tasks: Sequence[_Task], waiting: list[int], needs: Sequence[Sequence[int]],
    ahead: Sequence[float],
) -> float:  # fmt: skip
    """Two streams from the last kernel to the first, as XLA's scheduler goes.

    Of what is ready, because all that reads it is placed, the one with most ahead of it goes first.
    """
    ready: tuple[list[tuple[float, int]], ...] = ([], [])  # by stream: (-seconds ahead, kernel)
    running: list[tuple[float, int]] = []  # (end, kernel)
    busy = [False, False]
    now = 0.0
    for k, count in enumerate(waiting):
        if not count:
            heapq.heappush(ready[tasks[k].on_wires], (-ahead[k], k))
    while running or ready[0] or ready[1]:
        for stream in (0, 1):
            if ready[stream] and not busy[stream]:
                _, k = heapq.heappop(ready[stream])
                busy[stream] = True
                heapq.heappush(running, (now + tasks[k].seconds, k))
        now, k = heapq.heappop(running)
        busy[tasks[k].on_wires] = False
        for n in needs[k]:
            waiting[n] -= 1
            if not waiting[n]:
                heapq.heappush(ready[tasks[n].on_wires], (-ahead[n], n))
    return now


def _nothing_inside(loop: Loop, op: Op, nbytes: Mapping[str, int]) -> int:
    del loop, op, nbytes
    return 0
