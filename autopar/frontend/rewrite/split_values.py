"""Values of a program that is written anew: whole, in pieces along dim 0, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count, pairwise
from typing import Any

import jax
from jax import lax

from autopar.frontend.rewrite.layer_scans import all_values
from autopar.frontend.rewrite.splice import Place, splice
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref

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
