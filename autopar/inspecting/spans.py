"""The kernels of a step on one device's two streams, few enough to draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.cost.overlap import Timed
from autopar.inspecting.flow import Flow
from autopar.ir.inspection import KernelSpan
from autopar.ir.spmd import Loop, Move

_MOST = 2000
_MOST_OF_A_LOOP = 200_000


def kernel_spans(flow: Flow, most: int = _MOST) -> tuple[KernelSpan, ...]:
    """The kernels of a listing by their start, short neighbors merged until there are few.

    They end where the last kernel does: that what is hidden is partly waited for after all (see
    `autopar.cost.overlap`) is in the step's seconds and not in theirs.
    """
    spans = sorted(_spans(flow, flow.timed, 0.0), key=lambda s: (s.start_seconds, s.stream))
    short = max((s.end_seconds for s in spans), default=0.0) / most
    while len(spans) > most:
        spans = _merged(spans, short)
        short *= 2
    return tuple(spans)


def _spans(flow: Flow, timed: Timed, begin: float) -> Iterator[KernelSpan]:
    """The kernels of a block that begins then, loops trip by trip where that is not too much."""
    streams = timed.streams
    for k, (kernel, (start, end)) in enumerate(zip(timed.kernels, streams.spans, strict=True)):
        if start == end:
            continue
        step = timed.block.instructions[kernel.at] if kernel.at >= 0 else None
        bodies = timed.bodies.get(k, ())
        if isinstance(step, Loop) and step.runs * sum(map(_count, bodies)) <= _MOST_OF_A_LOOP:
            yield from _trips(flow, bodies, step.runs, begin + start)
            continue
        label = flow.label(step)
        if isinstance(step, Move) and len(kernel.makes) > 1:
            label += f" and {len(kernel.makes) - 1} more"
        # A collective that nothing may run beside is waited for, though it stands among the work.
        is_sent = isinstance(step, Move) and bool(step.collectives)
        stream = "wires" if is_sent else "work"
        yield KernelSpan(stream, begin + start, begin + end, label, flow.spot(step))


def _trips(flow: Flow, bodies: Sequence[Timed], runs: int, begin: float) -> Iterator[KernelSpan]:
    for _ in range(runs):
        for body in bodies:
            yield from _spans(flow, body, begin)
            begin += body.seconds.total


def _count(timed: Timed) -> int:
    """The number of spans of a block, loops trip by trip."""
    loops = {k: timed.block.instructions[timed.kernels[k].at] for k in timed.bodies}
    inside = sum(
        loop.runs * sum(map(_count, timed.bodies[k]))
        for k, loop in loops.items()
        if isinstance(loop, Loop)
    )
    return len(timed.kernels) + inside


def _merged(spans: Sequence[KernelSpan], short: float) -> list[KernelSpan]:
    """Spans of a stream that follow each other within a `short` time, as one."""
    done: list[KernelSpan] = []
    for stream in ("work", "wires"):
        group: list[KernelSpan] = []
        for span in (s for s in spans if s.stream == stream):
            if group and span.end_seconds - group[0].start_seconds > short:
                done.append(_one(group))
                group = []
            group.append(span)
        if group:
            done.append(_one(group))
    return sorted(done, key=lambda s: (s.start_seconds, s.stream))


def _one(group: Sequence[KernelSpan]) -> KernelSpan:
    longest = max(group, key=lambda s: s.end_seconds - s.start_seconds)
    label = longest.label if len(group) == 1 else f"{longest.label.split(' + ')[0]} + others"
    return replace(
        longest,
        start_seconds=group[0].start_seconds,
        end_seconds=group[-1].end_seconds,
        label=label,
    )
