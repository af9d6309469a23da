"""Dims that no axis of a cluster's meshes divides: where they are, and sizes that would do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.inspecting.leaves import Leaf, reading_line
from autopar.inspecting.words import and_more
from autopar.ir.findings import Finding, Severity, Topic
from autopar.ir.graph import Graph
from autopar.ir.paths import counted_paths
from autopar.ir.text import show_bytes
from autopar.ir.values import Input, Role

_LEAST_SHARE = 0.01  # of the bytes of all arguments, or of all values that ops make
_SHOWN = 3


def divides(size: int, devices: int) -> bool:
    """True if some axis of some mesh of so many devices divides a dim."""
    return math.gcd(size, devices) > 1


def _is_odd(size: int, devices: int) -> bool:
    """True if a dim is long enough to be sharded and cannot be."""
    return size >= devices > 1 and not divides(size, devices)


def nearest(size: int, devices: int) -> str:
    """The sizes around one that all devices divide: "50256 or 50264"."""
    below = size - size % devices
    return f"{below} or {below + devices}" if below else str(devices)


@dataclass(frozen=True)
class _Place:
    """A dim of an argument."""

    given: Input
    dim: int

    @property
    def is_rows(self) -> bool:
        """True if it is the first of something that is given anew at every step."""
        return self.given.role is Role.BATCH and self.dim == 0

    def __str__(self) -> str:
        return f"dim {self.dim} of {self.given.path}"


def argument_findings(graph: Graph, devices: int) -> Iterator[Finding]:
    """Dims of arguments that weigh something, and rows of the batch; one finding for each size."""
    total = sum(i.value.nbytes for i in graph.inputs)
    groups: dict[int, list[_Place]] = {}
    for given in graph.inputs:
        for d, size in enumerate(given.value.shape):
            place = _Place(given, d)
            if _is_odd(size, devices) or (place.is_rows and size % devices):
                groups.setdefault(size, []).append(place)
    for size, group in groups.items():
        nbytes = sum(p.given.value.nbytes for p in group)
        if nbytes >= _LEAST_SHARE * total or any(p.is_rows for p in group):
            yield _finding(graph, size, group, devices)


def _finding(graph: Graph, size: int, group: Sequence[_Place], devices: int) -> Finding:
    where = and_more(counted_paths(map(str, group)), _SHOWN)
    most = math.gcd(size, devices)
    said = f"no axis of {devices} devices divides {size}"
    if most > 1:
        said = f"only {most} of {devices} devices can share {size} out"
    rows = ", which the rows of the batch are" if any(p.is_rows for p in group) else ""
    return Finding(
        Severity.WARNING if most == 1 else Severity.NOTE,
        Topic.INDIVISIBLE,
        f"{said}{rows}: {where}",
        f"{'Take' if rows else 'Make it'} {nearest(size, devices)}{'' if rows else ' would do'}.",
        line=reading_line(graph, group[0].given.value.name),
        count=len(group),
        nbytes=sum(p.given.value.nbytes for p in group),
    )


def value_findings(graph: Graph, leaves: Sequence[Leaf], devices: int) -> Iterator[Finding]:
    """Dims that no argument has, such as one less than the length of a sequence."""
    known = {n for i in graph.inputs for n in i.value.shape}
    made = [(leaf, v) for leaf in leaves for v in leaf.op.results]
    total = sum(v.nbytes * leaf.runs for leaf, v in made)
    groups: dict[int, list[tuple[int, Leaf]]] = {}
    for leaf, value in made:
        for size in {n for n in value.shape if n not in known and _is_odd(n, devices)}:
            groups.setdefault(size, []).append((value.nbytes * leaf.runs, leaf))
    for size, group in groups.items():
        nbytes = sum(n for n, _ in group)
        if nbytes < _LEAST_SHARE * total:
            continue
        largest = max(group, key=lambda pair: pair[0])[1].op
        like = f"{largest.kind} {largest.results[0].type_text}"
        yield Finding(
            Severity.NOTE,
            Topic.INDIVISIBLE,
            f"no axis of {devices} devices divides {size}, a dim of {len(group)} values that take "
            f"{show_bytes(nbytes)} in a step, such as {like}",
            f"Where it can be chosen, {nearest(size, devices)} would do.",
            line=largest.origin.line,
            count=len(group),
            nbytes=nbytes,
        )
