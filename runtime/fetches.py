"""Takes the outputs of a step out of the registers in which they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from autopar.ir.program import Fetch
from autopar.runtime.arrays import ArrayType
from autopar.runtime.feeds import Registers, unstack_rows


@dataclass(frozen=True)
class FetchType:
    """A fetch, what each of its registers holds, and the array that the user is given."""

    fetch: Fetch
    kind: ArrayType
    whole: ArrayType


class Fetcher:
    """The step's outputs in order; those with rows are put together by one program a submesh."""

    def __init__(self, fetches: Sequence[FetchType], meshes: Sequence[Mesh]) -> None:
        once = (f.fetch for f in fetches if f.fetch.rows is None)
        self._once = [(f.output, f.submesh, f.registers[0]) for f in once]
        self._joins = [
            (s, joined, _joiner(joined, mesh))
            for s, mesh in enumerate(meshes)
            if (joined := [f for f in fetches if f.fetch.submesh == s and f.fetch.rows is not None])
        ]
        self._count = 1 + max((f.fetch.output for f in fetches), default=-1)

    def outputs(self, registers: Registers) -> list[Any]:
        """Every output by its number."""
        found: list[Any] = [None] * self._count
        for output, submesh, register in self._once:
            found[output] = registers[submesh][register]
        for submesh, fetches, join in self._joins:
            given = [[registers[submesh][r] for r in f.fetch.registers] for f in fetches]
            for joined, whole in zip(fetches, join(given), strict=True):
                found[joined.fetch.output] = whole
        return found


def _joiner(fetches: Sequence[FetchType], mesh: Mesh) -> Callable[[Any], Sequence[Any]]:
    """A program of microbatches' outputs that gives the whole batch's."""
    rows = [f.fetch.rows for f in fetches]

    def join(given: Sequence[Sequence[Any]]) -> list[Any]:
        pairs = zip(given, rows, strict=True)
        return [unstack_rows(jnp.stack(parts), r) for parts, r in pairs if r is not None]

    types = [[f.kind.on(mesh)] * len(f.fetch.registers) for f in fetches]
    out = [f.whole.sharding(mesh) for f in fetches]
    return jax.jit(join, out_shardings=out).lower(types).compile()
