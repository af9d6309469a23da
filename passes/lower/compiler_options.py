"""Chooses the options of XLA that suit a lowered program on its platform."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.cluster.chip import Platform
from autopar.ir.compiler_options import (
    LATENCY_HIDING,
    PIPELINED,
    CompilerOptions,
    merged_options,
)
from autopar.ir.listing import Listing


def choose_options(
    platform: Platform,
    listings: Iterable[Listing],
    asked: CompilerOptions = (),
    pipelined: frozenset[str] = frozenset(PIPELINED),
) -> CompilerOptions:
    """The options of a step's programs, with those that are asked for put over them.

    On GPUs the latency-hiding scheduler, and pipelining for the kinds of collectives that loops
    have, of those that are to be `pipelined`. Compilers for TPUs run collectives beside work by
    themselves; those for CPUs never do.
    """
    if platform != "gpu":
        return merged_options((), asked)
    looped = {c.kind for listing in listings for _, c in listing.collectives() if c.runs > 1}
    names = (LATENCY_HIDING, *(PIPELINED[kind] for kind in looped & pipelined))
    return merged_options(tuple((name, True) for name in names), asked)
