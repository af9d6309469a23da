"""The structural key of a step: a hash of what it computes, by which plans know it again."""

from __future__ import annotations

import hashlib

from autopar.ir.graph import Graph, Op


def structural_key(graph: Graph) -> str:
    """A hash of ops, shapes, parameters, literals and paths.

    The step's name, its modules and its source lines are left out, so that it stays the same
    where the code moves; so are FLOPs and regions, which follow from the rest.
    """
    return hashlib.sha256(repr(_graph_skeleton(graph)).encode()).hexdigest()


def _graph_skeleton(graph: Graph) -> tuple[object, ...]:
    inputs = tuple(map(str, graph.inputs))
    ops = tuple(map(_op_skeleton, graph.ops))
    return inputs, ops, tuple(map(str, graph.outputs)), graph.output_paths, graph.donated


def _op_skeleton(op: Op) -> tuple[object, ...]:
    operands, results = tuple(map(str, op.operands)), tuple(map(str, op.results))
    return op.kind, operands, results, op.params, tuple(map(_graph_skeleton, op.graphs))
