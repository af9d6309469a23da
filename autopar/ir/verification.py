"""The result of verifying a plan: predicted beside compiled figures, errors; and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from autopar.ir.codec import Fields, Item, Json
from autopar.ir.compiled import CheckLevel, Compiled
from autopar.ir.text import columns, show_bytes, show_seconds


class Unit(Enum):
    """The unit of a figure."""

    BYTES = "bytes"
    SECONDS = "seconds"

    def show(self, number: float) -> str:
        """A number with a fitting unit."""
        return show_bytes(number) if self is Unit.BYTES else show_seconds(number)


@dataclass(frozen=True)
class Figure:
    """A figure of one device and one step, as planned and as compiled.

    `kind` and `axes` are those of collectives, "" and () for anything else. `agrees` is None where
    the figure is told only and decides nothing; a gap is `negligible` where it agrees for being
    small beside the device.
    """

    name: str
    unit: Unit
    predicted: float
    compiled: float
    agrees: bool | None = None
    negligible: bool = False
    kind: str = ""
    axes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Predicted over compiled; None where nothing was compiled."""
        return self.predicted / self.compiled if self.compiled else None

    @property
    def verdict(self) -> str:
        """The word for it."""
        if self.negligible:
            return "negligible"
        return {True: "agrees", False: "differs", None: ""}[self.agrees]

    def __str__(self) -> str:
        planned, real = self.unit.show(self.predicted), self.unit.show(self.compiled)
        return f"{self.name}: {planned} planned, {real} compiled {self.verdict}".rstrip()


@dataclass(frozen=True)
class CompiledPart:
    """A program of the plan beside what the compiler made of it.

    `name` is "" for a step in one program, else that of the stage part; `alike` are further parts
    that are the same program. `device_bytes` are what a device of the target holds.
    `differences` are sentences that name what the compiler did otherwise, with op and line where
    they are known.
    """

    name: str
    figures: tuple[Figure, ...]
    compiled: Compiled
    device_bytes: int
    differences: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """True if the compiled program fits a device."""
        return not self.compiled.out_of_memory and self.compiled.peak_bytes <= self.device_bytes

    @property
    def agrees(self) -> bool:
        """True if no figure differs and the program fits."""
        return self.fits and all(f.agrees is not False for f in self.figures)


