"""An explanation and a counterfactual, drawn for a terminal and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import cast

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from autopar.ir.codec import Json
from autopar.ir.explanation import Alternative, Counterfactual, Explanation, Price, TrafficChange
from autopar.ir.paths import common_path, counted_paths, unnumbered
from autopar.ir.text import show_bytes, show_seconds, show_type
from autopar.report.style import ACCENT, BAD, GOOD, QUIET, facts
from autopar.report.table import Table, percent, rest

_SHOWN = 3  # of each list in the terminal
_TOLD = 5  # changes of an alternative
_MOVED = 10  # rows of arguments that move along
_EQUAL = 1e-6  # of a step: what is nearer is as good


def explanation(found: Explanation) -> RenderableType:
    """Why something is sharded as it is: in a sentence, then its facts and the next best."""
    kind, price = show_type(found.dtype, found.shape), found.price
    where = f" on mesh{found.submesh}" if found.submesh else ""
    sharding = Text.assemble(
        (found.choice, "bold"), f"  {kind}{where}, {show_bytes(found.local_bytes)} on each device"
    )
    step = Text.assemble(
        (show_seconds(price.seconds), "bold"),
        f" predicted, {show_seconds(price.exposed_seconds)} of it exposed communication; "
        f"{show_bytes(price.peak_bytes)} a device",
    )
    pairs: list[tuple[str, str | Text]] = [("sharding", sharding), ("step", step)]
    if found.shared_by:
        pairs.append(("shared by", _several(found.shared_by)))
    pairs += _facts_of("read", found.reads)
    pairs += _facts_of("limits", found.binds)
    if found.others:
        pairs.append(("also", f"{_several(found.others)} match: give a whole path"))
    title = Text.assemble(("why ", QUIET), (found.subject, f"bold {ACCENT}"))
    parts: list[RenderableType] = [title, Text(headline(found)), "", facts(pairs), ""]
    return Group(*parts, *_alternatives(found))


def headline(found: Explanation) -> str:
    """The explanation in a sentence or two: what the choice spares, and the next best's price."""
    first = f": {found.reads[0]}" if found.reads else ""
    return f"It is sharded as {found.choice}{first}. {_next_best(found)}"


def _next_best(found: Explanation) -> str:
    fitting = [a for a in found.alternatives if a.price is not None]
    if not found.alternatives:
        return "There is no other choice."
    if not fitting:
        nearest = found.alternatives[0]
        return f"No other choice fits. Of {nearest.choice}: {nearest.refusal}."
    equal = [a for a in fitting if abs(_more(found.price, a)) <= _EQUAL]
    other = next((a for a in fitting if a not in equal), None)
    text = f"{equal[0].choice} is as good. " if equal else ""
    if other is None:
        return text.strip()
    assert other.price is not None
    share, seconds = _more(found.price, other), abs(other.price.seconds - found.price.seconds)
    who, word = f"Yet {other.choice}", "less"
    if share > 0:
        who, word = f"The next best, {other.choice},", "more"
    taken = f"{show_seconds(seconds)} ({percent(abs(share))}) {word}"
    reason = f": {other.changes[0]}" if other.changes else ""
    return f"{text}{who} would take {taken} a step{reason}."


def _more(price: Price, other: Alternative) -> float:
    """The share of a step that an alternative takes more."""
    assert other.price is not None
    return other.price.seconds / price.seconds - 1 if price.seconds > 0 else 0.0


def _facts_of(name: str, sentences: Sequence[str]) -> Iterator[tuple[str, str | Text]]:
    for i, sentence in enumerate(sentences):
        yield name if i == 0 else "", sentence


def _several(paths: Sequence[str]) -> str:
    """Paths with their numbers left open, the first few."""
    named = counted_paths(paths)
    others = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return ", ".join(named[:_SHOWN]) + others


# -- alternatives ------------------------------------------------------------------------------


def _alternatives(found: Explanation) -> Iterator[RenderableType]:
    if not found.alternatives:
        return
    rows = [(other.choice, *_figures(found.price, other)) for other in found.alternatives]
    columns = ("choice", ">predicted step", ">", ">memory a device")
    yield Table("Alternatives, each with all that depends on it solved again", columns, rows)
    groups: dict[tuple[str, ...], list[Alternative]] = {}
    for other in found.alternatives:
        if other.refusal or abs(_more(found.price, other)) > _EQUAL:
            groups.setdefault((other.refusal,) if other.refusal else other.changes, []).append(
                other
            )
    for sentences, alike in groups.items():
        yield ""
        yield Text(" or ".join(a.choice for a in alike), style="bold")
        bullets = Grid.grid(padding=(0, 1))
        for sentence in sentences[:_TOLD]:
            bullets.add_row(" *", sentence)
        others = len(sentences) - _TOLD
        if others > 0:
            bullets.add_row("", Text(f"and {others} more: --json lists them", style=QUIET))
        yield bullets


