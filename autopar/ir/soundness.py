"""Checks that a listing computes what its graph says: every op on pieces that fit together.

A plan may come from a file, so what it decides is not trusted. Here the listing that it lowers to
is read like a typed program: the type of a piece is how it lies on the mesh. An op may run on its
pieces alone where its rule says so (after Shardy: axes on the major factor of every dim, partial
sums through linear operands only), a move starts from what is there, loops leave carries as they
found them. What passes can be slow, but it cannot be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from autopar.errors import GraphError
from autopar.ir.control_flow import Port, PortKind
from autopar.ir.graph import Graph, Op
from autopar.ir.host_calls import HOST_CALLS, handed_on_by
from autopar.ir.listing import REDUCTIONS, Block, Fence, Listing, LocalOp, Loop, Move
from autopar.ir.rule import Dims, Kind, Rule
from autopar.ir.sharding import MeshShape, Sharding, replicated
from autopar.ir.values import Literal, Value


@dataclass(frozen=True)
class _Piece:
    """The sharding of a piece, axes of size 1 left out, and how its partial results combine."""

    sharding: Sharding
    combiner: str = "sum"
    is_zero: bool = field(default=False, compare=False)

    def serves_as(self, wanted: _Piece) -> bool:
        """True if it lies as is wanted. Zeros do as partial sums of any kind: they add nothing."""
        as_sum = self.is_zero and self.sharding.dims == wanted.sharding.dims
        return self == wanted or (as_sum and wanted.combiner == "sum")


_Pieces = tuple[Sequence[_Piece], Sequence[_Piece]]  # that an op reads and makes


@dataclass(frozen=True)
class ListingChecker:
    """Checks listings of one mesh: ops that look alike, in whichever of them, are asked once."""

    mesh: MeshShape
    # What was found before: steps have few shapes and layers that are alike. The ids of an op's
    # key stand for what is kept with the answer.
    _lying: dict[tuple[tuple[int, ...], Sharding, str], _Piece] = field(
        default_factory=dict[tuple[tuple[int, ...], Sharding, str], "_Piece"]
    )
    _local: dict[tuple[int, int, int], tuple[_Pieces, object]] = field(
        default_factory=lambda: dict[tuple[int, int, int], tuple[_Pieces, object]]()
    )

    def check(self, graph: Graph, program: Listing) -> None:
        """Raise GraphError, which names the op and its line, unless a listing is sound.

        The graph's ops must carry their rules.
        """
        checker = _Checker(graph, self.mesh, graph.nested_values, self._lying, self._local)
        inputs = [checker.lying(i.value, s) for i, s in zip(
            graph.inputs, program.input_shardings, strict=True
        )]  # fmt: skip
        outputs = checker.block(graph, program.block, inputs)
        for found, wanted in zip(outputs, program.output_shardings, strict=True):
            if not found.serves_as(checker.piece(wanted)):
                raise GraphError(
                    f"an output of {graph.name} lies as {found.sharding}, not as {wanted}"
                )


@dataclass(frozen=True)
class _Checker:
    """Goes through a listing with the pieces that there are."""

    graph: Graph
    mesh: MeshShape
    values: Mapping[str, Value]
    _lying: dict[tuple[tuple[int, ...], Sharding, str], _Piece]
    _local: dict[tuple[int, int, int], tuple[_Pieces, object]]

    def piece(self, sharding: Sharding, combiner: str = "sum") -> _Piece:
        """A sharding without the axes that cut nothing."""
        sizes = dict(zip(self.mesh.names, self.mesh.sizes, strict=True))

        def cutting(axes: Iterable[str]) -> tuple[str, ...]:
            return tuple(a for a in axes if sizes[a] > 1)

        partial = tuple(a for a in self.mesh.names if a in cutting(sharding.partial))
        return _Piece(
            Sharding(tuple(map(cutting, sharding.dims)), partial), combiner if partial else "sum"
        )

    def lying(self, value: Value, sharding: Sharding, combiner: str = "sum") -> _Piece:
        """The piece of a value that lies so; raises GraphError where it cannot."""
        key = (value.shape, sharding, combiner)
        if key not in self._lying:
            if not sharding.fits(value.shape, self.mesh):
                raise GraphError(f"{value} cannot lie as {sharding} on ({self.mesh})")
            self._lying[key] = self.piece(sharding, combiner)
        return self._lying[key]

    def block(self, graph: Graph, block: Block, inputs: Sequence[_Piece]) -> list[_Piece]:
        """The pieces that the block of a graph gives back."""
        held = dict(zip(block.inputs, inputs, strict=True))
        for step in block.instructions:
            if isinstance(step, LocalOp):
                self._run(step, held)
            elif isinstance(step, Move):
                self._move(step, held)
            elif isinstance(step, Fence):
                for source, result in zip(step.sources, step.results, strict=True):
                    held[result] = held[source]
            else:
                self._loop(step, held)
        outputs = [
            held[name] if name is not None else self._literal(o)
            for name, o in zip(block.outputs, graph.outputs, strict=True)
        ]
        if any(o.combiner != "sum" for o in outputs):
            raise GraphError(f"{self.graph.name} gives back partial results that are no sums")
        return outputs

    # -- straight lines --------------------------------------------------------------------

    def _move(self, move: Move, held: dict[str, _Piece]) -> None:
        source = held[move.source]
        if not source.serves_as(self.lying(move.value, move.before, move.combiner)):
            raise GraphError(
                f"{move.value} is moved from {move.before} and lies as {source.sharding}"
            )
        left = self.lying(move.value, move.after)
        if move.combiner != "sum" and move.steps[:1]:
            first = move.steps[0]
            if first.kind not in REDUCTIONS or set(first.axes) != set(move.before.partial):
                raise GraphError(f"{move.value} is combined by {move.combiner} only in part")
        held[move.result] = left

    def _run(self, run: LocalOp, held: dict[str, _Piece]) -> None:
        op = self.graph.op_at(run.equation)
        # A rule stands for the kind and the types of its op.
        of = op.rule, run.operand_shardings, run.result_shardings
        key = id(of[0]), id(of[1]), id(of[2])
        if key not in self._local:
            self._local[key] = self._check_local(op, run), of
        (given, made), _ = self._local[key]
        for operand, name, piece in zip(op.operands, run.operands, given, strict=True):
            if name is None:
                if piece.sharding.partial:
                    over = "+".join(piece.sharding.partial)
                    _fail(op, f"reads a literal as a partial sum over {over}")
            elif (lies := held[name]) is not piece and not lies.serves_as(piece):
                _fail(op, f"reads {operand} as {piece.sharding}, and it lies as {lies.sharding}")
        held.update(zip(run.results, made, strict=True))

    def _literal(self, operand: str | Literal) -> _Piece:
        """A literal, which every device has whole; also a name that stands for one."""
        is_zero = isinstance(operand, Literal) and operand.is_zero
        return _Piece(replicated(len(self._value(operand).shape)), is_zero=is_zero)

    def _value(self, operand: str | Literal) -> Value:
        if isinstance(operand, Literal):
            return Value("", operand.shape, operand.dtype)
        return self.values[operand]

    def _check_local(self, op: Op, run: LocalOp) -> _Pieces:
        """The pieces that an op reads and makes; raises GraphError unless it may run on them."""
        values = map(self._value, op.operands)
        given = [self.lying(v, s) for v, s in zip(values, run.operand_shardings, strict=True)]
        made = [self.lying(v, s) for v, s in zip(op.results, run.result_shardings, strict=True)]
        combiner = self._combiner(op, given, made)
        handed = [handed_on_by(v) if op.kind in HOST_CALLS else combiner for v in op.results]
        rows = zip(op.results, run.result_shardings, handed, strict=True)
        return given, [self.lying(value, sharding, by) for value, sharding, by in rows]

    def _combiner(self, op: Op, given: Sequence[_Piece], made: Sequence[_Piece]) -> str:
        """The combiner of partial results; raises GraphError unless the op may run so."""
        rule = op.rule
        if rule is None:
            _fail(op, "has no rule")
        if len(rule.operands) != len(given) or len(rule.results) != len(made):
            _fail(op, "has a rule of other operands or results")
        tensors = [*zip(rule.operands, given, strict=True), *zip(rule.results, made, strict=True)]
        factors = self._cut_factors(op, rule, tensors)
        axes = [a for held in factors.values() for a in held]
        if len(set(axes)) != len(axes):
            _fail(op, "is cut twice over one axis")
        summed = [f for f in factors if rule.factors[f].kind is Kind.REDUCE]
        passed = self._passed(op, rule, given, axes)
        combiners = {rule.factors[f].combiner for f in summed} | ({"sum"} if passed else set[str]())
        if len(combiners) > 1:
            _fail(op, f"mixes partial results that combine by {', '.join(sorted(combiners))}")
        partial = passed.union(*(factors[f] for f in summed))
        if op.kind in HOST_CALLS:  # only the first device along the axes that cut nothing calls
            partial = set(self.piece(Sharding((), self.mesh.names)).sharding.partial) - set(axes)
        for piece in made:
            if set(piece.sharding.partial) != partial:
                over = "+".join(sorted(partial)) or "nothing"
                _fail(op, f"leaves partial results over {over}, not {piece.sharding}")
        return min(combiners, default="sum")

    def _cut_factors(
        self, op: Op, rule: Rule, tensors: Sequence[tuple[Dims, _Piece]]
    ) -> dict[int, tuple[str, ...]]:
        """The factors that are cut, by which axes: alike in every tensor that has them."""
        majors: list[tuple[int | None, tuple[str, ...]]] = []
        for dims, piece in tensors:
            if len(dims) != len(piece.sharding.dims):
                _fail(op, "has a rule of other shapes")
            majors += (
                (rule.major(dim), axes) for dim, axes in zip(dims, piece.sharding.dims, strict=True)
            )
        found = {f: axes for f, axes in majors if f is not None and axes}
        able = set(rule.shardable)
        for factor, axes in majors:
            cut = found.get(factor, ()) if factor is not None else ()
            if cut != axes:
                _fail(op, f"has one dim over {axes} and another like it over {cut}")
            if axes and (factor not in able or rule.factors[factor].size % self.mesh.size(axes)):
                _fail(op, f"cannot be cut over {'+'.join(axes)}")
        return found

    def _passed(self, op: Op, rule: Rule, given: Sequence[_Piece], axes: Sequence[str]) -> set[str]:
        """The axes over which operands are partial sums together, as the op is linear in them."""
        operands = tuple(i for i, piece in enumerate(given) if piece.sharding.partial)
        if not operands:
            return set()
        partial = set(given[operands[0]].sharding.partial)
        same = all(set(given[i].sharding.partial) == partial for i in operands)
        linear = any(set(group) == set(operands) for group in rule.linear)
        floats = all(r.is_floating for r in op.results)
        if not same or not linear or not floats or partial & set(axes):
            _fail(op, f"cannot read operands {operands} as partial sums")
        return partial

    # -- loops -----------------------------------------------------------------------------

    def _loop(self, loop: Loop, held: dict[str, _Piece]) -> None:
        op = self.graph.op_at(loop.equation)
        given = [
            held[name] if name is not None else self._literal(o)
            for name, o in zip(loop.operands, op.operands, strict=True)
        ]
        results = [self.lying(v, s) for v, s in zip(op.results, loop.result_shardings, strict=True)]
        flow = op.control_flow
        if flow is None:
            _fail(op, "is no loop")
        inside = {port: self._inside(op, port, given, results) for port in flow.ports}
        for port in flow.ports:
            if port.operand is not None and (port.is_carry or port.kind is PortKind.CHOICE):
                self._leaves(op, given[port.operand], inside[port])
        for b, (graph, body) in enumerate(zip(op.graphs, loop.bodies, strict=True)):
            outputs = self.block(graph, body, [inside[port] for port in flow.inputs[b]])
            for port, found in zip(flow.outputs[b], outputs, strict=True):
                self._leaves(op, found, inside[port])
        held.update(zip(loop.results, results, strict=True))

    def _inside(
        self, op: Op, port: Port, given: Sequence[_Piece], results: Sequence[_Piece]
    ) -> _Piece:
        """The sharding of a port's value inside the bodies: a carry lies as its results do."""
        if port.result is not None:
            outside = results[port.result]
        elif port.operand is not None and port.kind is not PortKind.CHOICE:
            outside = given[port.operand]
        else:
            return self.piece(replicated(0))
        return self._row(op, outside) if port.by_row else outside

    def _row(self, op: Op, piece: _Piece) -> _Piece:
        """A row of what a scan reads or stacks, whose rows are never cut."""
        if piece.sharding.dims[0]:
            _fail(op, f"goes along a dim that is cut: {piece.sharding}")
        return _Piece(Sharding(piece.sharding.dims[1:], piece.sharding.partial), piece.combiner)

    def _leaves(self, op: Op, found: _Piece, wanted: _Piece) -> None:
        if not found.serves_as(wanted):
            _fail(op, f"is entered or left as {found.sharding}, not as {wanted.sharding}")


def _fail(op: Op, what: str) -> NoReturn:
    where = op.origin.line or op.origin.module
    raise GraphError(f"{op.kind}{f' at {where}' if where else ''} {what}")
