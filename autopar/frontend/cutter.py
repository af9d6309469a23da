"""Rewrites equations on stacks of layers into equations on pieces of these stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from autopar.frontend.layer_scans import OPEN, all_values
from autopar.frontend.pieces import Bounds, Operand, Pieces, piece_avals, with_rows
from autopar.frontend.splice import Place
from autopar.frontend.stacks import Rows, piece_params, rows_through
from autopar.frontend.traced import Equation, FlatProgram, Ref, refs
from autopar.frontend.trips import Trips

Combine = Callable[[Any, Any], Any]


class Cutter:
    """Writes a program anew in which the values of `bounds` are in pieces.

    New values are numbered from `first` on.
    """

    def __init__(
        self, program: FlatProgram, bounds: Mapping[Ref, Bounds], first: Ref, *, inline: bool
    ) -> None:
        self._have = Pieces(program, bounds, first)
        self._trips = Trips(self._have, inline=inline)

    @property
    def notes(self) -> tuple[str, ...]:
        """What had to be joined again, and where."""
        return tuple(dict.fromkeys(self._have.notes))

    def now(self, value: Ref) -> list[Ref]:
        """What stands for a value of the old program, its pieces or its copies."""
        pieces = list(refs(self._have.held(value)))
        return pieces or self._have.copies.get(value, [value])

    def program(
        self, program: FlatProgram, given: Sequence[bool], returned: Sequence[Bounds | None]
    ) -> FlatProgram:
        """A program with the inputs that are `given` in pieces, and outputs cut at `returned`."""
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
        if kind == "scan" and self._trips.takes(equation):
            self._trips.cut(equation)
        elif kind in OPEN and any(map(self._have.is_cut, _inside(equation))):
            self._cut_bodies(equation)
        elif kind == "optimization_barrier":
            self._cut_barrier(equation)
        elif (rows := rows_through(equation)) is not None and self._is_cut(equation, rows):
            self._cut_rows(equation, rows)
        elif kind == "slice" and self._is_within_a_piece(equation):
            self._slice_piece(equation)
        else:
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
        columns: dict[int, Sequence[Operand]] = {}
        for i in rows.operands:
            bounds = self._scaled(equation, rows, equation.operand_shapes[i][0])
            columns[i] = self._have.cut(equation.operands[i], bounds, place)
        wholes = {
            i: self._have.whole(o, place, equation)
            for i, o in enumerate(equation.operands)
            if i not in columns
        }
        made: list[tuple[Ref, ...]] = []
        for k in range(len(self._unit(equation, rows)) - 1):
            operands = tuple(
                columns[i][k] if i in columns else wholes[i] for i in range(len(equation.operands))
            )
            piece = self._piece_of(equation, rows, k)
            made.append(piece.results)
            self._have.written.append(replace(piece, operands=operands))
        if rows.combine is not None:
            self._combine(equation, rows.combine, [results[0] for results in made], place)
        else:
            for result, *pieces in zip(equation.results, *made, strict=True):
                self._have.split(result, pieces)

    def _unit(self, equation: Equation, rows: Rows) -> Bounds:
        """Where some value of an equation is cut."""
        return self._have.bounds[_members(equation, rows)[0]]

    def _scaled(self, equation: Equation, rows: Rows, size: int) -> Bounds:
        """Where a value of `size` rows is cut, which has a multiple of another's rows."""
        unit = self._unit(equation, rows)
        return tuple(b * size // unit[-1] for b in unit)

    def _piece_of(self, equation: Equation, rows: Rows, k: int) -> Equation:
        """The equation on piece k, still with its old operands."""

        def share(size: int) -> int:
            bounds = self._scaled(equation, rows, size)
            return bounds[k + 1] - bounds[k]

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

    def _combine(
        self, equation: Equation, combine: Combine, parts: Sequence[Ref], place: Place
    ) -> None:
        """The whole result of results of the pieces, the first two first."""
        (aval,), whole = equation.result_avals, parts[0]
        for part in parts[1:]:
            whole = self._have.add(combine, (), [whole, part], [aval, aval], place)
        self._have.name(equation.results[0], whole)

    def _is_within_a_piece(self, equation: Equation) -> bool:
        source, params = equation.operands[0], equation.params
        start, stop = params["start_indices"][0], params["limit_indices"][0]
        return (
            bool(self._have.held(source))
            and isinstance(source, int)
            and any(a <= start and stop <= b for a, b in pairwise(self._have.bounds[source]))
        )

    def _slice_piece(self, equation: Equation) -> None:
        """A slice of one piece in place of a slice of the whole."""
        source, params = equation.operands[0], equation.params
        starts, limits = params["start_indices"], params["limit_indices"]
        bounds = self._have.bounds[next(refs([source]))]
        k = next(k for k, b in enumerate(bounds[1:]) if limits[0] <= b)
        moved = {
            "start_indices": (starts[0] - bounds[k], *starts[1:]),
            "limit_indices": (limits[0] - bounds[k], *limits[1:]),
        }
        shape = (bounds[k + 1] - bounds[k], *equation.operand_shapes[0][1:])
        self._have.written.append(
            replace(
                equation,
                params={**params, **moved},
                operands=(self._have.held(source)[k],),
                operand_shapes=(shape,),
            )
        )

    # -- equations that hold others --------------------------------------------------------

    def _cut_barrier(self, equation: Equation) -> None:
        """A barrier in which each stack stands as its pieces."""
        cuts = [self._have.bounds.get(r) for r in equation.results]
        self._write_expanded(equation, cuts)

    def _cut_bodies(self, equation: Equation) -> None:
        """An equation whose bodies take and give stacks in pieces."""
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
        results = list(self._expanded_results(equation))
        self._have.written.append(
            replace(
                equation,
                operands=tuple(o for o, _ in operands),
                operand_shapes=tuple(s for _, s in operands),
                results=tuple(r for r, _ in results),
                result_avals=tuple(a for _, a in results),
            )
        )

    def _expanded_results(self, equation: Equation) -> Iterator[tuple[Ref, Any]]:
        for result, aval in zip(equation.results, equation.result_avals, strict=True):
            if not self._have.is_cut(result):
                yield result, aval
                continue
            avals = piece_avals(aval, self._have.bounds[result])
            numbers = self._have.number(avals)
            self._have.split(result, numbers)
            yield from zip(numbers, avals, strict=True)


def _members(equation: Equation, rows: Rows) -> list[Ref]:
    """The values of an equation that have the rows."""
    operands = refs(equation.operands[i] for i in rows.operands)
    return [*operands, *(equation.results[i] for i in rows.results)]


def _inside(equation: Equation) -> Iterator[Ref]:
    """Every value in an equation's bodies."""
    return (ref for body in equation.bodies for ref, _ in all_values(body))
