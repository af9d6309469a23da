"""Layer sequences, made of the first ops of layers: work, bytes, names, homes, equal layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, takewhile

from autopar.ir.batching import Batching
from autopar.ir.graph import Graph, Op
from autopar.ir.paths import module_of, ranged_path, unnumbered
from autopar.ir.stages import Layer, LayerSequence
from autopar.ir.values import Role
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
    names = _names(batching.graph, [forward.ops[a:b] for a, b in bounds])
    ends = [forward.positions[b - 1] for _, b in bounds]
    firsts = [0, *(end + 1 for end in ends[:-1])]
    layers = tuple(
        Layer(first, last, int(forward.flops[a:b].sum()), int(forward.crossing[b - 1]), name)
        for first, last, (a, b), name in zip(firsts, ends, bounds, names, strict=True)
    )
    found = assign_layers(forward, layers)
    return LayerSequence(batching.graph, layers, found, assign_inputs(batching, found))


# -- names -------------------------------------------------------------------------------------


def _names(graph: Graph, groups: Sequence[Sequence[Op]]) -> list[str]:
    """The module that each layer is, or the largest part of it that no other has a part of.

    Where no op has a named scope, as in flax nnx, an op is of the module whose parameters it reads.
    """
    work = [Counter[Path]() for _ in groups]
    for found, ops in zip(work, groups, strict=True):
        for op in ops:
            found[tuple(filter(None, op.origin.module.split("/")))] += op.flops
    if not any(any(found) for found in work):
        given = {i.value.name: module_of(i.path) for i in graph.inputs if i.role is Role.STATE}
        work = [Counter[Path]() for _ in groups]
        for found, ops in zip(work, groups, strict=True):
            for op in ops:
                for module in (given[n] for n in op.value_operands if n in given):
                    found[tuple(module.split("/"))] += op.flops
    return [_name(found, [o for j, o in enumerate(work) if j != i]) for i, found in enumerate(work)]


def _name(work: Counter[Path], others: Sequence[Counter[Path]]) -> str:
    """The outermost part of a layer that tells it from others, with those that are alike."""
    steps = takewhile(lambda step: len(set(step)) == 1, zip(*filter(None, work), strict=False))
    path: Path = tuple(step[0] for step in steps)
    while any(part[: len(path)] == path for other in others for part in other):
        parts = Counter[Path]()
        for part, flops in work.items():
            if len(part) > len(path) and part[: len(path)] == path:
                parts[part[: len(path) + 1]] += flops
        if not parts:
            break
        path = max(parts, key=lambda p: parts[p])
        alike = [p for p in parts if unnumbered("/".join(p)) == unnumbered("/".join(path))]
        if len(alike) > 1:
            return ranged_path(["/".join(p) for p in alike])
    return "/".join(path)
