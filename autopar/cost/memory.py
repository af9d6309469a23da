"""How much a device holds at most while it runs a listing: liveness over its instructions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, Op
from autopar.ir.mesh import MeshShape
from autopar.ir.rule import Kind
from autopar.ir.sharding import Sharding
from autopar.ir.spmd import Block, Fence, Instruction, Loop, Move, Run, SpmdProgram
from autopar.ir.values import Value, item_bytes


@dataclass(frozen=True)
class Held:
    """Bytes of the arguments, and the most that is held at once, arguments included."""

    argument_bytes: int
    peak_bytes: int


def held_bytes(graph: Graph, program: SpmdProgram, mesh: MeshShape) -> Held:
    """What one device holds over a step.

    Pieces live from the instruction that makes them to the last that reads them. What only
    element-wise work reads is fused and never stored. State that comes back is updated in
    place. A loop holds what its body holds at most beside what is held around it.
    """
    sizes = _Sizes(graph, mesh)
    arguments = sum(
        sizes.of(i.value, s) for i, s in zip(graph.inputs, program.input_shardings, strict=True)
    )
    in_place = {
        program.block.outputs[o] for o, _ in graph.donated if program.block.outputs[o] is not None
    }
    peak = _Liveness(sizes, {n for n in in_place if n is not None}).peak(program.block)
    return Held(arguments, arguments + peak)


class _Sizes:
    """Looks up ops and weighs pieces."""

    def __init__(self, graph: Graph, mesh: MeshShape) -> None:
        self._graph, self._mesh = graph, mesh

    def of(self, value: Value, sharding: Sharding) -> int:
        """Bytes of one device's piece of a value."""
        return math.prod(sharding.shard_shape(value.shape, self._mesh)) * item_bytes(value.dtype)

    def op(self, path: tuple[int, ...]) -> Op:
        """The op that an instruction runs."""
        return self._graph.op_at(path)


class _Liveness:
    def __init__(self, sizes: _Sizes, in_place: set[str]) -> None:
        self._sizes, self._in_place = sizes, in_place

    def peak(self, block: Block) -> int:
        """The most bytes that a block's own pieces hold at once, its inputs left out."""
        last = _last_reads(block)
        stored = self._stored(block)
        inputs = set(block.inputs)
        now = most = 0
        dying: dict[int, int] = defaultdict(int)
        for at, step in enumerate(block.instructions):
            inner = (
                max((self.peak(b) for b in step.bodies), default=0) if isinstance(step, Loop) else 0
            )
            for name, nbytes in self._made(step).items():
                if name in stored and name not in inputs:
                    now += nbytes
                    dying[last.get(name, at)] += nbytes
            most = max(most, now + inner)
            now -= dying[at]
        return most

    def _made(self, step: Instruction) -> Mapping[str, int]:
        if isinstance(step, Move):
            return {step.result: self._sizes.of(step.value, step.after)}
        if isinstance(step, Run):
            made = self._sizes.op(step.equation).results
            triples = zip(step.results, made, step.result_shardings, strict=True)
            return {n: self._sizes.of(v, s) for n, v, s in triples}
        if isinstance(step, Loop):
            return {
                name: self._sizes.of(v, s)
                for name, v, s in zip(
                    step.results, self._sizes.op(step.equation).results, step.result_shardings,
                    strict=True,
                )
            }  # fmt: skip
        return {}  # a fence renames

    def _stored(self, block: Block) -> set[str]:
        """Pieces that are written to memory: all but those fused into element-wise readers.

        Fusion does not reach from one region of the step into another: what the forward pass
        makes for the backward pass is stored.
        """
        fusible: dict[str, str] = {}  # piece -> the region of the element-wise op that makes it
        unfused: set[str] = {o for o in block.outputs if o is not None}
        for step in block.instructions:
            region = self._fused_region(step)
            unfused.update(n for n in _reads(step) if region is None or fusible.get(n) != region)
            if region is not None:
                fusible.update((n, region) for n in _results(step))
        made = {n for step in block.instructions for n in _results(step)}
        return {n for n in made if n not in fusible or n in unfused} - self._in_place

    def _fused_region(self, step: Instruction) -> str | None:
        """The region of an element-wise op; None for anything else."""
        if not isinstance(step, Run):
            return None
        op = self._sizes.op(step.equation)
        return op.origin.region if _is_elementwise(op) else None


def _is_elementwise(op: Op) -> bool:
    rule = op.rule
    if rule is None or not rule.known or len(op.results) != 1:
        return False
    return all(f.kind is Kind.PASS for f in rule.factors)


def _last_reads(block: Block) -> Mapping[str, int]:
    last: dict[str, int] = {}
    for at, step in enumerate(block.instructions):
        for name in _reads(step):
            last[name] = at
        if isinstance(step, Fence):
            # Both names are one buffer: it lives as long as either is read.
            last.update(dict.fromkeys(step.sources, at))
    for renamed, source in reversed(list(_renames(block))):
        last[source] = max(last.get(source, 0), last.get(renamed, 0))
    end = len(block.instructions)
    last.update((name, end) for name in block.outputs if name is not None)
    return last


def _renames(block: Block) -> Iterator[tuple[str, str]]:
    for step in block.instructions:
        if isinstance(step, Fence):
            yield from zip(step.results, step.sources, strict=True)


def _reads(step: Instruction) -> tuple[str, ...]:
    if isinstance(step, Move):
        return (step.source,)
    if isinstance(step, Fence):
        return step.sources
    return tuple(o for o in step.operands if o is not None)


def _results(step: Instruction) -> tuple[str, ...]:
    if isinstance(step, Move):
        return (step.result,)
    return step.results
