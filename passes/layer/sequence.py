"""Layer sequences, made of the first ops of layers: work, bytes, names, homes, equal layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

from autopar.ir.batching import Batching
from autopar.ir.graph import Op
from autopar.ir.stages import Layer, LayerSequence
from autopar.passes.layer.forward_pass import Forward
from autopar.passes.layer.isomorphism import find_classes
from autopar.passes.layer.layer_assignment import assign_inputs, assign_layers

Path = tuple[str, ...]


def layers_from(batching: Batching, forward: Forward, starts: Sequence[int]) -> LayerSequence:
    """The layers whose first forward ops are `starts`, with those that are alike.

    Starts count the forward ops from 0.
    """
    return find_classes(layers_between(batching, forward, starts))


def layers_between(batching: Batching, forward: Forward, starts: Sequence[int]) -> LayerSequence:
    """The same layers, no two of them compared."""
    bounds = list(pairwise([*starts, len(forward.positions)]))
    names = _names([forward.ops[a:b] for a, b in bounds])
    ends = [forward.positions[b - 1] for _, b in bounds]
    firsts = [0, *(end + 1 for end in ends[:-1])]
    layers = tuple(
        Layer(first, last, int(forward.flops[a:b].sum()), int(forward.crossing[b - 1]), name)
        for first, last, (a, b), name in zip(firsts, ends, bounds, names, strict=True)
    )
    found = assign_layers(forward, layers)
    return LayerSequence(batching.graph, layers, found, assign_inputs(batching, found))


# -- names -------------------------------------------------------------------------------------


def _names(groups: Sequence[Sequence[Op]]) -> list[str]:
    """The module that each layer is, or the largest part of it where it shares its module."""
    paths = [_module(ops) for ops in groups]
    shared = [
        any(p == q[: len(p)] for j, q in enumerate(paths) if j != i) for i, p in enumerate(paths)
    ]
    return [
        "/".join(_largest_part(ops, path) if common else path)
        for ops, path, common in zip(groups, paths, shared, strict=True)
    ]


def _module(ops: Sequence[Op]) -> Path:
    paths = [op.origin.module.split("/") for op in ops if op.origin.module]
    steps = takewhile(lambda step: len(set(step)) == 1, zip(*paths, strict=False))
    return tuple(step[0] for step in steps)


def _largest_part(ops: Sequence[Op], path: Path) -> Path:
    """The module one step below a path that has most of the FLOPs."""
    work: dict[Path, int] = {}
    for op in ops:
        part = tuple(op.origin.module.split("/"))[: len(path) + 1]
        if len(part) > len(path) and part[0]:
            work[part] = work.get(part, 0) + op.flops
    return max(work, key=lambda part: work[part], default=path)
