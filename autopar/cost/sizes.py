"""Bytes and shapes of the pieces that a device of one mesh holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from autopar.cluster.chip import Platform
from autopar.cost.ops import group_count, operand_shape
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.listing import (
    Block,
    Listing,
    LocalOp,
)
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.values import Literal, Value

_T = TypeVar("_T")
_Given = Mapping[str, int]  # bytes of what a block is given


class Sizes:
    """Looks up ops and weighs pieces on one mesh of devices of a platform.

    What is read of blocks is kept: what weighs a listing and what times it read it once.
    """

    def __init__(self, graph: Graph, mesh: MeshShape, platform: Platform = "gpu") -> None:
        self._graph, self.mesh = graph, mesh
        self.platform: Platform = platform
        self._known: dict[tuple[tuple[int, ...], str, Sharding], int] = {}
        self._read: list[tuple[Block, _Given, object]] = []
        self._numbers: dict[Hashable, int] = {}

    def once(self, kind: type[_T], block: Block, given: _Given, make: Callable[[], _T]) -> _T:
        """Of a block on such inputs the one answer of a kind, made where it is not known."""
        for known, lying, answer in self._read:
            if known is block and isinstance(answer, kind) and lying == given:
                return answer
        made = make()
        self._read.append((block, dict(given), made))
        return made

    def number_of(self, key: Hashable) -> int:
        """A number that all equal keys have, whichever block they come from."""
        return self._numbers.setdefault(key, len(self._numbers))

    def of(self, value: Value, sharding: Sharding) -> int:
        """Bytes of one device's piece of a value."""
        key = (value.shape, value.dtype, sharding)
        found = self._known.get(key)
        if found is None:
            found = sharding.local_bytes(value, self.mesh)
            self._known[key] = found
        return found

    def inputs(self, program: Listing) -> dict[str, int]:
        """Bytes of one device's pieces of the step's arguments."""
        lying = zip(self._graph.inputs, program.input_shardings, strict=True)
        return {i.value.name: self.of(i.value, s) for i, s in lying}

    def operand(self, run: LocalOp, op: Op, k: int) -> int:
        """Bytes of one device's piece of an op's operand; 0 for a literal."""
        operand = op.operands[k]
        if isinstance(operand, Literal):
            return 0
        return self.of(self._graph.nested_values[operand], run.operand_shardings[k])

    def dtype(self, operand: Operand) -> str:
        """The dtype of an op's operand."""
        if isinstance(operand, Literal):
            return operand.dtype
        return self._graph.nested_values[operand].dtype

    def op(self, path: tuple[int, ...]) -> Op:
        """The op that an instruction runs."""
        return self._graph.ops[path[0]] if len(path) == 1 else self._graph.op_at(path)

    def shard(self, run: LocalOp, op: Op, operand: int = 0) -> tuple[int, ...]:
        """The shape of the piece of an op's operand; () where its rule does not tell."""
        shape = operand_shape(op, operand)
        return self.local(run.operand_shardings[operand], shape) if shape else ()

    def made(self, run: LocalOp, op: Op) -> tuple[int, ...]:
        """The shape of the piece of an op's first result."""
        return self.local(run.result_shardings[0], op.results[0].shape)

    def local(self, sharding: Sharding, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a device's piece of a value."""
        return sharding.shard_shape(shape, self.mesh)


def product_dims(op: Op, run: LocalOp, sizes: Sizes) -> tuple[int, int, int, int] | None:
    """The batches, rows, columns and terms of each sum of a device's piece of a matrix product.

    Each group of a ragged one has terms, or columns, of its own. None for other ops.
    """
    if op.kind not in ("dot_general", "ragged_dot_general") or op.rule is None:
        return None
    right, kept = set(op.rule.operands[1]), set(op.rule.results[0])
    batches = rows = terms = 1
    if any(groups[-1] not in kept for groups in op.rule.operands[2:]):
        terms = group_count(op)
    for dim, size in zip(op.rule.operands[0], sizes.shard(run, op), strict=True):
        if dim not in kept:
            terms *= size
        elif dim in right:
            batches *= size
        else:
            rows *= size
    return batches, rows, math.prod(sizes.made(run, op)) // max(1, batches * rows), terms
