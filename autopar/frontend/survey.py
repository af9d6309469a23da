"""Finds where rows of the batch come from: the sources of a step, and how their rows lie.

A source is an equation whose result has rows of the batch and whose operands are made of nothing
of it: an iota, random bits, a slice of a table. On its own a microbatch would make the first rows
of each. What makes rows of a statistic of the batch is no source, and left to the analysis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax

from autopar.errors import BatchError, listing
from autopar.frontend.align import has_rows
from autopar.frontend.dtypes import type_of
from autopar.frontend.reach import reached_from
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep, refs
from autopar.ir.batching import Rows
from autopar.ir.values import Value

_ALIKE = frozenset({"broadcast_in_dim", "empty"})  # every row of these is the same
_RANDOM = frozenset({"random_bits", "rng_bit_generator"})
# What these draw for a row depends on where it lies, and they split their keys by themselves.
_BY_POSITION = frozenset({"random_gamma", "rng_uniform"})
_LARGEST_DRAW = 64 << 20  # bytes of a whole draw of which every microbatch takes its rows
_THREEFRY = "key<fry>"

_Pairs = Iterator[tuple[Equation, Equation]]


@dataclass(frozen=True)
class Sizes:
    """The step that is cut, the rows of its batch and those of one microbatch."""

    name: str
    batch: int
    part: int


class Way(Enum):
    """How the rows of a microbatch are made."""

    COUNTED = "counted"  # an iota, from the number of the microbatch's first row
    DRAWN = "drawn"  # random bits, from the counters of the microbatch's items
    CUT = "cut"  # the whole is made, and the microbatch's rows are taken


@dataclass(frozen=True)
class Source:
    """An equation as it stands on the whole batch, and where each of its results has rows."""

    equation: Equation
    way: Way
    rows: tuple[Rows | None, ...]


@dataclass(frozen=True)
class Survey:
    """All that must know the number of the microbatch, bodies of loops included.

    `sources` are by their first result; `constants` are the arrays with rows that are written
    into bodies, by what reads them (first result, position of the operand); `inputs` are the
    closed-over arrays with rows, by value; `holders` the loops with any of these in them, by
    first result. `rows` tell where the rows of all of these are.
    """

    sources: Mapping[Ref, Source]
    constants: Mapping[tuple[Ref, int], tuple[Const, Rows]]
    inputs: Mapping[Ref, Rows]
    holders: frozenset[Ref]
    rows: tuple[tuple[str, Rows], ...]

    @property
    def is_empty(self) -> bool:
        """Whether no microbatch need know its number."""
        return not (self.sources or self.constants or self.inputs)


def survey(whole: TracedStep, part: FlatProgram, sizes: Sizes) -> Survey:
    """The sources of a step, found by holding it against the same on one microbatch's rows.

    Raises BatchError for a source whose rows cannot be told or cut: two dims of rows (E7), sizes
    that are no multiple of the batch, a random generator that draws no part alone (E9).
    """
    return _Surveyor(whole, part, sizes).survey()


class _Surveyor:
    def __init__(self, whole: TracedStep, part: FlatProgram, sizes: Sizes) -> None:
        self._whole, self._part, self._sizes = whole, part, sizes
        self._layouts: dict[int, Rows] = dict(_layouts(whole.program, part, sizes))
        self._sources: dict[Ref, Source] = {}
        self._constants: dict[tuple[Ref, int], tuple[Const, Rows]] = {}
        self._rows: list[tuple[str, Rows]] = []
        self._holders: set[Ref] = set()
        pairs = zip(whole.program.input_avals, part.input_avals, strict=True)
        given = [r for r, (a, b) in zip(part.inputs, pairs, strict=True) if a.shape != b.shape]
        constants = set(part.inputs[len(part.inputs) - len(whole.constants) :])
        self._of_batch = reached_from(part, [r for r in given if r not in constants])

    def survey(self) -> Survey:
        """The whole step's."""
        whole = self._whole.program
        self._visit(whole, self._part)
        count = len(self._whole.constants)
        heads = zip(whole.inputs, whole.input_avals, self._part.input_avals, strict=True)
        inputs = {
            ref: rows
            for ref, one, own in list(heads)[len(whole.inputs) - count :]
            if (rows := self._rows_of(one.shape, own.shape, "an array that it closes over"))
        }
        named = (*((f"%{r}", rows) for r, rows in inputs.items()), *self._rows)
        return Survey(self._sources, self._constants, inputs, frozenset(self._holders), named)

    def _visit(self, whole: FlatProgram, part: FlatProgram) -> bool:
        """Note the sources of a program; whether a microbatch must know its number there."""
        types, found = dict(whole.avals()), False
        for one, own in zip(whole.equations, part.equations, strict=True):
            inner = [self._visit(a, b) for a, b in zip(one.bodies, own.bodies, strict=True)]
            if any(inner):
                self._holders.add(one.results[0])
            found |= any(inner) | self._note_constants(one, own) | self._note(one, own, types)
        return found

    def _note_constants(self, whole: Equation, part: Equation) -> bool:
        """Literal arrays with rows, which only bodies have."""
        found = False
        for i, (one, own) in enumerate(zip(whole.operands, part.operands, strict=True)):
            if isinstance(one, Const) and isinstance(own, Const):
                rows = self._rows_of(one.aval.shape, own.aval.shape, _shown(whole))
                if rows is not None:
                    self._constants[whole.results[0], i] = (one, rows)
                    found = True
        return found

    def _note(self, whole: Equation, part: Equation, types: Mapping[Ref, Any]) -> bool:
        """An equation, where it is a source; whether it is to be rewritten."""
        results = list(zip(_shapes(whole), _shapes(part), strict=True))
        if whole.bodies or not any(has_rows(*pair) for pair in results):
            return False
        if whole.primitive.name in _BY_POSITION:
            raise BatchError(_undrawable(self._sizes, whole))
        pairs = zip(whole.operand_shapes, part.operand_shapes, strict=True)
        if _are_alike(whole, *results[0]) or any(has_rows(*pair) for pair in pairs):
            return False
        if not self._of_batch.isdisjoint(refs(whole.operands)):
            return False
        rows = tuple(self._rows_of(*pair, _shown(whole)) for pair in results)
        named = zip(whole.results, rows, strict=True)
        self._rows += [(f"%{r}", found) for r, found in named if found is not None]
        way = self._way(whole, types)
        self._sources[whole.results[0]] = Source(whole, way, rows)
        return True

    def _way(self, equation: Equation, types: Mapping[Ref, Any]) -> Way:
        kind = equation.primitive.name
        if kind == "iota":
            return Way.COUNTED
        key = equation.operands[0] if equation.operands else None
        if kind == "random_bits" and draws_parts():
            aval = types[key] if isinstance(key, int) else getattr(key, "aval", None)
            if type_of(aval)[1] == _THREEFRY:
                return Way.DRAWN
        drawn = sum(Value("", *type_of(a)).nbytes for a in equation.result_avals)
        if kind in _RANDOM and drawn > _LARGEST_DRAW:
            raise BatchError(_undrawable(self._sizes, equation))
        return Way.CUT

    def _rows_of(self, whole: Sequence[int], part: Sequence[int], where: str) -> Rows | None:
        """Where a shape has its rows, by how it differs; None where it does not."""
        dims = [d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
        if not dims:
            return None
        size, less, sizes = whole[dims[0]], part[dims[0]], self._sizes
        if len(dims) > 1 or size % sizes.batch or size * sizes.part != less * sizes.batch:
            raise BatchError(_unclear(sizes, where, whole, part))
        found = self._layouts.get(size, Rows(0, 1, size // sizes.batch))
        return Rows(dims[0], found.outer, found.inner)


def draws_parts() -> bool:
    """Whether JAX draws threefry bits such that any part of them can be drawn alone."""
    config: Any = jax.config
    return bool(config.jax_threefry_partitionable)


def _are_alike(equation: Equation, whole: Sequence[int], part: Sequence[int]) -> bool:
    """Whether all rows that an equation makes of nothing with rows are the same."""
    if equation.primitive.name == "iota":
        along = equation.params["dimension"]
        return bool(whole[along] == part[along])
    return equation.primitive.name in _ALIKE


def _shapes(equation: Equation) -> list[tuple[int, ...]]:
    return [tuple(getattr(a, "shape", ())) for a in equation.result_avals]


def _layouts(whole: FlatProgram, part: FlatProgram, sizes: Sizes) -> Iterator[tuple[int, Rows]]:
    """How the rows lie in longer dims, by length: as the step's own reshapes merge or split them.

    A source does not say: 64 items may be 16 rows of 4 or 4 times 16 rows. The last reshape tells;
    where none does, rows come first.
    """
    for one, own in _reshapes(whole, part):
        sides = [(one.operand_shapes[0], own.operand_shapes[0]), (_shapes(one)[0], _shapes(own)[0])]
        for (split, split_part), (merged, merged_part) in (sides, sides[::-1]):
            at = [d for d, (a, b) in enumerate(zip(split, split_part, strict=True)) if a != b]
            to = [d for d, (a, b) in enumerate(zip(merged, merged_part, strict=True)) if a != b]
            if len(at) == len(to) == 1 and split[at[0]] == sizes.batch != merged[to[0]]:
                outer = math.prod(split[: at[0]]) // max(1, math.prod(merged[: to[0]]))
                inner = merged[to[0]] // max(1, outer * sizes.batch)
                if outer * sizes.batch * inner == merged[to[0]]:
                    yield merged[to[0]], Rows(0, outer, inner)


def _reshapes(whole: FlatProgram, part: FlatProgram) -> _Pairs:
    pairs = zip(whole.walk(), part.walk(), strict=True)
    return (pair for pair in pairs if pair[0].primitive.name == "reshape")


def _shown(equation: Equation) -> str:
    return f"{equation.primitive.name} at {equation.line or '?'}"


def _unclear(sizes: Sizes, where: str, whole: Sequence[int], part: Sequence[int]) -> str:
    return listing(
        f"{sizes.name} cannot be cut into microbatches: an array that does not come from the "
        "batch grows with it, but not by one row for each of the batch's.",
        [f"{where} makes {list(whole)} of {sizes.batch} rows, and {list(part)} of {sizes.part}"],
        "Make it of one row for each example, or take microbatches=1.",
    )


def _undrawable(sizes: Sizes, equation: Equation) -> str:
    shown = ", ".join(Value("", *type_of(a)).type_text for a in equation.result_avals)
    return listing(
        f"{sizes.name} cannot be cut into microbatches: it draws random numbers of which no part "
        "can be drawn alone.",
        [f"{_shown(equation)} draws {shown} for the whole batch"],
        "Use threefry keys (jax.random.key(seed)) with jax_threefry_partitionable, or a key for "
        "each example: jax.vmap over jax.random.split(key, rows).",
    )
