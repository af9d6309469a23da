"""XLA's timeline with the time of cuDNN's convolutions, each of which it takes for 10 us."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cluster.chip import Chip
from autopar.ir.compiled import Compiled, Span

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = \(?\w+\[([\d,]*)\]", re.MULTILINE)
_CONVOLUTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.-]+) = .* custom-call\(%?([\w.-]+), %?([\w.-]+).*"
    r"dim_labels=\w+?_(\w+)->\w+, custom_call_target=\"__cudnn\$conv(\w+)\"",
    re.MULTILINE,
)
_DONE = re.compile(r"^\s*%?([\w.-]+) = .* [\w-]+-done\(%?([\w.-]+)\)", re.MULTILINE)


def with_convolutions(compiled: Compiled, chip: Chip) -> Compiled:
    """The timeline walked again, in its order, with what convolutions take by their FLOPs.

    A collective takes as long as it was seen to: one that was hidden stays so, as the work that
    hides it only grows. A program without convolutions is left as it is.
    """
    seconds = {
        name: _seconds(flops, chip) for name, flops in convolution_flops(compiled.hlo).items()
    }
    if not seconds or compiled.seconds is None:
        return compiled
    makespan, exposed = _walked(compiled.spans, seconds, dict(_DONE.findall(compiled.hlo)))
    return replace(compiled, seconds=makespan, exposed_seconds=exposed)


def convolution_flops(hlo: str) -> dict[str, int]:
    """The FLOPs of each cuDNN call of an optimized program, by the instruction's name.

    2 * output elements * filter elements / output features, of a gradient as of its convolution.
    """
    sizes = {
        name: tuple(int(n) for n in dims.split(",") if n)
        for name, dims in _INSTRUCTION.findall(hlo)
    }
    found: dict[str, int] = {}
    for name, one, two, labels, kind in _CONVOLUTION.findall(hlo):
        # (output, filter) among the result and the two operands.
        output, kernel = {
            "BackwardInput": (one, two),
            "BackwardFilter": (two, name),
        }.get(kind, (name, two))
        features = sizes[kernel][labels.index("o")]
        found[name] = 2 * math.prod(sizes[output]) * math.prod(sizes[kernel]) // features
    return found


def _seconds(flops: int, chip: Chip) -> float:
    """What a matmul of so many FLOPs would take."""
    peak = chip.flops_for("bf16") * chip.compute_efficiency
    return (flops + chip.half_flops) / peak + chip.launch_seconds


def _walked(
    spans: Sequence[Span], seconds: Mapping[str, float], starts: Mapping[str, str]
) -> tuple[float, float]:
    """Makespan and exposed seconds; `starts` has the start of each async op's done."""
    begun = set(starts.values())
    clock = exposed = before = 0.0
    latest = ""
    ended: dict[str, tuple[float, float]] = {}
    for span in sorted(spans, key=lambda s: s.start):
        # A gap is a wait for a collective: the one that is done, or the last that was started.
        waits_for = starts.get(span.name, latest)
        if span.start > before and waits_for:
            old, new = ended[waits_for]
            ready = new + span.start - old
            exposed += max(0.0, ready - clock)
            clock = max(clock, ready)
        clock += seconds.get(span.name, span.seconds)
        before = max(before, span.end)
        ended[span.name] = span.end, clock
        latest = span.name if span.name in begun else latest
    return clock, exposed
