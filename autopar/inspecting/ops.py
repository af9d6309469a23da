"""The work of each op of a plan on one device: its pieces, its FLOPs and its seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.inspecting.flow import Flow
from autopar.ir.inspection import OpRow
from autopar.ir.paths import common_path, unnumbered
from autopar.ir.spmd import Loop, Run

_Key = tuple[object, ...]


def op_rows(ops: Sequence[OpRow]) -> tuple[OpRow, ...]:
    """Ops by themselves as rows of those that are alike, in the order in which they first run."""
    groups: dict[_Key, list[OpRow]] = {}
    for row in ops:
        spot = replace(row.spot, module=unnumbered(row.spot.module))
        key = (row.kind, spot, row.shape, row.dtype, row.sharding, row.operands)
        groups.setdefault(key, []).append(row)
    return tuple(map(_folded, groups.values()))


def ops_of(flow: Flow) -> Iterator[OpRow]:
    """The ops of a listing, each by itself.

    A loop's own row counts neither FLOPs nor seconds of what is in it, which has rows of its own.
    """
    listed = flow.listed
    spent, lies = _spent(flow), listed.sharding
    types = {name: v.type_text for name, v in listed.graph.nested_values.items()}
    for step, runs in flow.steps:
        if not isinstance(step, Run | Loop) or not step.results:
            continue
        op = flow.op(step)
        value, sharding = op.results[0], step.result_shardings[0]
        laid = step.operand_shardings if isinstance(step, Run) else ()
        yield OpRow(
            path=step.equation,
            kind=op.kind,
            spot=flow.spot(step),
            value=value.name,
            shape=value.shape,
            dtype=value.dtype,
            sharding=sharding,
            local_shape=sharding.shard_shape(value.shape, lies.mesh),
            operands=tuple(
                (types[o], s) for o, s in zip(op.operands, laid, strict=False) if isinstance(o, str)
            ),
            count=1,
            runs=runs,
            flops=op.flops * runs if isinstance(step, Run) else 0,
            seconds=spent.get(step.results, 0.0) * listed.runs,
        )


def _spent(flow: Flow) -> dict[tuple[str, ...], float]:
    """Seconds of work by the results of the instruction that a kernel is named after.

    What is fused into it is part of it. Copies and slices that are no ops count to the op or loop
    that reads them; of what is only returned, to the op behind it.
    """
    found = defaultdict[tuple[str, ...], float](float)
    behind: dict[str, tuple[str, ...]] = {}  # by piece, the results of the op that it comes from
    waiting: dict[str, float] = {}  # by piece, what it took to copy it
    for block, kernel, seconds in flow.timed.spent():
        step = block.instructions[kernel.at] if kernel.at >= 0 else None
        reads = sorted(kernel.reads)
        taken = seconds.compute + sum(waiting.pop(r) for r in reads if r in waiting)
        home = next((behind[r] for r in reads if r in behind), ())
        if isinstance(step, Run):
            home = step.results
            found[home] += taken
        elif taken:
            waiting[kernel.makes[0]] = taken
        behind.update(dict.fromkeys(kernel.makes, home))
    for name, taken in waiting.items():
        reader = flow.readers.get(name)
        found[reader.results if reader is not None else behind[name]] += taken
    return found


def _folded(rows: list[OpRow]) -> OpRow:
    first = rows[0]
    return replace(
        first,
        spot=replace(first.spot, module=common_path([row.spot.module for row in rows])),
        count=len(rows),
        runs=sum(row.runs for row in rows),
        flops=sum(row.flops for row in rows),
        seconds=sum(row.seconds for row in rows),
    )
