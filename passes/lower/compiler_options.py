"""Chooses the options of XLA that suit a lowered program on its platform."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.merged_products import seconds_saved_by_merging
from autopar.cost.prices import Prices
from autopar.cost.sizes import Sizes
from autopar.ir.compiler_options import (
    LATENCY_HIDING,
    MERGED_PRODUCTS,
    PIPELINED,
    CompilerOptions,
    OptionValue,
    merged_options,
)
from autopar.ir.program import PartProgram

# What merging is to save of a step. A product that waits for all that it reads leaves less to run
# beside collectives, which by XLA's timelines of H100s cost six models 1 to 2.5 % more than told.
_LEAST_SAVED = 0.02


def choose_options(
    parts: Sequence[PartProgram],
    prices: Sequence[Prices],
    seconds: float,
    asked: CompilerOptions = (),
    pipelined: frozenset[str] = frozenset(PIPELINED),
) -> CompilerOptions:
    """The options of the programs of a step of so many `seconds`, with those asked for over them.

    `prices` are those of the submeshes. On GPUs the latency-hiding scheduler, and pipelining for
    the kinds of collectives that loops have, of those that are to be `pipelined`. Products of one
    value are merged where that pays; of sums, to which each is added itself, never. Compilers for
    TPUs run collectives beside work by themselves; those for CPUs never do.
    """
    if prices[0].cluster.chip.platform != "gpu":
        return merged_options((), asked)
    looped = {c.kind for p in parts for _, c in p.listing.collectives() if c.runs > 1}
    chosen: dict[str, OptionValue] = {PIPELINED[kind]: True for kind in looped & pipelined}
    chosen[LATENCY_HIDING] = True
    if any(p.part.accumulators for p in parts) or not _pays(parts, prices, seconds):
        chosen[MERGED_PRODUCTS] = 0
    return merged_options(tuple(chosen.items()), asked)


def _pays(parts: Sequence[PartProgram], prices: Sequence[Prices], seconds: float) -> bool:
    """True if XLA had better merge the products of one value."""
    saved = 0.0
    for program in parts:
        own, part = prices[program.part.submesh], program.part
        sizes = Sizes(part.graph, own.mesh, own.cluster.chip.platform)
        saved += seconds_saved_by_merging(program.listing.block, part.graph, own, sizes)
    return saved > _LEAST_SAVED * seconds
