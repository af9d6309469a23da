"""XLA's timeline with the time of cuDNN's convolutions, each of which it takes for 10 us."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cluster.chip import Chip
from autopar.cost.prices import convolution_seconds
from autopar.ir.compiled import Compiled, Span
from autopar.ir.values import item_bytes

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = \(?(\w+)\[([\d,]*)\]", re.MULTILINE)
_CONVOLUTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.-]+) = .* custom-call\(%?([\w.-]+), %?([\w.-]+).*"
    r"dim_labels=\w+?_(\w+)->\w+,(.*) custom_call_target=\"__cudnn\$conv(\w+)\"",
    re.MULTILINE,
)
_DONE = re.compile(r"^\s*%?([\w.-]+) = .* [\w-]+-done\(%?([\w.-]+)\)", re.MULTILINE)


@dataclass(frozen=True)
class Convolution:
    """A cuDNN call: FLOPs, bytes moved, the image's features (None in groups), what it makes."""

    flops: int
    nbytes: int
    dtype: str
    features: int | None
    of_filter: bool


def with_convolutions(compiled: Compiled, chip: Chip) -> Compiled:
    """The timelines of a program and its loops walked again, with convolutions as they are priced.

    Each is walked in its order. A collective takes as long as it was seen to: one that was hidden
    stays so, as the work that hides it only grows. A program without convolutions is left as it is.
    """
    seconds = {
        name: convolution_seconds(chip, c.flops, c.nbytes, c.dtype, c.features, c.of_filter)
        for name, c in convolutions(compiled.hlo).items()
    }
    if not seconds or compiled.seconds is None:
        return compiled
    starts = dict(_DONE.findall(compiled.hlo))
    bodies: dict[str, list[Span]] = {}
    for span in compiled.spans:
        bodies.setdefault(span.computation, []).append(span)
    makespan, exposed = compiled.seconds, compiled.exposed_seconds or 0.0
    for spans in bodies.values():
        after, before = _walked(spans, seconds, starts), _walked(spans, {}, starts)
        makespan += spans[0].runs * (after[0] - before[0])
        exposed += spans[0].runs * (after[1] - before[1])
    return replace(compiled, seconds=makespan, exposed_seconds=exposed)


def convolutions(hlo: str) -> dict[str, Convolution]:
    """Each cuDNN call of an optimized program, by the instruction's name.

    FLOPs: 2 * output elements * filter elements / output features, of a gradient as of its
    convolution.
    """
    types = {
        name: (dtype, tuple(int(n) for n in dims.split(",") if n))
        for name, dtype, dims in _INSTRUCTION.findall(hlo)
    }
    found: dict[str, Convolution] = {}
    for name, one, two, labels, groups, kind in _CONVOLUTION.findall(hlo):
        # (output, filter) among the result and the two operands.
        output, kernel = {
            "BackwardInput": (one, two),
            "BackwardFilter": (two, name),
        }.get(kind, (name, two))
        sizes = {n: types[n][1] for n in (name, one, two)}
        made, taps = sizes[output], sizes[kernel]
        flops = 2 * math.prod(made) * math.prod(taps) // taps[labels.index("o")]
        nbytes = sum(math.prod(sizes[n]) * item_bytes(types[n][0]) for n in sizes)
        features = None if "group_count" in groups else taps[labels.index("i")]
        of_filter = kind == "BackwardFilter"
        found[name] = Convolution(flops, nbytes, types[name][0], features, of_filter)
    return found


def _walked(
    spans: Sequence[Span], seconds: Mapping[str, float], starts: Mapping[str, str]
) -> tuple[float, float]:
    """Makespan and exposed seconds of one run; `starts` has the start of each async op's done."""
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
