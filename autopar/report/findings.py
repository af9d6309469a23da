"""The findings of a step, drawn for a terminal and as JSON: the gravest first."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from autopar.ir.codec import Json
from autopar.ir.findings import BatchReading, Findings, Severity
from autopar.report.style import ACCENT, BAD, GOOD, QUIET, facts
from autopar.report.table import percent

_NOTES = 6
_STYLES = {Severity.ERROR: f"bold {BAD}", Severity.WARNING: "bold yellow", Severity.NOTE: ACCENT}


def findings(found: Findings) -> RenderableType:
    """The coverage and verdict of a step, then what stands in the way, with what to do."""
    title = Text.assemble(
        ("lint ", QUIET),
        (found.step, f"bold {ACCENT}"),
        (" for ", QUIET),
        (found.cluster, f"bold {ACCENT}"),
    )
    c = found.coverage
    pairs: list[tuple[str, str | Text]] = [
        (
            "coverage",
            f"{percent(c.flops_share)} of FLOPs and {percent(c.bytes_share)} of bytes are in ops "
            "that can be sharded",
        ),
        ("microbatches", _batch(found.batch)),
        ("verdict", _verdict(found)),
    ]
    notes = found.of(Severity.NOTE)
    grave = [f for f in found.found if f.severity is not Severity.NOTE]
    parts: list[RenderableType] = [title, facts(pairs)]
    for finding in (*grave, *notes[:_NOTES]):
        head = Text.assemble(
            (finding.severity.value, _STYLES[finding.severity]),
            f"  {finding.topic.value}",
            (f"  {finding.line}" if finding.line else "", QUIET),
            (f"  {finding.count} of them" if finding.count > 1 else "", QUIET),
        )
        said = (Text(finding.text), Text(finding.remedy, style=GOOD))
        parts += ["", head, *(Padding(text, (0, 0, 0, 2), expand=False) for text in said)]
    if len(notes) > _NOTES:
        parts += ["", Text(f"and {len(notes) - _NOTES} more notes: --json lists them", style=QUIET)]
    return Group(*parts)


def _batch(batch: BatchReading) -> str:
    if not batch.loops:
        return f"none that are exact for {batch.rows} rows" if batch.rows else "no rows were found"
    if batch.microbatches == 1:
        return f"{batch.rows} rows cannot be cut"
    loops = "1 loop" if batch.loops == 1 else f"{batch.loops} loops"
    told = [f"{batch.rows} rows may be cut: exact in {loops}"]
    told.append("all forwards first (gpipe)" if batch.barrier else "any schedule")
    if batch.hoisted:
        sums = "1 sum" if batch.hoisted == 1 else f"{batch.hoisted} sums"
        told.append(f"{sums} taken of the whole batch first")
    if batch.rescaled:
        told.append("sums scaled afterwards")
    return ", ".join(told)


def _verdict(found: Findings) -> Text:
    counts = [(len(found.of(s)), s) for s in Severity]
    told = [Text(f"{n} {s.value}{'s' * (n != 1)}", style=_STYLES[s]) for n, s in counts if n]
    return Text(", ").join(told) if told else Text("no problems found", style=GOOD)


def findings_data(found: Findings) -> dict[str, Json]:
    """The same as one JSON object; shares of one, bytes of a step over all devices."""
    c, b = found.coverage, found.batch
    return {
        "step": found.step,
        "cluster": found.cluster,
        "devices": found.devices,
        "coverage": {
            "flops": c.flops,
            "flops_share": c.flops_share,
            "bytes": c.nbytes,
            "bytes_share": c.bytes_share,
        },
        "microbatches": {
            "rows": b.rows,
            "tried": b.microbatches,
            "exact": b.loops > 0,
            "loops": b.loops,
            "hoisted": b.hoisted,
            "rescaled": b.rescaled,
            "barrier": b.barrier,
            "notes": list(b.notes),
        },
        "findings": [
            {"severity": f.severity.value, "topic": f.topic.value, "text": f.text,
             "remedy": f.remedy, "line": f.line or None, "count": f.count, "bytes": f.nbytes}
            for f in found.found
        ],
    }  # fmt: skip
