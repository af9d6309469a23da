"""Hand-written layouts of models that mark their weights and activations by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from jax.sharding import PartitionSpec

from benchmarks.hand.decoder import HOST, D, M, data_layouts
from benchmarks.hand.layout import Flow, Layout, SpecOf, split_more, whole

P = PartitionSpec
_SMALL = 2**16  # elements: less than that is kept on every device

# What Megatron cuts up over the model axis, as in `decoder`; of a Mamba its channels.
_CUT = (
    (r"(query|key|value|up|gate|step|head|modulate)/kernel$", P(None, M)),
    (r"(query|key|value|up|gate|step|modulate|taps)/bias$", P(M)),
    (r"(query|key|value)/wide$", P(None, M)),
    (r"out/narrow$", P(M, None)),
    (r"(out|down|select)/kernel$", P(M, None)),
    (r"(taps|decay)/channels$", P(None, M)),
    (r"skip/scale$", P(M)),
    (r"tokens/embedding$", P(M, None)),
)


def transformer_layouts(devices: int) -> Iterator[tuple[str, Layout]]:
    """Data, ZeRO-1, FSDP, Megatron with its sequences cut up, and FSDP with Megatron."""
    yield from by_data(devices)
    yield f"tp {devices}", _tensor(1, devices)
    model = 2
    while model < devices:
        if model <= HOST:
            yield f"fsdp+tp {devices // model}x{model}", _tensor(devices // model, model)
        model *= 2


def recommender_layouts(devices: int) -> Iterator[tuple[str, Layout]]:
    """Data layouts, and tables cut up by rows, by columns or by both, with MLPs everywhere."""
    yield from by_data(devices)
    yield f"rows {devices}", _tables(((D, devices),), P(D), P())
    yield f"columns {devices}", _tables(((D, devices),), P(None, D), P(None, D))
    model = 2
    while model < devices:
        axes = ((D, devices // model), (M, model))
        yield f"rows+columns {devices // model}x{model}", _tables(axes, P(D, M), P(None, M))
        model *= 2


def by_data(devices: int) -> Iterator[tuple[str, Layout]]:
    """Rows over all devices; small arrays are everywhere."""
    for name, layout in data_layouts(devices):
        stored, updated = _unless_small(layout.stored), _unless_small(layout.updated)
        yield name, replace(layout, stored=stored, updated=updated, flows=_rows(layout.batch))


def _rows(rows: PartitionSpec) -> Callable[[str], Flow]:
    """Activations by rows, but those that every row is compared with."""

    def flows(kind: str) -> Flow:
        return Flow((P(),), (rows,)) if kind == "candidates" else Flow.both(rows)

    return flows


def _unless_small(spec_of: SpecOf) -> SpecOf:
    def found(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        return spec_of(path, shape) if math.prod(shape) >= _SMALL else P()

    return found


def _tensor(data: int, model: int) -> Layout:
    """Megatron with its sequences cut up between blocks; parameters are kept on every device."""

    def used(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        spec = next((spec for pattern, spec in _CUT if re.search(pattern, path)), P())
        divides = all(n % model == 0 for n, axis in zip(shape, spec, strict=False) if axis)
        return spec if divides else P()

    def stored(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        spec = used(path, shape)
        return split_more(spec, shape, D, data) if math.prod(shape) >= _SMALL else spec

    inside, between, rows = P(D, None, M), P(D, M, None), P(D, None, None)
    known = {
        "inside": Flow.both(inside),
        "residual": Flow.both(between),
        "projected": Flow((between,), (between, rows)),
        "normed": Flow((between, rows), (between,)),
        "entered": Flow((between, rows), (between,)),
        "candidates": Flow((P(M),), (P(D),)),
        "scores": Flow.both(P(D, M)),
    }

    def flows(kind: str) -> Flow:
        return known.get(kind, Flow.both(P(D)))

    axes = ((D, data), (M, model))
    return Layout(axes, P(D), stored, used, stored, flows=flows)


def _tables(
    axes: tuple[tuple[str, int], ...], table: PartitionSpec, found: PartitionSpec
) -> Layout:
    """Tables cut up by one spec; `found` is what of a row each device has of its own pieces."""
    rows = P(tuple(name for name, _ in axes))

    def stored(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        return table if path.startswith("tables/") else whole(path, shape)

    def flows(kind: str) -> Flow:
        if kind == "ids":
            return Flow((P(),))
        return Flow((found, rows), (rows, found)) if kind == "looked up" else Flow.both(rows)

    # By rows alone a device has sums to add up: they go straight to the rows of the batch.
    if found == P():
        straight = Flow((rows,), (rows, P()))
        return Layout(
            axes, rows, stored, stored, stored,
            flows=lambda kind: straight if kind == "looked up" else flows(kind),
        )  # fmt: skip
    return Layout(axes, rows, stored, stored, stored, flows=flows)
