"""A verification as one JSON object: everything that was found, units in the names."""

from __future__ import annotations

import math

from autopar.ir.compiled import Compiled
from autopar.ir.json_reader import Json
from autopar.ir.verification import CompiledPart, Figure, Numerics, Verification


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
