"""The decisions of a plan for each equation of its step, as layouts that values go through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.control_flow import Port
from autopar.ir.graph import Graph, Op
from autopar.ir.rule import Kind
from autopar.ir.sharding import Sharding
from autopar.ir.spmd import Block, LocalOp, Loop, Move, MoveStep, SpmdProgram

# Their partial results can be kept as stacks of terms; of other equations XLA makes the sums.
_SUMMING = ("dot_general", "reduce_sum")


@dataclass(frozen=True)
class Step:
    """A layout that a value takes; it is no copy of what so many equal moves before made."""

    layout: Sharding
    copies: int = 0


Route = tuple[Step, ...]


@dataclass(frozen=True)
class Tables:
    """Routes of results from the equation on, and of operands from the value on, by their names.

    "12/0/3:1" is result or operand 1 of equation 3 in body 0 of equation 12.
    """

    results: Mapping[str, Route]
    operands: Mapping[str, Route]


def tables_of(graph: Graph, program: SpmdProgram, shardings: Mapping[str, Sharding]) -> Tables:
    """The layouts and moves of a step's values; `shardings` has inputs of bodies.

    Results that cannot but lie as they should are left out.
    """
    writer = _Writer(graph, shardings)
    for value, layout in zip(program.block.inputs, program.input_shardings, strict=True):
        writer.pieces[value] = _Piece(value, (), layout)
    writer.block(program.block, "")
    sure = {where for where, value in writer.followed.items() if value not in writer.moved}
    results = {where: route for where, route in writer.results.items() if where not in sure}
    return Tables(results, writer.operands)


@dataclass(frozen=True)
class _Piece:
    """A value as an instruction names it: what it is a copy of, how it came about, how it lies.

    One with `raw` is the result of that name, on its way to where the step holds it. A partial
    sum that is no stack of terms is whole to the export, as XLA sums it where it is made.
    """

    value: str
    route: Route
    layout: Sharding
    raw: str = ""
    is_stack: bool = False


@dataclass
class _Writer:
    """Follows a listing, and notes every layout that it asks for."""

    graph: Graph
    shardings: Mapping[str, Sharding]
    results: dict[str, Route] = field(default_factory=dict[str, Route])
    operands: dict[str, Route] = field(default_factory=dict[str, Route])
    pieces: dict[str, _Piece] = field(default_factory=dict[str, "_Piece"])
    followed: dict[str, str] = field(default_factory=dict[str, str])  # result -> its value
    moved: set[str] = field(default_factory=set[str])  # values that are read elsewhere, too
    _moves: dict[str, Move] = field(default_factory=dict[str, Move])  # what is moved -> how

    def block(
        self, block: Block, path: str, wanted: Mapping[int, Sharding | None] | None = None
    ) -> None:
        """The instructions of a straight line; `wanted` are layouts of some of its outputs."""
        moves = (s for s in block.instructions if isinstance(s, Move))
        self._moves.update((m.source, m) for m in moves)
        for step in block.instructions:
            if isinstance(step, LocalOp):
                self._run(step)
            elif isinstance(step, Move):
                self._move(step)
            elif isinstance(step, Loop):
                self._loop(step)
            else:
                for source, result in zip(step.sources, step.results, strict=True):
                    self.pieces[result] = replace(self._piece(source), value=result, route=())
        for i, name in enumerate(block.outputs):
            self._enters(f"{path}out:{i}", name, (wanted or {}).get(i))

    # -- reading ---------------------------------------------------------------------------

    def _piece(self, name: str) -> _Piece:
        """The value read by that name; a result that is read as it comes out stays so."""
        piece = self.pieces[name]
        if piece.raw:
            if piece.route:
                self.results[piece.raw] = piece.route
            piece = self.pieces[name] = replace(piece, route=(), raw="")
        return piece

    def _reads(self, where: str, value: str, route: Route) -> None:
        if route:
            self.operands[where] = route
            self.moved.add(value)

    def _enters(self, where: str, name: str | None, wanted: Sharding | None) -> None:
        """An operand of a loop or an output: partial sums cross these as stacks of terms."""
        piece = self._piece(name) if name is not None else _Piece("", (), wanted or Sharding(()))
        route = piece.route
        if piece.layout.partial and not piece.is_stack:
            route = (*route, Step(piece.layout))
        self._reads(where, piece.value, route)

    # -- instructions ----------------------------------------------------------------------

    def _run(self, run: LocalOp) -> None:
        op, where = self.graph.op_at(run.equation), _name(run.equation)
        given = [self._piece(name) if name is not None else None for name in run.operands]
        partial = [p for p in given if p is not None and p.layout.partial]
        stays = bool(partial) and all(p.is_stack for p in partial)
        if op.kind not in _SUMMING:  # which may add sums of their own
            over = {axis for layout in run.result_shardings for axis in layout.partial}
            stays &= all(over == set(p.layout.partial) for p in partial)
        for i, piece in enumerate(given):
            if piece is not None:
                whole = piece.is_stack and not stays
                settled = (Step(Sharding(piece.layout.dims)),) if whole else ()
                self._reads(f"{where}:{i}", piece.value, (*piece.route, *settled))
        for i, (name, layout) in enumerate(zip(run.results, run.result_shardings, strict=True)):
            # Partial results stay so, but for those that are summed at once: these XLA sums.
            move = self._moves.get(name)
            at_once = move is not None and [s.kind for s in move.steps] == ["all-reduce"]
            starts = not partial and op.kind in _SUMMING and not at_once
            is_stack = bool(layout.partial) and (stays or starts)
            route = (Step(layout),) if is_stack or not layout.partial else ()
            piece = _Piece(op.results[i].name, route, layout, f"{where}:{i}", is_stack)
            self.pieces[name] = self._made(op, name, piece)
            if _follows(op, given, layout):
                self.followed[f"{where}:{i}"] = name

    def _made(self, op: Op, name: str, piece: _Piece) -> _Piece:
        """A result as the instructions name it: at home, on its way there, or made on demand."""
        if name.startswith(f"{piece.value}."):
            return piece
        if name != piece.value:
            return replace(piece, raw="")
        if piece.route and (op.results[0].shape or piece.is_stack):
            self.results[piece.raw] = piece.route
        return replace(piece, route=(), raw="")

    def _move(self, move: Move) -> None:
        piece = self.pieces[move.source]
        route, layout, is_stack = list(piece.route), move.before, piece.is_stack
        copies = move.repeat if move.collectives else 0
        for step in move.steps:
            layout = _after(layout, step)
            is_stack = bool(layout.partial) and (is_stack or step.kind == "mask")
            if is_stack or not layout.partial:
                route.append(Step(layout, copies))
                copies = 0
        if not piece.raw:
            self.pieces[move.result] = replace(
                piece, route=tuple(route), layout=layout, is_stack=is_stack
            )
            return
        self.results[piece.raw] = tuple(route)
        self.pieces[move.result] = _Piece(piece.value, (), layout, "", is_stack)

    def _loop(self, loop: Loop) -> None:
        op, where = self.graph.op_at(loop.equation), _name(loop.equation)
        flow = op.control_flow
        assert flow is not None
        for i, (name, port) in enumerate(zip(loop.operands, flow.operands, strict=True)):
            self._enters(f"{where}:{i}", name, self._inside(op, port))
        for b, block in enumerate(loop.bodies):
            for value in block.inputs:
                layout = self.shardings[value]
                self.pieces[value] = _Piece(value, (), layout, "", bool(layout.partial))
            wanted = {i: self._inside(op, port) for i, port in enumerate(flow.outputs[b])}
            self.block(block, f"{where}/{b}/", wanted)
        for i, (name, layout) in enumerate(zip(loop.results, loop.result_shardings, strict=True)):
            self.pieces[name] = _Piece(name, (), layout, "", bool(layout.partial))
            self.results[f"{where}:{i}"] = (Step(layout),)

    def _inside(self, op: Op, port: Port) -> Sharding | None:
        """The sharding of a port's value where a body receives it."""
        names = (op.graphs[b].inputs[i].value.name for b, i in port.inputs)
        return next((self.shardings.get(name) for name in names), None)


