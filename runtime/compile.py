"""Compiles every part of a program before the first step: equal ones once, several at a time."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from autopar.runtime.likeness import part_key
from autopar.runtime.parts import PartSource
from autopar.runtime.relocate import Portable

_THREADS = 4  # XLA compiles without the interpreter's lock


@dataclass(frozen=True)
class CompileReport:
    """What was compiled: parts, different ones among them, and how each of them came to be.

    A part that is equal to another on the same devices is that one; on other devices what was
    compiled is loaded again, or compiled again where the backend cannot load it.
    """

    parts: int
    distinct: int
    compiled: int
    loaded: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.parts} parts, {self.distinct} different: {self.compiled} compiled, "
            f"{self.loaded} loaded onto other devices, {self.seconds:.2f} s"
        )


@dataclass(frozen=True)
class _Copies:
    """Equal parts on different devices, and how many of them had to be compiled."""

    programs: tuple[Any, ...]
    compiled: int


def compile_parts(
    sources: Sequence[PartSource], meshes: Sequence[Mesh]
) -> tuple[tuple[Any, ...], CompileReport]:
    """A compiled program for each part, on the mesh of its submesh."""
    start = time.perf_counter()
    places: dict[Hashable, dict[int, list[int]]] = {}
    for i, source in enumerate(sources):
        key = part_key(source) if len(sources) > 1 else None
        places.setdefault(key, {}).setdefault(source.program.part.submesh, []).append(i)
    alike = list(places.values())
    if len(alike) == 1:  # in this thread, whose settings of JAX the step may have been called under
        made = [_copies(sources, meshes, alike[0])]
    else:
        with ThreadPoolExecutor(_THREADS) as pool:
            made = list(pool.map(lambda uses: _copies(sources, meshes, uses), alike))
    programs = dict(_by_part(alike, made))
    compiled = sum(c.compiled for c in made)
    report = CompileReport(
        parts=len(sources),
        distinct=len(alike),
        compiled=compiled,
        loaded=sum(len(c.programs) for c in made) - compiled,
        seconds=time.perf_counter() - start,
    )
    return tuple(programs[i] for i in range(len(sources))), report


def _copies(
    sources: Sequence[PartSource], meshes: Sequence[Mesh], uses: dict[int, list[int]]
) -> _Copies:
    """One program for each submesh that runs these equal parts; they are lowered once."""
    source = sources[next(iter(uses.values()))[0]]
    shared: Any = None
    portable: Portable | None = None
    programs: list[Any] = []
    compiled = 0
    for submesh in uses:
        devices = tuple(meshes[submesh].devices.flat)
        program = portable.on(devices) if portable is not None else None
        if program is None:
            if shared is None or source.needs_devices:
                shared = source.lower(meshes[submesh])
            program = shared.compile(device_assignment=devices)
            compiled += 1
        portable = portable or Portable(program)
        programs.append(program)
    return _Copies(tuple(programs), compiled)


def _by_part(alike: Sequence[dict[int, list[int]]], made: Sequence[_Copies]) -> Iterator[Any]:
    for uses, copies in zip(alike, made, strict=True):
        for parts, program in zip(uses.values(), copies.programs, strict=True):
            yield from ((i, program) for i in parts)
