"""Chooses the options of XLA that suit a lowered program on its platform."""

from __future__ import annotations

from collections.abc import Sequence

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
    parts: Sequence[PartProgram],
    platform: Platform,
    asked: CompilerOptions = (),
    pipelined: frozenset[str] = frozenset(PIPELINED),
    merges: bool = False,
) -> CompilerOptions:
    """The options of the programs of a step on a platform, with those asked for over them.

    On GPUs the latency-hiding scheduler, and pipelining for the kinds of collectives that loops
    have, of those that are to be `pipelined`. Products of one value are merged where it `merges`
    them. Compilers for TPUs run collectives beside work by themselves; those for CPUs never do.
    """
    if platform != "gpu":
        return merged_options((), asked)
    looped = {c.kind for p in parts for _, c in p.listing.collectives() if c.runs > 1}
    chosen: dict[str, OptionValue] = {PIPELINED[kind]: True for kind in looped & pipelined}
    chosen[LATENCY_HIDING] = True
    if not merges:
        chosen[MERGED_PRODUCTS] = 0
    return merged_options(tuple(chosen.items()), asked)
