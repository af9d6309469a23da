"""Other people's rules as pins of a step's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.exporting.rule_files import Rules
from autopar.exporting.rules import Dims, Names, axes_by_rules
from autopar.ir.mesh import MeshShape
from autopar.ir.values import Input, Role


@dataclass(frozen=True)
class Imported:
    """Pins by path, and in sentences what rules could not decide or a mesh cannot hold."""

    pins: tuple[tuple[str, Dims], ...]
    unplaced: tuple[str, ...]


def pins_from(
    rules: Rules, inputs: Sequence[Input], names_of: Mapping[str, Names], mesh: MeshShape | None
) -> Imported:
    """The pins by which rules lay out a step's state.

    Logical rules speak of arrays with names, path rules of all others. Axes that the mesh has not
    are left out, as is what does not divide; without a mesh, everything is kept.
    """
    pins: list[tuple[str, Dims]] = []
    unplaced: list[str] = []
    for given in inputs:
        if given.role is not Role.STATE:
            continue
        dims = _laid(rules, given, names_of)
        if dims is None:
            unplaced.append(f"{given.path} {given.value.type_text}: no rule speaks of it")
            continue
        if len(dims) > len(given.value.shape):
            unplaced.append(f"{given.path} {given.value.type_text}: its rule has {len(dims)} dims")
            continue
        if mesh is not None:
            unplaced += _misfits(given, dims, mesh)
            dims = _fitting(given, dims, mesh)
        pins.append((given.path, dims))
    missing = _missing(rules, mesh) if mesh is not None else ()
    return Imported(tuple(pins), (*missing, *unplaced))


def _laid(rules: Rules, given: Input, names_of: Mapping[str, Names]) -> Dims | None:
    names = names_of.get(given.path)
    if names is not None and rules.logical:
        return axes_by_rules(rules.logical, names)
    return next((dims for pattern, dims in rules.paths if re.search(pattern, given.path)), None)


def _fitting(given: Input, dims: Dims, mesh: MeshShape) -> Dims:
    """The dims with what the mesh has and what divides."""
    there = [tuple(a for a in axes if a in mesh.names) for axes in dims]
    sizes = given.value.shape
    return tuple(axes if sizes[d] % mesh.size(axes) == 0 else () for d, axes in enumerate(there))


def _misfits(given: Input, dims: Dims, mesh: MeshShape) -> Iterator[str]:
    for d, axes in enumerate(dims):
        there = tuple(a for a in axes if a in mesh.names)
        if given.value.shape[d] % mesh.size(there):
            yield (
                f"{given.path} {given.value.type_text}: dim {d} does not divide by "
                f"{'+'.join(there)}={mesh.size(there)} and is left whole"
            )


def _missing(rules: Rules, mesh: MeshShape) -> tuple[str, ...]:
    named = [axes for _, axes in rules.logical]
    named += [axes for _, dims in rules.paths for axes in dims]
    absent = sorted({a for axes in named for a in axes} - set(mesh.names))
    text = f"the mesh ({mesh}) has no axis {', '.join(absent)}: rules count without"
    return (text,) if absent else ()
