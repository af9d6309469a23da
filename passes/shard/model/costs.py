"""Costs on one device: bytes of values, seconds of ops, collectives and moves between shardings.

Moves from each of some shardings to each of others are priced once a mesh.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost.prices import Prices, fused_seconds, kernel_seconds
from autopar.cost.reshard import Resharder
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.listing import Block, Listing, LocalOp, Loop, Move
from autopar.ir.rule import Rule
from autopar.ir.sharding import Assignment, MeshShape, Sharding
from autopar.ir.values import Literal, Value
from autopar.passes.shard.model.choices import MeshChoices, Options, Row
from autopar.passes.shard.model.decisions import Choice
from autopar.passes.shard.solver.problem import Floats


@dataclass(frozen=True)
class LocalCosts:
    """Bytes of each value's piece; seconds of one run of the op that makes it, by its results."""

    nbytes: Mapping[str, float]
    seconds: Mapping[str, float]


def local_costs(graph: Graph, program: Listing, prices: Prices) -> LocalCosts:
    """The costs of a step as it was lowered; what repeating an op repeats is its own reductions."""
    reader = _Reader(graph, prices)
    reader.read_block(program.block)
    reader.read_aliases(graph)
    return LocalCosts(dict(reader.nbytes), dict(reader.seconds))


def is_elementwise(op: Op) -> bool:
    """True if each item of the only result comes from one item of each operand.

    Only such ops are taken to be fused into their readers here. Slices and pads are fused too, but
    to repeat one in its readers, what it reads has to be held until then, and that has another
    size: the residuals do not follow what a fused op reads.
    """
    return op.rule is not None and op.rule.is_elementwise


class _Reader:
    def __init__(self, graph: Graph, prices: Prices) -> None:
        self._graph, self._chip = graph, prices.cluster.chip
        self._mesh: MeshShape = prices.mesh
        self.nbytes: defaultdict[str, float] = defaultdict(float)
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def read_block(self, block: Block) -> None:
        """Reads the ops and moves of a block and of the blocks within."""
        for step in block.instructions:
            if isinstance(step, LocalOp):
                self._read_run(step)
            elif isinstance(step, Move):
                # From an op's raw result to its home: a reduction, which a repetition repeats.
                if step.source == f"{step.value.name}.raw":
                    self.nbytes[step.value.name] = self._local(step.value, step.after)
                    self.seconds[step.value.name] += sum(c.seconds for c in step.collectives)
            elif isinstance(step, Loop):
                for body in step.bodies:
                    self.read_block(body)
                self._read_loop(step)

    def read_aliases(self, graph: Graph) -> None:
        """The results of remat ops are values of their bodies."""
        for op in graph.ops:
            if op.kind == "optimization_barrier":
                for result, given in zip(op.results, op.operands, strict=True):
                    held = 0.0 if isinstance(given, Literal) else self.nbytes[given]
                    self.nbytes[result.name] = held
            for body in op.graphs:
                self.read_aliases(body)
                if op.control_flow is not None and op.control_flow.is_remat:
                    for result, inner in zip(op.results, body.outputs, strict=True):
                        held = 0.0 if isinstance(inner, Literal) else self.nbytes[inner]
                        self.nbytes[result.name] = held

    def _read_run(self, run: LocalOp) -> None:
        op = self._graph.op_at(run.equation)
        made = 0.0
        for value, sharding in zip(op.results, run.result_shardings, strict=True):
            local = self._local(value, sharding)
            made += local
            self.nbytes[value.name] = max(local, self.nbytes[value.name])
        if op.results:
            self.seconds[op.results[0].name] += self._run_seconds(op, run, made)

    def _run_seconds(self, op: Op, run: LocalOp, made: float) -> float:
        if is_elementwise(op):
            return fused_seconds(self._chip, made)
        laid = zip(map(self._operand, op.operands), run.operand_shardings, strict=True)
        read = sum(self._local(value, sharding) for value, sharding in laid)
        return kernel_seconds(self._chip, op, read + made, run.share(self._mesh))

    def _operand(self, operand: Operand) -> Value:
        if isinstance(operand, Literal):
            return Value("", operand.shape, operand.dtype)
        return self._graph.nested_values[operand]

    def _read_loop(self, loop: Loop) -> None:
        op = self._graph.op_at(loop.equation)
        for value, sharding in zip(op.results, loop.result_shardings, strict=True):
            self.nbytes[value.name] = self._local(value, sharding)
        if op.results:
            inner = sum(
                self.seconds[body_op.results[0].name]
                for body in op.graphs
                for body_op in body.ops
                if body_op.results
            )
            self.seconds[op.results[0].name] = loop.runs * inner

    def _local(self, value: Value, sharding: Sharding) -> float:
        return sharding.local_bytes(value, self._mesh)


