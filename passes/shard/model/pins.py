"""Pins: shardings that the user fixes, by patterns over the paths of the step's arguments."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.errors import PinError, bulleted
from autopar.ir.graph import Graph
from autopar.ir.paths import matches, meant
from autopar.ir.sharding import MeshShape
from autopar.ir.values import Input
from autopar.passes.shard.model.decisions import Decision, Place, Reading

Dims = tuple[tuple[str, ...], ...]
Pins = Sequence[tuple[str, Dims]]
CONSTRAINT = "with_sharding_constraint"  # the label of a constraint's decision


def resolve_pins(graph: Graph, pins: Pins, mesh: MeshShape) -> dict[str, Dims]:
    """The sharding of each argument that a pin fixes, by the argument's path.

    A pattern is matched against an argument's whole path, with or without the argument's own
    name in front: "params/**/kernel" matches "state/params/block/kernel". Raises PinError with
    every pin that matches nothing, does not fit its value, or contradicts another.
    """
    faults: list[str] = []
    fixed: dict[str, tuple[str, Dims]] = {}
    paths = [i.path for i in graph.inputs]
    for pattern, dims in pins:
        chosen = meant(pattern, paths)
        matched = [i for i in graph.inputs if i.path in chosen]
        if not matched:
            faults.append(_unmatched(pattern, paths))
        for given in matched:
            fault = _misfit(pattern, dims, given, mesh)
            held = fixed.get(given.path)
            padded = (*dims, *((),) * (len(given.value.shape) - len(dims)))
            if fault is not None:
                faults.append(fault)
            elif held is not None and held[1] != padded:
                faults.append(
                    f"pins {held[0]!r} = {show_spec(held[1])} and {pattern!r} = "
                    f"{show_spec(padded)} contradict each other on {given.path} "
                    f"{given.value.type_text}"
                )
            else:
                fixed[given.path] = (pattern, padded)
    if faults:
        raise PinError(
            bulleted("these pins cannot be kept:", faults, "Correct these pins, or leave them out.")
        )
    return {path: dims for path, (_, dims) in fixed.items()}


def apply_pins(reading: Reading, fixed: Mapping[str, Dims], mesh: MeshShape) -> Reading:
    """The reading with these arguments' shardings fixed.

    Raises PinError where a with_sharding_constraint of the step cannot be kept.
    """
    return _checked(_fixed(reading, fixed) if fixed else reading, mesh)


def _fixed(reading: Reading, fixed: Mapping[str, Dims]) -> Reading:
    decisions: list[Decision] = list(reading.decisions)
    for given in reading.graph.inputs:
        place = reading.standings[given.value.name]
        if given.path in fixed and isinstance(place, Place):
            decisions[place.decision] = replace(decisions[place.decision], fixed=fixed[given.path])
    return replace(reading, decisions=tuple(decisions))


def loosened(reading: Reading, lines: frozenset[str]) -> Reading:
    """The reading without the step's own constraints at these lines."""
    if not lines:
        return reading
    kept = [
        replace(d, fixed=None) if d.label == CONSTRAINT and d.line in lines else d
        for d in reading.decisions
    ]
    return replace(reading, decisions=tuple(kept))


def show_spec(dims: Dims) -> str:
    """Dims as a PartitionSpec prints: P(None, 'model')."""
    shown = [
        "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes) for axes in dims
    ]
    return f"P({', '.join(shown)})"


def _unmatched(pattern: str, paths: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3)
    if "*" in pattern and near:
        like = next((found for path in near if (found := _like_pattern(pattern, path))), near[0])
        near = [like, *near]
    hint = f"; the nearest paths are {', '.join(dict.fromkeys(near))}" if near else ""
    return f"pin {pattern!r} matches none of the {len(paths)} arguments{hint}"


def _like_pattern(pattern: str, path: str) -> str | None:
    """The pattern with its names spelled as a path's: net/**/kernal as net/**/kernel."""

    def spelled(name: str) -> str:
        close = difflib.get_close_matches(name, path.split("/"), n=1)
        return name if "*" in name or not close else close[0]

    found = "/".join(map(spelled, pattern.split("/")))
    return found if matches(found, path) else None


def _misfit(pattern: str, dims: Dims, given: Input, mesh: MeshShape) -> str | None:
    value, shown = given.value, f"pin {pattern!r} = {show_spec(dims)}"
    named = [a for axes in dims for a in axes]
    unknown = [a for a in named if a not in mesh.names]
    if unknown:
        return f"{shown} names axis {unknown[0]!r}, but the mesh has ({mesh})"
    if len(set(named)) != len(named):
        return f"{shown} uses an axis twice"
    if len(dims) > len(value.shape):
        return f"{shown} has {len(dims)} dims, but {given.path} is {value.type_text}"
    for d, axes in enumerate(dims):
        if value.shape[d] % (count := mesh.size(axes)):
            return (
                f"{shown} splits dim {d} of {given.path} {value.type_text} over {count} devices, "
                f"but {value.shape[d]} is not divisible by {count}"
            )
    return None


def _checked(reading: Reading, mesh: MeshShape) -> Reading:
    """Raise PinError where a with_sharding_constraint cannot be kept."""
    faults: list[str] = []
    for decision in reading.decisions:
        if decision.fixed is None or decision.value is None:
            continue
        for d, axes in enumerate(decision.fixed):
            unknown = [a for a in axes or () if a not in mesh.names]
            if unknown:
                faults.append(
                    f"with_sharding_constraint at {decision.line} names axis {unknown[0]!r}, but "
                    f"the plan's mesh has ({mesh}); pass mesh={{...}} with that axis"
                )
            elif axes and decision.sizes[d] % mesh.size(axes):
                where = f" at {decision.line}" if decision.line else ""
                why = "which does not divide"
                if decision.value.dtype.startswith("key"):
                    why = "but random keys stay whole on every device"
                faults.append(
                    f"{decision.label}{where} splits dim {d} of "
                    f"{decision.value.type_text} over {mesh.size(axes)} devices, {why}"
                )
    if faults:
        raise PinError(
            bulleted(
                "these constraints cannot be kept:", faults, "Correct them, or leave them out."
            )
        )
    return reading
