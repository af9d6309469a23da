"""Operands that an op of a graph may have to be written out for, in another order than they lie in.

Which ones lie so is in the graph; whether they are written out depends on how they are sharded, so
each choice of their reader has its own bytes. Attention with grouped queries is the case: where the
groups of one head of keys, or one sequence, are on a device, its scores need not be turned over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.cost.layouts import Orders, Turned, visited, wasted_bytes
from autopar.cost.ops import is_better_swapped, is_fused_into_readers, is_reduction
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.sharding_plan import OpPath
from autopar.ir.values import Value

_BARRIER = "optimization_barrier"


@dataclass(frozen=True)
class TurnedReads:
    """The operands of an op that lie in an order, and the products' results that they are from."""

    op: Op
    turned: tuple[Turned, ...]
    values: tuple[Value, ...]
    products: tuple[Value, ...]

    def nbytes(self, lying: Mapping[int, Sharding], mesh: MeshShape, on_gpu: bool) -> float:
        """The bytes that a device loads and stores to write out those that do not lie right.

        `lying` says how each is sharded, by its number; of element-wise work, how the result is.
        """
        rule, moved = self.op.rule, 0.0
        assert rule is not None
        for turned, value, product in zip(self.turned, self.values, self.products, strict=True):
            sharding = lying[turned.operand]
            shape = value.shape if turned.first is None else self.op.results[0].shape
            local = [n // mesh.size(a) for n, a in zip(shape, sharding.dims, strict=True)]
            here = turned.sized(local)
            wanted = here.wanted(rule, on_gpu)
            if wanted is None:
                continue
            moved += 2 * sharding.local_bytes(value, mesh)
            if on_gpu and not here.order.is_tiled(wanted):
                moved += wasted_bytes(sharding.local_bytes(product, mesh), product.dtype)
        return moved


@dataclass(frozen=True)
class _Line:
    """An op of a block, remat ops' bodies in their places, with what it reads and makes there."""

    path: OpPath
    op: Op
    reads: tuple[str | None, ...]


def turned_reads(graph: Graph, on_gpu: bool) -> Mapping[OpPath, TurnedReads]:
    """The ops of a graph, and of the bodies in it, that may have to be given operands anew.

    On GPUs products are made with their operands swapped where their only reader wants that. One
    copy serves all that want it, so only the first reader of a value has it.
    """
    values = graph.nested_values
    return {
        path: TurnedReads(
            op,
            tuple(turned),
            tuple(values[t.name] for t in turned),
            tuple(values[t.order.made] for t in turned),
        )
        for path, op, turned in _block(graph, (), on_gpu)
    }


def _block(graph: Graph, path: OpPath, on_gpu: bool) -> Iterator[tuple[OpPath, Op, list[Turned]]]:
    # 1. The block in one line: remat ops are inlined, as the listing has them.
    lines = list(_inlined(graph, path, graph.aliases))
    reads = {r.name: line.reads for line in lines for r in line.op.results}
    # 2. The order of what each op reads; a body of its own has its own orders.
    orders = Orders(visited((_named(graph.aliases, o) for o in graph.outputs), reads))
    known = set[tuple[str, tuple[int, ...]]]()
    readers: dict[str | None, list[Op | None]] = {
        _named(graph.aliases, o): [None] for o in graph.outputs
    }
    for line in lines if on_gpu else ():
        for name in dict.fromkeys(line.reads):
            readers.setdefault(name, []).append(line.op)
    for line in lines:
        op, rule = line.op, line.op.rule
        for b, body in enumerate(op.graphs):
            yield from _block(body, (*line.path, b), on_gpu)
        if op.kind == _BARRIER:
            for source, result in zip(line.reads, op.results, strict=True):
                if source is not None:
                    orders.renamed(source, result.name)
        if op.graphs or rule is None or not op.results:
            continue
        made, found = op.results[0].name, list[Turned]()
        if is_fused_into_readers(op):
            found = orders.element_wise(op, line.reads, made) if orders.any else []
        elif op.kind == "dot_general" and not is_reduction(op):
            reading = readers.get(made, [])
            swapped = bool(reading) and all(r and is_better_swapped(op, r) for r in reading)
            found = orders.product(op, line.reads, made, op.results[0].shape, swapped)
        # Dims that are one long on a device only make an order suit: what suits whole does so cut.
        copied = list[Turned]()
        for turned in found:
            wanted = (
                turned.wanted(rule, on_gpu=False) if turned.first is None else turned.first.dims
            )
            if wanted is not None and (turned.copied, wanted) not in known:
                known.add((turned.copied, wanted))
                copied.append(turned)
        if copied:
            yield line.path, op, copied


def _inlined(graph: Graph, path: OpPath, aliases: Mapping[str, str]) -> Iterator[_Line]:
    for i, op in enumerate(graph.ops):
        at = (*path, i)
        if op.control_flow is not None and op.control_flow.is_remat:
            yield from _inlined(op.graphs[0], (*at, 0), aliases)
        else:
            yield _Line(at, op, tuple(_named(aliases, o) for o in op.operands))


def _named(aliases: Mapping[str, str], operand: Operand) -> str | None:
    """The name that a value has where it is made; None for a literal."""
    while isinstance(operand, str) and operand in aliases:
        operand = aliases[operand]
    return operand if isinstance(operand, str) else None