def _figures(price: Price, other: Alternative) -> tuple[str | Text, str, str]:
    if other.price is None:
        return Text("does not fit", style=BAD), "", ""
    more = other.price.seconds - price.seconds
    style = "" if abs(_more(price, other)) <= _EQUAL else BAD if more > 0 else GOOD
    return (
        Text(signed_seconds(more), style=style),
        f"{_more(price, other):+.1%}" if style else "",
        signed_bytes(other.price.peak_bytes - price.peak_bytes),
    )


def signed_seconds(seconds: float) -> str:
    """A difference of seconds; less than a nanosecond is none."""
    if abs(seconds) < 1e-9:
        return "="
    return f"{'+' if seconds > 0 else '-'}{show_seconds(abs(seconds))}"


def signed_bytes(nbytes: float) -> str:
    """A difference of bytes."""
    if nbytes == 0:
        return "="
    return f"{'+' if nbytes > 0 else '-'}{show_bytes(abs(nbytes))}"


# -- counterfactuals ---------------------------------------------------------------------------


def counterfactual(found: Counterfactual) -> RenderableType:
    """The changes that pins would make, or why there is no plan with them."""
    title = Text.assemble(("why not ", QUIET), (", ".join(found.pins), f"bold {ACCENT}"))
    parts: list[RenderableType] = [title, verdict(found)]
    if found.pinned is not None:
        parts += ["", _prices(found.price, found.pinned)]
    if found.traffic:
        parts += ["", _traffic(found.traffic)]
    if found.moved:
        parts += ["", _moves(found.moved)]
    parts.append("")
    return Group(*parts, *(Text(f"note: {note}", style=QUIET) for note in found.notes))


def verdict(found: Counterfactual) -> Text:
    """The step's time with the pins, beside the plan's, in a sentence."""
    if found.pinned is None:
        return Text.assemble(("no plan satisfies this: ", f"bold {BAD}"), found.refusal)
    more = found.pinned.seconds - found.price.seconds
    share = more / found.price.seconds if found.price.seconds > 0 else 0.0
    held = found.pinned.peak_bytes - found.price.peak_bytes
    room = "the same" if held == 0 else f"{show_bytes(abs(held))} {'more' if held > 0 else 'less'}"
    if abs(share) <= _EQUAL:
        return Text(f"The predicted step is as long; memory a device: {room}.")
    word, style = ("longer", BAD) if more > 0 else ("shorter", GOOD)
    return Text.assemble(
        "The predicted step is ",
        (f"{show_seconds(abs(more))} ({percent(abs(share))}) {word}", f"bold {style}"),
        f"; memory a device: {room}.",
    )


def _prices(plan: Price, pinned: Price) -> RenderableType:
    rows = [
        (name, show_seconds(a), show_seconds(b), signed_seconds(b - a))
        for name, a, b in (
            ("step", plan.seconds, pinned.seconds),
            ("compute", plan.compute_seconds, pinned.compute_seconds),
            ("communication", plan.communication_seconds, pinned.communication_seconds),
            ("exposed of it", plan.exposed_seconds, pinned.exposed_seconds),
        )
    ]
    a, b = plan.peak_bytes, pinned.peak_bytes
    rows.append(("memory a device", show_bytes(a), show_bytes(b), signed_bytes(b - a)))
    return Table("", ("predicted", ">plan", ">pinned", ">change"), rows)


def _traffic(changes: Sequence[TrafficChange]) -> RenderableType:
    rows = [
        (
            t.kind, " + ".join(t.axes), f"{t.count[1] - t.count[0]:+d}",
            signed_bytes(t.nbytes[1] - t.nbytes[0]), signed_seconds(t.seconds[1] - t.seconds[0]),
        )
        for t in changes
    ]  # fmt: skip
    return Table("Collectives that change", ("kind", "axes", ">count", ">bytes", ">time"), rows)


def _moves(moved: Sequence[tuple[str, str, str]]) -> RenderableType:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for path, before, after in moved:
        groups.setdefault((unnumbered(path), before, after), []).append(path)
    rows = [
        ((f"{len(paths)} x " if len(paths) > 1 else "") + common_path(paths), before, after)
        for (_, before, after), paths in list(groups.items())[:_MOVED]
    ]
    table = Table("Arguments that would be sharded differently", ("/path", "plan", "pinned"), rows)
    return Group(table, *rest(len(groups) - _MOVED, "--json lists {}"))


# -- data --------------------------------------------------------------------------------------


def explanation_data(found: Explanation) -> dict[str, Json]:
    """The same as one JSON object; seconds and bytes."""
    return {"headline": headline(found), **cast("dict[str, Json]", asdict(found))}


def counterfactual_data(found: Counterfactual) -> dict[str, Json]:
    """The same as one JSON object; seconds and bytes, of traffic before and after."""
    moved: list[Json] = [{"path": p, "before": a, "after": b} for p, a, b in found.moved]
    data = cast("dict[str, Json]", asdict(found))
    return {"verdict": verdict(found).plain, **data, "moved": moved}
