"""Gives every loop of a program a collective, so that the GPU compiler tells the time of its body.

XLA's latency-hiding scheduler writes a timeline of computations with an async collective only. Each
`while` here carries one more number, zero, which a trip sends to the next device: four bytes beside
all else that it does. It is added to the smallest of the loop's results, without which it would be
removed; to several, as XLA may find out that it needs one of them no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.mlir import ir as mlir_ir
from jax.extend.mlir.dialects import stablehlo as stablehlo_dialect

from autopar.ir.sharding import MeshShape

ir: Any = mlir_ir  # the bindings' types are partly unknown
stablehlo: Any = stablehlo_dialect
_WHILE, _MANUAL = "stablehlo.while", "sdy.manual_computation"
_CHANNEL = "#stablehlo.channel_handle<handle = {handle}, type = 1>"
_TIED = 8  # results of a loop that its tick is added to
_NUMBERS = frozenset("f16 bf16 f32 f64 i8 i16 i32 i64 ui8 ui16 ui32 ui64".split())
_FIRST_CHANNEL = 1_000_000  # far from those of the program's own collectives


def add_ticks(module: Any, mesh: MeshShape) -> int:
    """Let each loop of a StableHLO module carry a tick, in place; returns how many there are.

    In a program that is written for one device's pieces the tick is sent as it is. In one that the
    partitioner is to split, the sending alone is written for one device.
    """
    with module.context, ir.Location.unknown():
        ops = list(_within(module.operation))
        is_manual = any(op.name == _MANUAL for op in ops)
        loops = [op for op in ops if op.name == _WHILE and _tied(op)]
        for number, loop in enumerate(loops):
            _tick(loop, mesh, _FIRST_CHANNEL + number, is_manual)
    return len(loops)


def _within(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _within(inner.operation)


def _tied(loop: Any) -> list[int]:
    """The smallest numbers and arrays of numbers that a loop returns and something reads."""
    able = (i for i, r in enumerate(loop.results) if _is_number(r.type) and any(map(bool, r.uses)))
    return sorted(able, key=lambda i: math.prod(loop.results[i].type.shape))[:_TIED]


def _is_number(kind: Any) -> bool:
    return str(kind.element_type) in _NUMBERS


def _tick(loop: Any, mesh: MeshShape, channel: int, is_manual: bool) -> None:
    """Replace a loop by the same loop with a tick."""
    kind = ir.RankedTensorType.get([], ir.F32Type.get())
    zero = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(ir.F32Type.get(), 0.0))
    tied = _tied(loop)
    with ir.InsertionPoint(loop):
        start = stablehlo.ConstantOp(zero).result
        ticking = ir.Operation.create(
            _WHILE,
            results=[*(r.type for r in loop.results), kind],
            operands=[*loop.operands, start],
            attributes={a.name: a.attr for a in loop.attributes},
            regions=2,
        )
    for old, new in zip(loop.regions, ticking.regions, strict=True):
        old.blocks[0].append_to(new)
        new.blocks[0].add_argument(kind, ir.Location.unknown())
    body = ticking.regions[1].blocks[0]
    last = body.operations[len(body.operations) - 1].operation
    with ir.InsertionPoint(last):
        sent = _sent(body.arguments[len(body.arguments) - 1], mesh, channel, is_manual)
        stablehlo.ReturnOp([*last.operands, sent])
    last.erase()
    results = list(ticking.results)[:-1]
    with ir.InsertionPoint(loop):
        for i in tied:
            added = _as(ticking.results[len(results)], results[i].type)
            results[i] = stablehlo.AddOp(results[i], added).result
    for old, new in zip(loop.results, results, strict=True):
        old.replace_all_uses_with(new)
    loop.erase()


def _as(tick: Any, kind: Any) -> Any:
    """The tick as an array of another type."""
    number = ir.RankedTensorType.get([], kind.element_type)
    converted = stablehlo.ConvertOp(number, tick).result
    return stablehlo.BroadcastInDimOp(kind, converted, ir.DenseI64ArrayAttr.get([])).result


def _sent(tick: Any, mesh: MeshShape, channel: int, is_manual: bool) -> Any:
    """The tick of the device before."""
    if is_manual:
        return _permuted(tick, mesh, channel)
    axes = ", ".join(f'"{name}"' for name in mesh.names)
    lies = ir.Attribute.parse("#sdy.sharding_per_value<[<@mesh, []>]>")
    manual = ir.Operation.create(
        _MANUAL,
        results=[tick.type],
        operands=[tick],
        attributes={
            "in_shardings": lies,
            "out_shardings": lies,
            "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{axes}}}>"),
        },
        regions=1,
    )
    block = manual.regions[0].blocks.append(tick.type, arg_locs=[ir.Location.unknown()])
    with ir.InsertionPoint(block):
        sent = _permuted(block.arguments[0], mesh, channel)
        ir.Operation.create("sdy.return", operands=[sent])
    return manual.results[0]


def _permuted(tick: Any, mesh: MeshShape, channel: int) -> Any:
    devices = math.prod(mesh.sizes)
    pairs = ", ".join(f"[{i}, {(i + 1) % devices}]" for i in range(devices))
    return ir.Operation.create(
        "stablehlo.collective_permute",
        results=[tick.type],
        operands=[tick],
        attributes={
            "source_target_pairs": ir.Attribute.parse(
                f"dense<[{pairs}]> : tensor<{devices}x2xi64>"
            ),
            "channel_handle": ir.Attribute.parse(_CHANNEL.format(handle=channel)),
        },
    ).results[0]
