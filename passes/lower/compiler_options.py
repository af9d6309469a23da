"""Chooses the options of XLA that suit a lowered program on its platform."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.cluster.chip import Platform
from autopar.ir.compiler_options import (
    LATENCY_HIDING,
    MERGED_PRODUCTS,
    PIPELINED,
    CompilerOptions,
    OptionValue,
    merged_options,
)
from autopar.ir.program import PartProgram


def choose_options(
    platform: Platform,
    parts: Iterable[PartProgram],
    asked: CompilerOptions = (),
    pipelined: frozenset[str] = frozenset(PIPELINED),
) -> CompilerOptions:
    """The options of a step's programs, with those that are asked for put over them.

    On GPUs the latency-hiding scheduler, and pipelining for the kinds of collectives that loops
    have, of those that are to be `pipelined`. Where parts add to sums, no products are merged.
    Compilers for TPUs run collectives beside work by themselves; those for CPUs never do.
    """
    if platform != "gpu":
        return merged_options((), asked)
    made = tuple(parts)
    looped = {c.kind for p in made for _, c in p.listing.collectives() if c.runs > 1}
    chosen: dict[str, OptionValue] = {PIPELINED[kind]: True for kind in looped & pipelined}
    chosen[LATENCY_HIDING] = True
    if any(p.part.accumulators for p in made):
        chosen[MERGED_PRODUCTS] = 0
    return merged_options(tuple(chosen.items()), asked)
