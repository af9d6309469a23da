"""A verification drawn for a terminal: predicted beside compiled, errors beside tolerances."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.ir.compiled import CheckLevel
from autopar.ir.text import show_bytes
from autopar.ir.verification import CompiledPart, Figure, Numerics, Verification
from autopar.report.style import ACCENT, BAD, GOOD, QUIET, bar, facts
from autopar.report.table import Cell, Table, percent

_SHOWN = 12
_RULES = (
    "Bytes of collectives and arguments agree within 5 %; a peak may be predicted higher, but no "
    "more than 2 % lower. Gaps of less than a thousandth of the device's memory, or of all bytes "
    "sent, are negligible. Seconds are the compiler's own estimate and decide nothing."
)


def verification(found: Verification) -> RenderableType:
    """The figures of a verification, and its verdict."""
    parts: list[RenderableType] = [_head(found)]
    if found.numerics is not None:
        parts += ["", _numerics(found.numerics)]
    if len(found.parts) > 1:
        parts += ["", _overview(found)]
    for part in found.parts:
        if len(found.parts) == 1 or not part.agrees or part.differences:
            parts += ["", *_part(part, found.level)]
    if found.parts:
        parts += ["", Text(_RULES, style=QUIET)]
    notes = (*found.notes, *(found.numerics.notes if found.numerics else ()))
    parts += [Text(f"note: {note}", style=QUIET) for note in notes]
    return Group(*parts)


def _head(found: Verification) -> RenderableType:
    title = Text.assemble(
        ("verify ", QUIET),
        (found.step, f"bold {ACCENT}"),
        (" on ", QUIET),
        (found.cluster, f"bold {ACCENT}"),
    )
    pairs: list[tuple[str, str | Text]] = [("level", found.level.value)]
    if found.parts:
        compilers = ", ".join(dict.fromkeys(p.compiled.compiler for p in found.parts))
        pairs.append(("compiled", f"for {found.target} by {compilers}"))
    if found.numerics is not None:
        n = found.numerics
        steps = "1 step" if n.steps == 1 else f"{n.steps} steps"
        pairs.append(("ran", f"{steps} on {n.devices} virtual CPU devices: {n.where}"))
    pairs.append(("verdict", _verdict(found)))
    return Group(title, facts(pairs))


def _verdict(found: Verification) -> Text:
    if found.agrees:
        what = "with the compiler"
        if found.numerics is not None:
            what = "to rounding: no error is above what rounding alone does to the plain step"
        return Text.assemble(("agrees", f"bold {GOOD}"), f" {what}")
    return Text.assemble(("differs", f"bold {BAD}"), ": ", ", ".join(_culprits(found)))


def _culprits(found: Verification) -> Iterator[str]:
    """The figures that speak against the plan, the first few by name."""
    if found.numerics is not None:
        wrong = [o.path for o in found.numerics.worst if not o.agrees]
        yield f"{len(wrong)} of {len(found.numerics.outputs)} outputs"
    for part in found.parts:
        prefix = f"{part.name} " if part.name else ""
        yield from (f"{prefix}{f.name}" for f in part.figures if f.agrees is False)
        if not part.fits:
            yield f"{prefix}it does not fit a device"


# -- numerics ----------------------------------------------------------------------------------


def _numerics(found: Numerics) -> RenderableType:
    rows = [
        (o.path, _share(o.error), _share(o.noise), _share(o.tolerance), _word(o.agrees))
        for o in found.worst[:_SHOWN]
    ]
    title = "Worst errors, as shares of each output's largest number"
    table = Table(title, ("~/output", ">error", ">own noise", ">tolerance", ""), rows)
    rest = found.worst[_SHOWN:]
    under = Text(
        "own noise: how far the plain step goes from itself when its arguments change by one "
        f"rounding ({found.rounding:.1e}). An output that is zero but for rounding, such as a "
        "gradient that cancels, may differ by all of itself, and does so from itself too",
        style=QUIET,
    )
    more = [Text(f"and {len(rest)} more that use less of theirs", style=QUIET)] if rest else []
    return Group(table, *more, under)


def _share(number: float) -> str:
    return f"{number:.1e}" if math.isfinite(number) and number else f"{number:g}"


def _word(agrees: bool, word: str = "") -> Text:
    said = word or ("agrees" if agrees else "differs")
    return Text(said, style=GOOD if agrees else f"bold {BAD}")


# -- compiled ----------------------------------------------------------------------------------


def _overview(found: Verification) -> Table:
    """A row for each program of a plan of stages; those that differ follow in full."""
    memory = (">peak", ">compiled", ">ratio") if found.level is not CheckLevel.COLLECTIVES else ()
    rows: list[tuple[Cell, ...]] = []
    for part in found.parts:
        sent = [f for f in part.figures if f.kind]
        held = [f for f in part.figures if f.name == "peak" and memory]
        alike = Text(f" = {', '.join(part.alike)}" if part.alike else "", style=QUIET)
        rows.append((
            Text(part.name) + alike,
            show_bytes(sum(f.predicted for f in sent)), show_bytes(sum(f.compiled for f in sent)),
            *(cell for f in held for cell in _cells(f)), _word(part.agrees),
        ))  # fmt: skip
    title = "Programs of the plan, of a device and one run"
    return Table(title, ("part", ">sends", ">compiled", *memory, ""), rows)


def _part(part: CompiledPart, level: CheckLevel) -> Iterator[RenderableType]:
    yield _figures(part)
    made = part.compiled
    if level is not CheckLevel.COLLECTIVES:
        share = made.peak_bytes / part.device_bytes
        yield Text.assemble(
            "compiled, a device holds ", (show_bytes(made.peak_bytes), "bold"),
            f" of {show_bytes(part.device_bytes)}  ", bar(share), (f" {percent(share)}", QUIET),
        )  # fmt: skip
    if made.out_of_memory:
        yield Text.assemble(("the compiler: ", BAD), made.out_of_memory)
    if part.differences:
        yield ""
        yield Text("What the compiler did differently", style=f"bold {ACCENT}")
        shown = part.differences[:_SHOWN]
        yield from (Text(f"* {difference}") for difference in shown)
        if rest := len(part.differences) - len(shown):
            yield Text(f"and {rest} of fewer bytes: --json lists them", style=QUIET)


def _figures(part: CompiledPart) -> Table:
    title = "Of a device and a step"
    if part.name:
        title = f"{part.name}, of a device and one run"
    rows = [
        (f.name, *_cells(f), _word(f.agrees is not False, f.verdict or " ")) for f in part.figures
    ]
    return Table(title, ("what", ">predicted", ">compiled", ">ratio", ""), rows)


def _cells(figure: Figure) -> tuple[str, str, str]:
    """Predicted, compiled, and the first over the second."""
    ratio = "" if figure.ratio is None else f"{figure.ratio:.3f}"
    return figure.unit.show(figure.predicted), figure.unit.show(figure.compiled), ratio
