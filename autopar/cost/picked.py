"""Bytes of pieces from which kernels only pick: rows that a gather looks up, a slice.

y = x + table[i]        loads x, i and as many rows of the table as y has
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.cost.kernels import Stored
from autopar.cost.sizes import Sizes
from autopar.ir.graph import Op
from autopar.ir.listing import Block, LocalOp
from autopar.rules import primitive


def picked_bytes(
    block: Block, sizes: Sizes, stored: Stored
) -> Mapping[tuple[str, ...], Mapping[str, int]]:
    """The bytes that kernels, by what they make, load of pieces which they need not load whole."""
    runs: dict[str, LocalOp] = {}
    picks: set[str] = set()  # what is computed of something picked
    found: dict[tuple[str, ...], Mapping[str, int]] = {}
    for step in block.instructions:
        if not isinstance(step, LocalOp) or not step.results:
            continue
        made = step.results[0]
        runs[made] = step
        if _is_pick(sizes.op(step.equation)) or not picks.isdisjoint(step.operands):
            if made not in stored.nbytes:
                picks.add(made)
            elif parts := _parts(made, runs, sizes, stored.nbytes):
                found[step.results] = parts
    return found


def _is_pick(op: Op) -> bool:
    return primitive(op.kind).picks == 0 and op.rule is not None


def _parts(
    made: str, runs: Mapping[str, LocalOp], sizes: Sizes, nbytes: Mapping[str, int]
) -> Mapping[str, int]:
    """The bytes loaded of pieces behind a stored one, those loaded whole left out."""
    shares: dict[str, float] = {}  # of each piece
    waiting, seen = [(made, 1.0)], set[tuple[str, float]]()
    while waiting:
        name, share = waiting.pop()
        run = runs.get(name)
        if name != made and (name in nbytes or run is None):
            shares[name] = shares.get(name, 0.0) + share
            continue
        if run is None or (name, share) in seen:
            continue
        seen.add((name, share))
        op = sizes.op(run.equation)
        for k, operand in enumerate(run.operands):
            if operand is not None:
                own = _share(run, op, sizes) if k == 0 and _is_pick(op) else 1.0
                waiting.append((operand, share * own))
    return {n: int(s * nbytes.get(n, 0)) for n, s in shares.items() if s < 1}


def _share(run: LocalOp, op: Op, sizes: Sizes) -> float:
    """Of the first operand, the share of items that come out."""
    items = math.prod(sizes.shard(run, op))
    return min(1.0, math.prod(sizes.made(run, op)) / max(1, items))
