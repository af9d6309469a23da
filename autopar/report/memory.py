"""What a device holds at the peak of a step, drawn for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.peak import Peak
from autopar.ir.plan import Plan
from autopar.ir.text import show_bytes, show_seconds
from autopar.report.style import QUIET, SlashedPath, percent, plain_table
from autopar.report.view import holdings_of, price_per_gib, spec_text


def memory(plan: Plan) -> Table:
    """What one device holds at the peak of the step."""
    peak, given = plan.prediction.peak_bytes, plan.prediction.argument_bytes
    limit = plan.origin.memory_bytes
    table = plain_table("Memory of a device", "~what", ">whole", ">a device", ">of the limit")
    for h in holdings_of(plan):
        table.add_row(
            h.what, show_bytes(h.nbytes), show_bytes(h.local_bytes), percent(h.local_bytes / limit)
        )
    rest = max(0, peak - given)
    table.add_row("activations, gradients, copies", "", show_bytes(rest), percent(rest / limit))
    table.add_section()
    table.add_row("peak", "", show_bytes(peak), percent(peak / limit), style="bold")
    table.add_row("limit", "", show_bytes(limit), "")
    return table


def memory_in_full(plan: Plan) -> RenderableType:
    """What a device holds, when that is most, the largest values then, and a byte's price."""
    parts: list[RenderableType] = [memory(plan)]
    peak = plan.prediction.peak
    if peak is not None:
        parts += ["", _kinds(peak), "", _largest(peak), "", peak_text(peak)]
    return Group(*parts, _price(plan))


def peak_text(peak: Peak) -> Text:
    """When a device holds the most, in one line."""
    where = " ".join(p for p in (peak.op, peak.module, peak.line) if p)
    return Text.assemble(
        ("peak ", QUIET), f"{peak.step_share:.0%} through the step, {peak.region}: {where}"
    )


def _kinds(peak: Peak) -> Table:
    table = plain_table("Held at the peak, by kind", "~kind", ">a device", ">share")
    whole = sum(nbytes for _, nbytes in peak.totals) or 1
    for kind, nbytes in sorted(peak.totals, key=lambda t: -t[1]):
        table.add_row(kind.value, show_bytes(nbytes), percent(nbytes / whole))
    return table


def _largest(peak: Peak) -> Table:
    table = plain_table(
        "The largest values at the peak", "~what", "kind", "type", "~sharding", ">a device", "~made"
    )
    for i in peak.items:
        kind = f"{i.dtype}[{','.join(map(str, i.shape))}]"
        table.add_row(
            SlashedPath(i.name), i.kind.value, kind, Text(spec_text(i.sharding)),
            show_bytes(i.local_bytes), i.line,
        )  # fmt: skip
    return table


def _price(plan: Plan) -> Text:
    saved = price_per_gib(plan)
    if saved <= 0:
        return Text("more memory would save no time: it does not bind", style=QUIET)
    return Text.assemble(("one more GiB ", QUIET), f"would save about {show_seconds(saved)} a step")
