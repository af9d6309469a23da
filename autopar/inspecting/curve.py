"""The bytes that a device of each submesh holds over a step, as the predicted peak has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.cost.memory import held_while
from autopar.inspecting.flow import Flow
from autopar.inspecting.reopen import Opened
from autopar.inspecting.stage_levels import level_of, stage_levels
from autopar.ir.inspection import Level, MemoryCurve

_MOST = 200


def memory_curves(opened: Opened, flows: Sequence[Flow]) -> tuple[MemoryCurve, ...]:
    """The curve of each submesh; the highest level of all is the plan's predicted peak."""
    laid, pipeline, limit = opened.laid, opened.plan.pipeline, opened.plan.origin.memory_bytes
    if laid is None or pipeline is None:
        return (MemoryCurve(0, _thinned(list(_levels(flows[0]))), limit),)
    levels = stage_levels(pipeline, laid, flows)
    return tuple(MemoryCurve(k, _thinned(held), limit) for k, held in enumerate(levels))


def _levels(flow: Flow) -> Iterator[Level]:
    """Levels of one program: kernels in the order in which memory is counted.

    Each takes its work and what is waited for of its collectives; a loop's trips are one.
    """
    listed, timed = flow.listed, flow.timed
    spent = {kernel.makes[0]: s.total for _, kernel, s in timed.spent() if kernel.makes}
    mesh, platform = listed.prices.mesh, listed.prices.cluster.chip.platform
    held = list(held_while(listed.graph, listed.program, mesh, platform))
    taken = [spent.get(h.kernel.makes[0], 0.0) if h.kernel.makes else 0.0 for h in held]
    scale, now = timed.seconds.total / (sum(taken) or 1.0), 0.0
    for h, seconds in zip(held, taken, strict=True):
        step = h.block.instructions[h.kernel.at] if h.kernel.at >= 0 else None
        yield level_of(now * scale, flow.label(step), h.by_kind)
        now += seconds


def _thinned(levels: list[Level]) -> tuple[Level, ...]:
    """The highest and the lowest of each short time, where there are many."""
    if len(levels) <= _MOST:
        return tuple(levels)
    bins = _MOST // 2
    whole = levels[-1].seconds or 1.0
    kept: dict[int, list[Level]] = {}
    for level in levels:
        found = kept.setdefault(min(bins - 1, int(level.seconds / whole * bins)), [level, level])
        if level.nbytes > found[0].nbytes:
            found[0] = level
        if level.nbytes < found[1].nbytes:
            found[1] = level
    pairs = (sorted(found, key=lambda level: level.seconds) for found in kept.values())
    return tuple(dict.fromkeys(level for pair in pairs for level in pair))
