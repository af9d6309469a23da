"""A verification as one JSON object: everything that was found, units in the names."""

from __future__ import annotations

import math

from autopar.ir.codec import Fields, Item, Json
from autopar.ir.compiled import CheckLevel, Compiled
from autopar.ir.verification import CompiledPart, Figure, Numerics, Unit, Verification


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
    data["rounding"].text()
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