@dataclass(frozen=True)
class OutputError:
    """The error of an output of the planned step against the plain step's, the worst of the steps.

    All three are shares of the largest magnitude that the plain step has there. `noise` is how far
    the plain step goes from itself when its arguments change by one rounding; an error counts
    above the `tolerance`.
    """

    path: str
    error: float
    noise: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """True if the error is rounding; one that is no number is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Numerics:
    """The planned step beside the plain one on virtual CPU devices, over some steps.

    `where` are the meshes that it ran on, smaller than the plan's where it was shrunk. `rounding`
    is the relative rounding of the narrowest floats in the step.
    """

    steps: int
    devices: int
    where: str
    rounding: float
    outputs: tuple[OutputError, ...]
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """True if every output does."""
        return all(o.agrees for o in self.outputs)

    @property
    def worst(self) -> tuple[OutputError, ...]:
        """The outputs, those that differ first, then by how much of their tolerance they use."""

        def use(output: OutputError) -> float:
            if output.error != output.error:
                return float("inf")
            return output.error / output.tolerance if output.tolerance > 0 else output.error

        return tuple(sorted(self.outputs, key=lambda o: (o.agrees, -use(o), o.path)))


@dataclass(frozen=True)
class Verification:
    """A plan beside the plain step (`numerics`), or beside what a compiler made of it (`parts`).

    `target` is what was compiled for, "" where nothing was. `notes` are what a reader of the
    figures should know.
    """

    step: str
    cluster: str
    level: CheckLevel
    target: str = ""
    numerics: Numerics | None = None
    parts: tuple[CompiledPart, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """The verdict."""
        same = self.numerics is None or self.numerics.agrees
        return same and all(p.agrees for p in self.parts)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        verdict = "agrees" if self.agrees else "differs"
        yield f"plan {self.step} on {self.cluster}, level {self.level.value}: {verdict}"
        if self.numerics is not None:
            told = [
                [o.path, f"{o.error:.1e}", f"of {o.tolerance:.1e}"] for o in self.numerics.worst
            ]
            yield from columns(told, "  ")
        for part in self.parts:
            yield from (f"  {part.name} {figure}" for figure in part.figures)
            yield from (f"  {part.name} {difference}" for difference in part.differences)
        yield from (f"  {note}" for note in self.notes)


def verification_data(found: Verification) -> dict[str, Json]:
    """A verification as JSON: bytes and seconds of one device and one step, errors as shares."""
    return {
        "step": found.step,
        "cluster": found.cluster,
        "level": found.level.value,
        "target": found.target or None,
        "agrees": found.agrees,
        "numerics": _numerics(found.numerics) if found.numerics is not None else None,
        "parts": [_part(p) for p in found.parts],
        "notes": list(found.notes),
    }


def _numerics(found: Numerics) -> Json:
    return {
        "agrees": found.agrees,
        "steps": found.steps,
        "devices": found.devices,
        "where": found.where,
        "rounding": found.rounding,
        "outputs": [
            {"path": o.path, "error": _finite(o.error), "noise": _finite(o.noise),
             "tolerance": _finite(o.tolerance), "agrees": o.agrees}
            for o in found.worst
        ],
        "notes": list(found.notes),
    }  # fmt: skip


def _finite(number: float) -> float | None:
    """A number, or null for what JSON has no number for."""
    return number if math.isfinite(number) else None


def _part(part: CompiledPart) -> Json:
    return {
        "name": part.name or None,
        "alike": list(part.alike),
        "agrees": part.agrees,
        "fits": part.fits,
        "device_bytes": part.device_bytes,
        "figures": [_figure(f) for f in part.figures],
        "differences": list(part.differences),
        "compiled": _compiled(part.compiled),
    }


def _figure(figure: Figure) -> Json:
    unit = figure.unit.value
    return {
        "name": figure.name,
        "kind": figure.kind or None,
        "axes": list(figure.axes),
        f"predicted_{unit}": figure.predicted,
        f"compiled_{unit}": figure.compiled,
        "ratio": figure.ratio,
        "agrees": figure.agrees,
        "negligible": figure.negligible,
    }


def _compiled(made: Compiled) -> Json:
    return {
        "target": made.target,
        "compiler": made.compiler,
        "argument_bytes": made.argument_bytes,
        "peak_bytes": made.peak_bytes,
        "step_seconds": made.seconds,
        "exposed_seconds": made.exposed_seconds,
        "out_of_memory": made.out_of_memory or None,
        "collectives": [
            {"kind": c.kind, "axes": list(c.axes), "dtype": c.dtype, "bytes": c.nbytes,
             "runs": c.runs, "op": c.op, "line": c.line}
            for c in made.collectives
        ],
    }  # fmt: skip


# -- reading ------------------------------------------------------------------------------------


def check_verification(item: Item) -> None:
    """Raise JsonError unless an item is what `verification_data` gives."""
    data = item.fields()
    data["step"].text()
    data["cluster"].text()
    data["agrees"].flag()
    data["notes"].texts()
    data["level"].one_of(CheckLevel)
    _maybe_text(data, "target")
    if data["numerics"].value is not None:
        _check_numerics(data["numerics"].fields())
    for part in data["parts"].items():
        _check_part(part.fields())
    data.end()


def _maybe_text(data: Fields, key: str) -> None:
    if data[key].value is not None:
        data[key].text()


def _maybe_number(data: Fields, key: str) -> None:
    if data[key].value is not None:
        data[key].number()


def _check_numerics(data: Fields) -> None:
    data["agrees"].flag()
    data["steps"].whole()
    data["devices"].whole()
    data["where"].text()
    data["rounding"].number()
    data["notes"].texts()
    for item in data["outputs"].items():
        output = item.fields()
        output["path"].text()
        output["agrees"].flag()
        for key in ("error", "noise", "tolerance"):
            _maybe_number(output, key)
        output.end()
    data.end()


def _check_part(data: Fields) -> None:
    _maybe_text(data, "name")
    data["alike"].texts()
    data["agrees"].flag()
    data["differences"].texts()
    data["device_bytes"].number()
    data["fits"].flag()
    for item in data["figures"].items():
        figure = item.fields()
        figure["name"].text()
        figure["axes"].texts()
        figure["negligible"].flag()
        if figure["agrees"].value is not None:
            figure["agrees"].flag()
        _maybe_text(figure, "kind")
        _maybe_number(figure, "ratio")
        unit = next((u.value for u in Unit if figure.get(f"predicted_{u.value}")), "seconds")
        figure[f"predicted_{unit}"].number()
        figure[f"compiled_{unit}"].number()
        figure.end()
    _check_compiled(data["compiled"].fields())
    data.end()


def _check_compiled(data: Fields) -> None:
    data["target"].text()
    data["compiler"].text()
    data["argument_bytes"].number()
    data["peak_bytes"].number()
    for key in ("step_seconds", "exposed_seconds"):
        _maybe_number(data, key)
    _maybe_text(data, "out_of_memory")
    for item in data["collectives"].items():
        found = item.fields()
        for key in ("kind", "dtype", "op", "line"):
            found[key].text()
        found["axes"].texts()
        found["bytes"].whole()
        found["runs"].whole()
        found.end()
    data.end()