_MoveKey = tuple[tuple[int, ...], str, int, int, tuple[str, ...]]
_OpKey = tuple[str, int, tuple[str, ...], int, int]


class ReshardCosts:
    """The tables of one cluster and mesh; whoever poses a second problem there finds them made.

    What ops look alike and lie alike cost the same, in whatever graph. A row of shardings is one of
    the `choices`, so its id stands for it.
    """

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.resharder = Resharder(prices)
        self.choices = MeshChoices(prices.mesh)
        self._made: dict[_MoveKey, Floats] = {}
        self._ops: dict[_OpKey, tuple[Rule, Floats]] = {}  # the rule is kept, and so is its id

    def op_seconds(self, op: Op, values: Sequence[Value], options: Options) -> Floats:
        """Seconds of one run of an op for each of its choices; `values` it reads, then makes."""
        rule = op.rule
        assert rule is not None
        key = op.kind, id(rule), tuple(v.type_text for v in values), op.flops, id(options)
        if key not in self._ops:
            seconds = [self._run_seconds(op, rule, values, c) for c in options]
            self._ops[key] = rule, np.array(seconds)
        return self._ops[key][1]

    def _run_seconds(self, op: Op, rule: Rule, values: Sequence[Value], choice: Choice) -> float:
        assert isinstance(choice, Assignment)
        mesh = self.prices.mesh
        nbytes = 0.0
        for i, value in enumerate(values):
            sharding = (
                choice.operand_sharding(rule, i, mesh)
                if i < len(op.operands)
                else choice.result_sharding(rule, i - len(op.operands), mesh)
            )
            nbytes += sharding.local_bytes(value, mesh)
        return self.prices.kernel(op, nbytes, choice.share(mesh))

    def matrix(
        self,
        value: Value,
        before: Row,
        after: Row,
        combiners: tuple[str, ...] = (),
    ) -> Floats:
        """[before, after] seconds; infinite where there is no such move.

        `combiners` say for each of `before` how its partial results combine; left out, by sums.
        """
        key = (value.shape, value.dtype, id(before), id(after), combiners)
        if key not in self._made:
            before, after = self.choices.row(before), self.choices.row(after)
            own = (value.shape, value.dtype, id(before), id(after), combiners)
            if own not in self._made:
                self._made[own] = self._priced(value, before, after, combiners)
            return self._made[own]
        return self._made[key]

    def _priced(
        self,
        value: Value,
        before: Row,
        after: Row,
        combiners: tuple[str, ...],
    ) -> Floats:
        mesh = self.prices.mesh
        partial = any(s.partial for s in (*before, *after))
        table = self.resharder.table(value, partial)
        rows: list[int] = []
        extra = np.zeros(len(before))
        for i, state in enumerate(before):
            special = bool(combiners) and combiners[i] != "sum" and bool(state.partial)
            if special:
                local = state.local_bytes(value, mesh)
                extra[i] = self.prices.joined("all-reduce", local, state.partial)
            rows.append(table.index.get(Sharding(state.dims) if special else state, -1))
        columns = [table.index.get(s, -1) for s in after]
        seconds: Floats = table.seconds[np.ix_(rows, columns)] + extra[:, None]
        seconds[np.array(rows) < 0, :] = np.inf
        seconds[:, np.array(columns) < 0] = np.inf
        return seconds