def _name(path: tuple[int, ...]) -> str:
    return "/".join(map(str, path))


def _follows(op: Op, given: list[_Piece | None], layout: Sharding) -> bool:
    """True if an element-wise op has operands that lie at home just as its result does."""
    rule = op.rule
    if rule is None or len(op.results) != 1 or layout.partial:
        return False
    if any(f.kind is not Kind.PASS for f in rule.factors):
        return False
    arrays = [
        p
        for p, dims in zip(given, rule.operands, strict=True)
        if p is not None and (dims or not rule.results[0])
    ]
    alike = all(not p.route and p.layout == layout for p in arrays)
    same = all(dims in ((), rule.results[0]) for dims in rule.operands)
    return bool(arrays) and alike and same


def _after(before: Sharding, step: MoveStep) -> Sharding:
    """The layout that a step of a move leaves."""
    dims, partial = list(before.dims), before.partial
    if step.kind in ("all-reduce", "reduce-scatter"):
        partial = tuple(a for a in partial if a not in step.axes)
    if step.kind == "mask":
        partial = (*partial, *step.axes)
    if step.kind in ("all-gather", "all-to-all"):
        dims[step.dim] = tuple(a for a in dims[step.dim] if a not in step.axes)
    if step.kind in ("slice", "reduce-scatter"):
        dims[step.dim] = (*dims[step.dim], *step.axes)
    if step.kind == "all-to-all":
        dims[step.to_dim] = (*dims[step.to_dim], *step.axes)
    if step.kind == "collective-permute":
        dims[step.dim] = step.to_axes
    return Sharding(tuple(dims), partial)
