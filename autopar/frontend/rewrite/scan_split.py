"""Scans over layers in pieces, so that stages can take their shares of the layers.

A scan becomes several that hand on the carry, a backward one in reverse order, and every stack of
layers several stacks: parameters, moments, gradients, and what the forward scan leaves for the
backward one. What mixes the layers reads the stacks joined again: a value is there whole, in pieces
along dim 0, or both.

    scan over w[0:4]                 scan over w[0:2]  --carry-->  scan over w[2:4]
    scan over w[0:4], reverse        scan over w[0:2]  <--carry--  scan over w[2:4]
    update(w[0:4], g[0:4])           update(w[0:2], g[0:2])        update(w[2:4], g[2:4])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count, pairwise
from typing import Any

import jax
from jax import lax

from autopar.errors import ArgumentError
from autopar.frontend.rewrite.layer_scans import (
    LayerScan,
    Rows,
    all_values,
    piece_params,
    rows_through,
)
from autopar.frontend.rewrite.splice import Place, splice
from autopar.frontend.trace.graph import build, module_path
from autopar.frontend.trace.inline import live
from autopar.frontend.traced import Const, Equation, FlatProgram, Piece, Ref, TracedStep, refs

Bounds = tuple[int, ...]  # where dim 0 is cut, from 0 to its size
Operand = Ref | Const


class Pieces:
    """The present names of a program's values; `bounds` tell where those to be cut are cut.

    New values are numbered from `first` on. A value may be there both ways: pieces are joined and
    wholes sliced when first asked for. `written` are the equations so far, `notes` what had to be
    joined, `copies` what stands for values of bodies that are written several times.
    """

    def __init__(self, program: FlatProgram, bounds: Mapping[Ref, Bounds], first: Ref) -> None:
        self.bounds = bounds
        self.fresh = count(first)
        self.written: list[Equation] = []
        self.notes: list[str] = []
        self.copies: dict[Ref, list[Ref]] = {}  # value of a scan's body -> what stands for it
        self._avals: dict[Ref, Any] = dict(all_values(program))
        self._names: dict[Ref, Operand] = {}  # whole value -> what it is called now
        self._pieces: dict[Ref, tuple[Operand, ...]] = {}
        self._rows: dict[Operand, Operand] = {}  # piece of one row -> that row alone

    def number(self, values: Sequence[object]) -> tuple[Ref, ...]:
        """A new number for each of these."""
        return tuple(next(self.fresh) for _ in values)

    def copied(self, values: Sequence[Ref]) -> tuple[Ref, ...]:
        """A new number for each of these values, noted as theirs."""
        numbers = self.number(values)
        for value, number in zip(values, numbers, strict=True):
            self.copies.setdefault(value, []).append(number)
        return numbers

    def is_cut(self, value: Ref) -> bool:
        """True if a value is to be had in pieces."""
        return value in self.bounds

    def held(self, value: Operand) -> tuple[Operand, ...]:
        """The pieces of a value as far as it is in pieces now."""
        return self._pieces.get(value, ()) if isinstance(value, int) else ()

    def name(self, value: Ref, now: Operand) -> None:
        """Name a whole value anew."""
        self._names[value] = now

    def split(self, value: Ref, pieces: Sequence[Operand]) -> None:
        """The pieces that a value is made in."""
        self._pieces[value] = tuple(pieces)

    def whole(self, operand: Operand, place: Place, reader: Equation | None = None) -> Operand:
        """A value as a whole, joined if it is in pieces."""
        if isinstance(operand, Const):
            return operand
        if operand in self._pieces and operand not in self._names:
            aval = self._avals[operand]
            avals = piece_avals(aval, self.bounds[operand])
            self._names[operand] = self.add(_join, (), self._pieces[operand], avals, place)
            text, end = f"{aval.dtype}{list(aval.shape)}", "its pieces are joined again"
            if reader is None:
                self.notes.append(f"the stack {text} is returned whole: {end}")
            else:
                where = f" at {reader.line}" if reader.line else ""
                name = reader.primitive.name
                self.notes.append(f"{name}{where} mixes the layers of {text}: {end}")
        return self._names.get(operand, operand)

    def cut(self, operand: Operand, bounds: Bounds, place: Place) -> tuple[Operand, ...]:
        """A value in pieces, sliced if it is whole."""
        held = self.held(operand)
        if held:
            return held
        whole = self.whole(operand, place)
        aval = operand.aval if isinstance(operand, Const) else self._avals[operand]
        pieces = tuple(
            self.add(_rows_of, (a, b), [whole], [aval], place) for a, b in pairwise(bounds)
        )
        if isinstance(operand, int):
            self.split(operand, pieces)
        return pieces

    def row(self, piece: Operand, aval: Any, place: Place) -> Operand:
        """The only row of a piece, of type `aval`."""
        if piece not in self._rows:
            stacked = aval.update(shape=(1, *aval.shape))
            self._rows[piece] = self.add(_drop_dim, (), [piece], [stacked], place)
        return self._rows[piece]

    def stacked(self, row: Operand, aval: Any, place: Place) -> Operand:
        """A piece of one row of type `aval`."""
        piece = self.add(_add_dim, (), [row], [aval], place)
        self._rows[piece] = row
        return piece

    def add(
        self,
        fun: Callable[..., Any],
        static: tuple[int, ...],
        operands: Sequence[Operand],
        avals: Sequence[Any],
        place: Place,
    ) -> Ref:
        """The result of `fun(*static, *operands)`, which is one equation."""
        types = tuple((tuple(a.shape), a.dtype) for a in avals)
        result = next(self.fresh)
        self.written.append(
            replace(
                _equation(fun, static, types),
                operands=tuple(operands),
                results=(result,),
                name_stack=place.name_stack,
                line=place.line,
            )
        )
        return result


def piece_avals(aval: Any, bounds: Bounds) -> list[Any]:
    """The types of the pieces of a value."""
    return [with_rows(aval, b - a) for a, b in pairwise(bounds)]


def with_rows(aval: Any, rows: int) -> Any:
    """A type with so many rows in dim 0."""
    return aval.update(shape=(rows, *aval.shape[1:]))


@lru_cache(maxsize=4096)
def _equation(
    fun: Callable[..., Any], static: tuple[int, ...], types: tuple[tuple[Any, Any], ...]
) -> Equation:
    """An equation as JAX traces it; its operands, results and place are yet to be set."""
    avals = [jax.ShapeDtypeStruct(*t) for t in types]
    place = Place("", "", count(len(types) + 1))
    (one,) = splice(partial(fun, *static), range(len(types)), avals, [len(types)], place)
    return one


# What `Pieces.add` traces: functions of the module, so that equal equations are traced once.


def _join(*pieces: Any) -> Any:
    return lax.concatenate(pieces, 0)


def _rows_of(start: int, stop: int, whole: Any) -> Any:
    return lax.slice_in_dim(whole, start, stop)


def _drop_dim(piece: Any) -> Any:
    return lax.squeeze(piece, (0,))


def _add_dim(row: Any) -> Any:
    return lax.broadcast_in_dim(row, (1, *row.shape), tuple(range(1, row.ndim + 1)))


@dataclass(frozen=True)
class Cuts:
    """The layers before which each of a step's `layer_scans` is cut, in rising order.

    A scan without cuts stays whole. With `inline` a single layer becomes straight code.
    """

    layers: tuple[tuple[int, ...], ...]
    inline: bool = True

    @classmethod
    def everywhere(cls, scans: Sequence[LayerScan], *, inline: bool = True) -> Cuts:
        """Each layer by itself."""
        return cls(tuple(tuple(range(1, s.length)) for s in scans), inline)


def split_at(
    traced: TracedStep,
    scans: Sequence[LayerScan],
    cuts: Cuts,
    first: Ref,
    kept: frozenset[Ref] = frozenset(),
    like: TracedStep | None = None,
) -> tuple[TracedStep, Callable[[Ref], list[Ref]]]:
    """The step with its scans over layers cut, and what stands for a value of the old one.

    It computes the same. `input_pieces` and `output_pieces` of the result tell which rows of which
    leaf its inputs and outputs are; `notes` name what had to be joined again. The key stays that of
    the step as it was traced. Raises ArgumentError for cuts that are not between the layers of the
    step. The values `kept` are not cut.

    New values are numbered from `first` on. A step that is `like` it, on other rows, was cut
    before: what has no rows is that one's.
    """
    program, lengths = traced.program, [s.length for s in scans]
    if len(cuts.layers) != len(scans):
        raise ArgumentError(
            f"{traced.name} has {len(scans)} scans over layers (of {lengths} layers), but cuts are "
            f"given for {len(cuts.layers)}. Give a tuple for each, () to leave it whole."
        )
    # 1. The bounds in dim 0 of every stack, from 0 to its size.
    avals = dict(all_values(program))
    bounds: dict[Ref, Bounds] = {}
    for layers, scan in zip(cuts.layers, scans, strict=True):
        if any(a >= b for a, b in pairwise((0, *layers, scan.length))):
            raise ArgumentError(
                f"{layers} are no cuts between the {scan.length} layers that {traced.name} scans: "
                f"give rising numbers from 1 to {scan.length - 1}."
            )
        for ref in sorted(scan.values - kept) if layers else ():
            rows, rest = divmod(avals[ref].shape[0], scan.length)
            if rows and not rest:
                bounds[ref] = tuple(rows * layer for layer in (0, *layers, scan.length))
    if not bounds:
        return traced, lambda ref: [ref]
    # 2. The program on pieces; inputs and outputs that are stacks become pieces too.
    cutter = _Cutter(program, bounds, first, inline=cuts.inline)
    stacked = bounds.keys() & {program.inputs[i] for s in scans for i in s.inputs}
    given = [ref in stacked for ref in program.inputs]
    returned = [bounds.get(o) if isinstance(o, int) else None for o in program.outputs]
    cut = cutter.program(program, given, returned)
    cut = replace(cut, equations=live(cut.equations, cut.outputs))
    # 3. Paths, state and donated pairs of the pieces.
    inputs = [bounds[r] if g else None for r, g in zip(program.inputs, given, strict=True)]
    if like is not None:
        cut = cut.sharing(like.program)
    return _reseal(traced, cut, inputs, returned, cutter.notes, like), cutter.now


def _reseal(
    traced: TracedStep,
    program: FlatProgram,
    given: Sequence[Bounds | None],
    returned: Sequence[Bounds | None],
    notes: tuple[str, ...],
    like: TracedStep | None,
) -> TracedStep:
    """The step of a cut program: paths, state and pairs for every piece."""
    inputs, outputs = list(_pieces(given)), list(_pieces(returned))
    where = {(p.leaf, p.start): i for i, p in enumerate(inputs)}
    targets = dict(traced.donated)
    pairs = tuple(
        (o, where[targets[p.leaf], p.start]) for o, p in enumerate(outputs) if p.leaf in targets
    )
    state = frozenset(traced.state_inputs)
    again = replace(
        traced,
        program=program,
        input_paths=tuple(_path(traced.input_paths[p.leaf], p) for p in inputs),
        output_paths=tuple(_path(traced.output_paths[p.leaf], p) for p in outputs),
        state_inputs=tuple(i for i, p in enumerate(inputs) if p.leaf in state),
        donated=pairs,
        input_pieces=tuple(inputs),
        output_pieces=tuple(outputs),
        notes=(*traced.notes, *notes),
    )
    return replace(again, graph=build(again, like))


def _pieces(leaves: Sequence[Bounds | None]) -> Iterator[Piece]:
    for leaf, bounds in enumerate(leaves):
        if bounds is None:
            yield Piece(leaf)
        else:
            yield from (Piece(leaf, start, stop) for start, stop in pairwise(bounds))


def _path(path: str, piece: Piece) -> str:
    return path if piece.stop is None else f"{path}[{piece.start}:{piece.stop}]"


# -- equations on stacks become equations on pieces of these stacks -------------------------------


class _Cutter:
    """Writes a program anew in which the values of `bounds` are in pieces.

    New values are numbered from `first` on.
    """

    def __init__(
        self, program: FlatProgram, bounds: Mapping[Ref, Bounds], first: Ref, *, inline: bool
    ) -> None:
        self._have = Pieces(program, bounds, first)
        self._scans = _ScanCutter(self._have, inline=inline)

    @property
    def notes(self) -> tuple[str, ...]:
        """The stacks that had to be joined again, and where."""
        return tuple(dict.fromkeys(self._have.notes))

    def now(self, value: Ref) -> list[Ref]:
        """The values that stand for one of the old program: its pieces or its copies."""
        pieces = list(refs(self._have.held(value)))
        return pieces or self._have.copies.get(value, [value])

    def program(
        self, program: FlatProgram, given: Sequence[bool], returned: Sequence[Bounds | None]
    ) -> FlatProgram:
        """A program with the inputs that are `given` in pieces, and outputs cut at `returned`."""
        # A body is written like the step itself; what is written around it is put aside.
        outside, self._have.written = self._have.written, []
        inputs: list[tuple[Ref, Any]] = []
        for ref, aval, cut in zip(program.inputs, program.input_avals, given, strict=True):
            avals = piece_avals(aval, self._have.bounds[ref]) if cut else [aval]
            numbers = self._have.number(avals) if cut else (ref,)
            inputs += zip(numbers, avals, strict=True)
            if cut:
                self._have.split(ref, numbers)
        for equation in program.equations:
            self._rewrite(equation)
        end = Place("", "", self._have.fresh)
        outputs = [
            piece
            for output, bounds in zip(program.outputs, returned, strict=True)
            for piece in (
                (self._have.whole(output, end),)
                if bounds is None
                else self._have.cut(output, bounds, end)
            )
        ]
        equations, self._have.written = tuple(self._have.written), outside
        return FlatProgram(
            tuple(r for r, _ in inputs), tuple(a for _, a in inputs), equations, tuple(outputs)
        )

    def _rewrite(self, equation: Equation) -> None:
        kind = equation.primitive.name
        flow = equation.control_flow
        # Bodies of these read its operands and make its results as they are.
        is_open = flow is not None and not flow.repeats
        inside = (r for body in equation.bodies for r, _ in all_values(body)) if is_open else ()
        if kind == "scan" and self._scans.takes(equation):
            self._scans.cut(equation)
        elif any(map(self._have.is_cut, inside)):
            self._cut_bodies(equation)
        elif kind == "optimization_barrier":
            # Each stack stands in it as its pieces.
            cuts = [self._have.bounds.get(r) for r in equation.results]
            self._write_expanded(equation, cuts)
        elif (rows := rows_through(equation)) is not None and self._is_cut(equation, rows):
            self._cut_rows(equation, rows)
        elif kind != "slice" or not self._slice_piece(equation):
            place = Place.beside(equation, self._have.fresh)
            operands = tuple(self._have.whole(o, place, equation) for o in equation.operands)
            self._have.written.append(replace(equation, operands=operands))

    # -- equations that keep rows apart ----------------------------------------------------

    def _is_cut(self, equation: Equation, rows: Rows) -> bool:
        members = _members(equation, rows)
        return bool(members) and all(map(self._have.is_cut, members))

    def _cut_rows(self, equation: Equation, rows: Rows) -> None:
        """The equation once for each piece; what reduces the rows away combines the results."""
        place = Place.beside(equation, self._have.fresh)
        unit = self._unit(equation, rows)
        columns: dict[int, Sequence[Operand]] = {}
        for i in rows.operands:
            # An operand may have several rows for each layer: its bounds are in proportion.
            size = equation.operand_shapes[i][0]
            bounds = tuple(b * size // unit[-1] for b in unit)
            columns[i] = self._have.cut(equation.operands[i], bounds, place)
        wholes = {
            i: self._have.whole(o, place, equation)
            for i, o in enumerate(equation.operands)
            if i not in columns
        }
        made: list[tuple[Ref, ...]] = []
        for k in range(len(unit) - 1):
            operands = tuple(
                columns[i][k] if i in columns else wholes[i] for i in range(len(equation.operands))
            )
            piece = self._piece_of(equation, rows, k)
            made.append(piece.results)
            self._have.written.append(replace(piece, operands=operands))
        # A sum over layers is the sum of the pieces' sums, in order.
        if rows.combine is not None:
            (aval,), (whole, *rest) = equation.result_avals, [results[0] for results in made]
            for part in rest:
                whole = self._have.add(rows.combine, (), [whole, part], [aval, aval], place)
            self._have.name(equation.results[0], whole)
        else:
            for result, *pieces in zip(equation.results, *made, strict=True):
                self._have.split(result, pieces)

    def _unit(self, equation: Equation, rows: Rows) -> Bounds:
        """The bounds of some value of an equation that is cut."""
        return self._have.bounds[_members(equation, rows)[0]]

    def _piece_of(self, equation: Equation, rows: Rows, k: int) -> Equation:
        """The equation on piece k, still with its old operands."""

        unit = self._unit(equation, rows)

        def share(size: int) -> int:
            return unit[k + 1] * size // unit[-1] - unit[k] * size // unit[-1]

        shapes = tuple(
            (share(shape[0]), *shape[1:]) if i in rows.operands else shape
            for i, shape in enumerate(equation.operand_shapes)
        )
        avals = tuple(
            with_rows(aval, share(aval.shape[0])) if i in rows.results else aval
            for i, aval in enumerate(equation.result_avals)
        )
        return replace(
            equation,
            params=piece_params(equation, avals[0].shape[0]) if rows.results else equation.params,
            operand_shapes=shapes,
            results=self._have.number(equation.results),
            result_avals=avals,
        )

    def _slice_piece(self, equation: Equation) -> bool:
        """Write a slice of one piece in place of a slice of the whole; False if none holds it."""
        source, params = equation.operands[0], equation.params
        starts, limits = params["start_indices"], params["limit_indices"]
        if not isinstance(source, int) or not self._have.held(source):
            return False
        pieces = ((k, a, b) for k, (a, b) in enumerate(pairwise(self._have.bounds[source])))
        found = next((p for p in pieces if p[1] <= starts[0] and limits[0] <= p[2]), None)
        if found is None:
            return False
        k, start, stop = found
        # Positions count from the start of the piece.
        moved = {
            "start_indices": (starts[0] - start, *starts[1:]),
            "limit_indices": (limits[0] - start, *limits[1:]),
        }
        self._have.written.append(
            replace(
                equation,
                params={**params, **moved},
                operands=(self._have.held(source)[k],),
                operand_shapes=((stop - start, *equation.operand_shapes[0][1:]),),
            )
        )
        return True

    # -- equations that hold others --------------------------------------------------------

    def _cut_bodies(self, equation: Equation) -> None:
        """An equation whose bodies take and give stacks in pieces."""
        # cond's number of the branch stands before what its bodies read.
        first = len(equation.operands) - len(equation.bodies[0].inputs)
        given = [
            self._have.bounds[inner[0]] if all(map(self._have.is_cut, inner)) else None
            for inner in zip(*(b.inputs for b in equation.bodies), strict=True)
        ]
        returned = [self._have.bounds.get(r) for r in equation.results]
        is_given = [bounds is not None for bounds in given]
        bodies = tuple(self.program(b, is_given, returned) for b in equation.bodies)
        self._write_expanded(replace(equation, bodies=bodies), [*[None] * first, *given])

    def _write_expanded(self, equation: Equation, cuts: Sequence[Bounds | None]) -> None:
        """Write an equation with pieces in place of operands that have cuts, and of cut results."""
        place = Place.beside(equation, self._have.fresh)
        operands: list[tuple[Operand, tuple[int, ...]]] = []
        rows = zip(equation.operands, equation.operand_shapes, cuts, strict=True)
        for operand, shape, bounds in rows:
            if bounds is None:
                operands.append((self._have.whole(operand, place, equation), shape))
            else:
                pieces = self._have.cut(operand, bounds, place)
                sizes = (b - a for a, b in pairwise(bounds))
                operands += ((p, (n, *shape[1:])) for p, n in zip(pieces, sizes, strict=True))
        results: list[tuple[Ref, Any]] = []
        for result, aval in zip(equation.results, equation.result_avals, strict=True):
            if not self._have.is_cut(result):
                results.append((result, aval))
                continue
            avals = piece_avals(aval, self._have.bounds[result])
            numbers = self._have.number(avals)
            self._have.split(result, numbers)
            results += zip(numbers, avals, strict=True)
        self._have.written.append(
            replace(
                equation,
                operands=tuple(o for o, _ in operands),
                operand_shapes=tuple(s for _, s in operands),
                results=tuple(r for r, _ in results),
                result_avals=tuple(a for _, a in results),
            )
        )


def _members(equation: Equation, rows: Rows) -> list[Ref]:
    """The values of an equation that have the rows."""
    operands = refs(equation.operands[i] for i in rows.operands)
    return [*operands, *(equation.results[i] for i in rows.results)]


# -- one scan becomes scans over fewer layers, or straight code -----------------------------------


Rename = Callable[[str], str]


class _ScanCutter:
    """Writes scans as scans of fewer trips; with `inline` one trip is straight code."""

    def __init__(self, have: Pieces, *, inline: bool) -> None:
        self._have, self._inline = have, inline

    def takes(self, scan: Equation) -> bool:
        """True if a scan is to be cut: all that it takes and makes slice by slice is."""
        slices = refs(scan.operands[_first_slice(scan) :])
        stacked = [*slices, *scan.results[scan.params["num_carry"] :]]
        return bool(stacked) and all(map(self._have.is_cut, stacked))

    def cut(self, scan: Equation) -> None:
        """Write one scan for each piece, in the order of the layers or back."""
        place = Place.beside(scan, self._have.fresh)
        consts, first = scan.params["num_consts"], _first_slice(scan)
        stacked = [*refs(scan.operands[first:]), *scan.results[first - consts :]]
        bounds = self._have.bounds[stacked[0]]
        # consts are the same for all pieces, the carry is handed on, slices are each piece's own.
        fixed = tuple(self._have.whole(o, place, scan) for o in scan.operands[:consts])
        carry = tuple(self._have.whole(o, place, scan) for o in scan.operands[consts:first])
        slices = [self._have.cut(o, bounds, place) for o in scan.operands[first:]]
        order = list(range(len(bounds) - 1))
        made: dict[int, tuple[Operand, ...]] = {}
        # carry -> scan of piece 0 -> carry -> scan of piece 1 -> ...; a reverse scan from the last.
        for k in reversed(order) if scan.params["reverse"] else order:
            start, stop = bounds[k : k + 2]
            shared = replace(scan, operands=(*fixed, *carry, *(s[k] for s in slices)))
            rename = partial(_in_layers, scan, _scope_of(scan), start, stop)
            if self._inline and stop - start == 1:
                out = self._straight(shared, rename)
            else:
                out = self._shorter(shared, stop - start, rename)
            carry, made[k] = out[: first - consts], out[first - consts :]
        for result, last in zip(scan.results, carry, strict=False):
            self._have.name(result, last)
        for i, result in enumerate(scan.results[first - consts :]):
            self._have.split(result, [made[k][i] for k in order])

    def _shorter(self, scan: Equation, trips: int, rename: Rename) -> tuple[Operand, ...]:
        """The scan of so many trips; its results."""
        carries, first = scan.params["num_carry"], _first_slice(scan)
        results = self._have.number(scan.results)
        shapes = scan.operand_shapes
        self._have.written.append(
            replace(
                scan,
                params=scan.params | {"length": trips, "unroll": min(scan.params["unroll"], trips)},
                operand_shapes=(*shapes[:first], *((trips, *s[1:]) for s in shapes[first:])),
                results=results,
                result_avals=(
                    *scan.result_avals[:carries],
                    *(with_rows(a, trips) for a in scan.result_avals[carries:]),
                ),
                bodies=(self._copy_program(scan.bodies[0], rename),),
                name_stack=rename(scan.name_stack),
            )
        )
        return results

    def _straight(self, scan: Equation, rename: Rename) -> tuple[Operand, ...]:
        """The only trip of the scan as straight code; its results, stacked ones with their dim."""
        place = replace(Place.beside(scan, self._have.fresh), name_stack=rename(scan.name_stack))
        body, first = scan.bodies[0], _first_slice(scan)
        rows = zip(scan.operands[first:], body.input_avals[first:], strict=True)
        # One trip: its slices are rows, and what it stacks is a row with its dim put back.
        given = [*scan.operands[:first], *(self._have.row(o, a, place) for o, a in rows)]
        names = dict(zip(body.inputs, given, strict=True))
        for equation in body.equations:
            self._have.written.append(self._copy(equation, names, rename))
        outputs = [names[o] if isinstance(o, int) else o for o in body.outputs]
        carries = scan.params["num_carry"]
        stacked = zip(outputs[carries:], scan.result_avals[carries:], strict=True)
        return (
            *outputs[:carries],
            *(self._have.stacked(o, a.update(shape=a.shape[1:]), place) for o, a in stacked),
        )

    def _copy_program(self, program: FlatProgram, rename: Rename) -> FlatProgram:
        """A program with all its values under new numbers."""
        inputs = self._have.copied(program.inputs)
        names: dict[Ref, Operand] = dict(zip(program.inputs, inputs, strict=True))
        equations = tuple(self._copy(e, names, rename) for e in program.equations)
        return FlatProgram(inputs, program.input_avals, equations, _read(program.outputs, names))

    def _copy(self, equation: Equation, names: dict[Ref, Operand], rename: Rename) -> Equation:
        """An equation that reads under `names`, to which it adds what it makes."""
        results = self._have.copied(equation.results)
        copy = replace(
            equation,
            operands=_read(equation.operands, names),
            results=results,
            bodies=tuple(self._copy_program(b, rename) for b in equation.bodies),
            name_stack=rename(equation.name_stack),
        )
        names.update(zip(equation.results, results, strict=True))
        return copy


def _read(operands: Sequence[Operand], names: Mapping[Ref, Operand]) -> tuple[Operand, ...]:
    return tuple(names[o] if isinstance(o, int) else o for o in operands)


def _first_slice(scan: Equation) -> int:
    return int(scan.params["num_consts"] + scan.params["num_carry"])


# -- names -------------------------------------------------------------------------------------


def _scope_of(scan: Equation) -> str:
    """The module that all of a scan's body is in, as the forward pass names it; else "scan"."""
    steps = {_steps(scan, e.name_stack)[1].split("/")[0] for e in scan.bodies[0].equations}
    inner = {s for s in steps if s}
    return inner.pop() if len(inner) == 1 else "scan"


def _steps(scan: Equation, stack: str) -> tuple[str, str]:
    """The names that JAX adds to a scan's name stack in its body, and those of user modules."""
    rest = stack[len(scan.name_stack) :].strip("/").split("/")
    own = [r in ("checkpoint", "rematted_computation") for r in rest]
    at = own.index(False) if False in own else len(rest)
    modules = "/".join(rest[at:])
    return "/".join(rest[:at]), modules if module_path(modules) else ""


def _in_layers(scan: Equation, scope: str, start: int, stop: int, stack: str) -> str:
    """The name stack of a piece: the module of the layers with the number of the first of them."""
    added, modules = _steps(scan, stack)
    which = f"{scope}[{start}]" if stop - start == 1 else f"{scope}[{start}:{stop}]"
    rest = (
        modules.removeprefix(scope).strip("/") if f"{modules}/".startswith(f"{scope}/") else modules
    )
    return "/".join(s for s in (scan.name_stack, added, which, rest) if s)
