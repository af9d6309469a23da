"""What a device holds at the peak of a step, drawn for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.ir.inspection import MemoryCurve
from autopar.ir.peak import Peak
from autopar.ir.plan import Plan
from autopar.ir.sharding import spec_text
from autopar.ir.text import show_bytes, show_seconds
from autopar.report.curve import memory_over_time
from autopar.report.listing import Listing
from autopar.report.style import QUIET, percent
from autopar.report.view import holdings_of, price_per_gib


def memory(plan: Plan) -> Listing:
    """What one device holds at the peak of the step."""
    peak, given = plan.prediction.peak_bytes, plan.prediction.argument_bytes
    limit = plan.origin.memory_bytes
    held = [
        (h.what, show_bytes(h.nbytes), show_bytes(h.local_bytes), percent(h.local_bytes / limit))
        for h in holdings_of(plan)
    ]
    rest = max(0, peak - given)
    others = ("activations, gradients, copies", "", show_bytes(rest), percent(rest / limit))
    return Listing(
        f"Memory of a device at the peak; limit {show_bytes(limit)}",
        ("/what", ">whole", ">a device", ">share"),
        [*held, others],
        ("peak", "", show_bytes(peak), percent(peak / limit)),
    )


def memory_in_full(plan: Plan, curves: Sequence[MemoryCurve] = ()) -> RenderableType:
    """What a device holds, when that is most, the largest values then, and a byte's price."""
    parts: list[RenderableType] = [memory(plan)]
    peak = plan.prediction.peak
    if curves:
        parts += ["", memory_over_time(curves)]
    if peak is not None:
        parts += ["", _kinds(peak), "", _largest(peak), "", peak_text(peak)]
    return Group(*parts, _price(plan))


def peak_text(peak: Peak) -> Text:
    """When a device holds the most, in one line."""
    where = " ".join(p for p in (peak.op, peak.module, peak.line) if p)
    return Text.assemble(
        ("peak ", QUIET), f"{peak.step_share:.0%} through the step, {peak.region}: {where}"
    )


def _kinds(peak: Peak) -> Listing:
    whole = sum(nbytes for _, nbytes in peak.totals) or 1
    rows = [
        (kind.value, show_bytes(nbytes), percent(nbytes / whole))
        for kind, nbytes in sorted(peak.totals, key=lambda t: -t[1])
    ]
    return Listing("Held at the peak, by kind", ("kind", ">a device", ">share"), rows)


def _largest(peak: Peak) -> Listing:
    rows = [
        (
            i.name, i.kind.value, f"{i.dtype}[{','.join(map(str, i.shape))}]",
            spec_text(i.sharding), show_bytes(i.local_bytes), i.line,
        )
        for i in peak.items
    ]  # fmt: skip
    columns = ("/what", "kind", "type", "sharding", ">a device", "made")
    return Listing("The largest values at the peak", columns, rows)


def _price(plan: Plan) -> Text:
    saved = price_per_gib(plan)
    if saved <= 0:
        return Text("more memory would save no time: it does not bind", style=QUIET)
    return Text.assemble(("one more GiB ", QUIET), f"would save about {show_seconds(saved)} a step")
