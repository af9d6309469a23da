"""What a step makes of the rows of its batch: exact microbatches, or why there are none."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autopar.errors import ArgumentError, BatchError
from autopar.ir.batching import Batching
from autopar.ir.findings import BatchReading, Finding, Severity, Topic
from autopar.ir.mesh import MeshShape
from autopar.passes.base import Setting
from autopar.planner.request import Request
from autopar.planner.sliced_step import batched
from autopar.planner.source import Source

_LINE = re.compile(r"[\w./-]+\.py:\d+")
_ALWAYS = "microbatches=1 is always exact."
_RESCALED = "a scalar of the whole batch only scales sums: they are multiplied by it afterwards"


def read_rows(source: Source, request: Request) -> tuple[BatchReading, tuple[Finding, ...]]:
    """How the batch can be cut, and what is found on the way.

    Where the request says no number of microbatches, the fewest that the rows allow are tried, and
    that there are none is a warning; else it is an error.
    """
    wanted = request.microbatches if request.microbatches != 1 else None
    rows = 0
    try:
        rows = source.rows
        count = wanted or next((m for m in range(2, rows + 1) if rows % m == 0), 1)
        trace, batching = _batching(source, request, count)
    except (BatchError, ArgumentError) as error:
        severity = Severity.ERROR if wanted else Severity.WARNING
        return BatchReading(rows, wanted or 0), (_refusal(error, severity),)
    reading = BatchReading(
        rows=rows,
        microbatches=count,
        loops=max(1, batching.loops),
        hoisted=len(batching.hoist.values) if batching.hoist is not None else 0,
        rescaled=trace,
        barrier=batching.barrier,
        notes=((_RESCALED,) if trace else ()) + batching.notes,
    )
    return reading, tuple(_findings(batching))


def _batching(source: Source, request: Request, count: int) -> tuple[bool, Batching]:
    """How so many microbatches make up the step, and whether it is rescaled for that."""
    given = source.trace_at(count, cut=False)
    setting = Setting(request.cluster, MeshShape((), ()), request.budget_bytes)
    trace, batching = batched(given, request.rules, setting)
    return trace is not given, batching


def _refusal(error: Exception, severity: Severity) -> Finding:
    """An error of a headline, bullets and a remedy, as a finding."""
    headline, *rest = str(error).splitlines()
    faults = [line.removeprefix("* ") for line in rest if line.startswith("* ")]
    remedy = rest[-1] if len(rest) > len(faults) else _ALWAYS
    line = _LINE.search(" ".join(faults) or headline)
    text = "; ".join([headline.rstrip("."), *faults])
    return Finding(severity, Topic.BATCH, text, remedy, line=line[0] if line else "")


def _findings(batching: Batching) -> Iterator[Finding]:
    if batching.barrier:
        note = next((n for n in batching.notes if n.startswith("all forwards")), "")
        line = _LINE.search(note)
        yield Finding(
            Severity.NOTE,
            Topic.BARRIER,
            note or "all forwards come before all backwards",
            "In stages it runs under gpipe alone, which holds every microbatch's activations.",
            line=line[0] if line else "",
        )
