"""x[jnp.arange(n), i] read as what it means: from each row of x, at a place of the row's own.

There the first index counts the rows, so it looks as though any row were read for any other.
JAX can say it: a batching dim of gather and scatter pairs rows of the array with rows of the
indices. The values are the same bit for bit.

    gather x, indices [[0, i0], [1, i1], ...]       row 0 of x, row 1 of x, ...: any row?
    gather x, indices [[i0], [i1], ...],            row k of x for row k of the indices
      batching dims x: 0, indices: 0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from autopar.frontend.rewrite.splice import Place, splice
from autopar.frontend.trace.inline import live
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref

# The fields of a gather's and a scatter's dimension numbers: dims of the array that an index has
# one place in, the index's columns, and the batching dims of array and indices.
_GATHER = (
    "collapsed_slice_dims", "start_index_map", "operand_batching_dims",
    "start_indices_batching_dims",
)  # fmt: skip
_SCATTER = (
    "inserted_window_dims", "scatter_dims_to_operand_dims", "operand_batching_dims",
    "scatter_indices_batching_dims",
)  # fmt: skip
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "gather": _GATHER,
    "scatter": _SCATTER,
    **{f"scatter-{how}": _SCATTER for how in ("add", "mul", "min", "max", "sub")},
}


def find_batched_gathers(program: FlatProgram) -> FlatProgram:
    """The program in which each index that only counts the rows of a dim is a batching dim."""
    if not any(e.primitive.name in _FIELDS for e in program.walk()):
        return program
    return _rewrite(program, program.fresh())


def _rewrite(program: FlatProgram, fresh: Iterator[Ref]) -> FlatProgram:
    scope = _Scope(dict(program.avals()), fresh)
    written = [e for equation in program.equations for e in scope.paired(equation)]
    return replace(program, equations=live(written, program.outputs))


class _Scope:
    """The equations of one program so far."""

    def __init__(self, types: Mapping[Ref, Any], fresh: Iterator[Ref]) -> None:
        self._types, self._fresh = types, fresh
        self._makers: dict[Ref, Equation] = {}

    def paired(self, equation: Equation) -> Iterator[Equation]:
        """The equation, columns of its indices that count rows made batching dims."""
        if equation.bodies:
            bodies = tuple(_rewrite(b, self._fresh) for b in equation.bodies)
            equation = replace(equation, bodies=bodies)
        self._makers.update((r, equation) for r in equation.results)
        # 1. The columns of the indices, as JAX concatenates them.
        columns = self._columns(equation)
        # 2. Those that are 0, 1, 2, ... along one of their dims, as long as the array's dim.
        paired = dict(self._pairs(equation, columns))
        if not paired:
            yield equation
            return
        # 3. The other columns, joined again, are the indices of a gather with batching dims.
        left = [c for i, c in enumerate(columns) if i not in paired]
        indices = left[0]
        if len(left) > 1:
            indices, place = next(self._fresh), Place.beside(equation, self._fresh)
            avals = [self._types[c] for c in left]
            yield from splice(
                lambda *parts: lax.concatenate(parts, parts[0].ndim - 1),
                left, avals, (indices,), place,
            )  # fmt: skip
        yield _batch(equation, indices, len(left), paired)

    def _columns(self, equation: Equation) -> tuple[Ref, ...]:
        """The values that a gather's or scatter's indices are put together of, a column each."""
        if equation.primitive.name not in _FIELDS or not isinstance(equation.operands[1], int):
            return ()
        joined = self._makers.get(equation.operands[1])
        if joined is None or joined.primitive.name != "concatenate":
            return ()
        last = len(equation.operand_shapes[1]) - 1
        single = all(s[-1] == 1 for s in joined.operand_shapes)
        if joined.params["dimension"] != last or not single:
            return ()
        return tuple(o for o in joined.operands if isinstance(o, int))

    def _pairs(
        self, equation: Equation, columns: Sequence[Ref]
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Columns that count the rows of a dim, each with that dim and the indices' own."""
        if not columns or len(columns) != equation.operand_shapes[1][-1]:
            return
        single, mapped, _, taken = _dimension_numbers(equation)
        # Each dim of the indices pairs with one dim of the array at most.
        used, spare = set(taken), len(columns) - 1  # one column is always left
        for i, column in enumerate(columns):
            dim, lane = mapped[i], self._lane(column)
            if lane is None or lane in used or dim not in single or not spare:
                continue
            if equation.operand_shapes[1][lane] == equation.operand_shapes[0][dim]:
                used.add(lane)
                spare -= 1
                yield i, (dim, lane)

    def _lane(self, value: Ref | Const) -> int | None:
        """The dim along which a value is 0, 1, 2, ... and all else is alike; None where it is not.

        Seen through what JAX writes around an index: a negative one would count from the end.
        """
        made = self._makers.get(value) if isinstance(value, int) else None
        if made is None:
            return None
        kind, params = made.primitive.name, made.params
        if kind == "iota":
            return int(params["dimension"])
        if kind == "convert_element_type":
            return self._lane(made.operands[0])
        if kind == "broadcast_in_dim":
            inner = self._lane(made.operands[0])
            return None if inner is None else int(params["broadcast_dimensions"][inner])
        # JAX wraps negative indices: select(i < 0, i + n, i). A counter is never negative.
        if kind == "select_n" and isinstance(made.operands[0], int):
            counter, test = made.operands[1], self._makers.get(made.operands[0])
            if test is not None and test.primitive.name == "lt" and test.operands[0] == counter:
                zero = test.operands[1]
                if isinstance(zero, Const) and not zero.aval.shape and int(zero.value) == 0:
                    return self._lane(counter)
        return None


def _dimension_numbers(equation: Equation) -> list[tuple[int, ...]]:
    numbers = equation.params["dimension_numbers"]
    return [tuple(getattr(numbers, f)) for f in _FIELDS[equation.primitive.name]]


def _batch(
    equation: Equation, indices: Ref, columns: int, paired: Mapping[int, tuple[int, int]]
) -> Equation:
    """The gather or scatter with fewer columns of indices, and batching dims in their place."""
    single, mapped, batching, of_indices = _dimension_numbers(equation)
    rows = {dim for dim, _ in paired.values()}
    pairs = sorted([*zip(batching, of_indices, strict=True), *paired.values()])
    found = (
        tuple(d for d in single if d not in rows),
        tuple(d for i, d in enumerate(mapped) if i not in paired),
        tuple(d for d, _ in pairs),
        tuple(d for _, d in pairs),
    )
    numbers: Any = equation.params["dimension_numbers"]
    fields = dict(zip(_FIELDS[equation.primitive.name], found, strict=True))
    shape = (*equation.operand_shapes[1][:-1], columns)
    return replace(
        equation,
        params={
            **equation.params,
            "dimension_numbers": numbers._replace(**fields),
            "indices_are_sorted": False,
        },
        operands=(equation.operands[0], indices, *equation.operands[2:]),
        operand_shapes=(equation.operand_shapes[0], shape, *equation.operand_shapes[2:]),
    )
