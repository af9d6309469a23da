"""Sources of rows: values of a step that have rows of the batch though nothing of it is in them.

A source is an equation whose result has rows of the batch and whose operands are made of nothing
of it: an iota, random bits, a slice of a table. On its own a microbatch would make the first rows
of each. What makes rows of a statistic of the batch is no source, and left to the analysis.

Iotas and random bits are made at the rows of one microbatch alone. Legend: a dim of the whole is
outer x B x inner long; a microbatch has b of the B rows; i is its number; k is the row-major place
of an item in the whole array, as the words k = hi * 2^32 + lo.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from autopar.errors import BatchError, bulleted
from autopar.frontend.microbatch.alignment import has_rows
from autopar.frontend.plain_data import type_of
from autopar.frontend.rewrite.reach import reached_from
from autopar.frontend.rewrite.splice import Place, splice
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep, refs
from autopar.ir.batching import Rows
from autopar.ir.values import Value
from autopar.rules import primitive

_WORD = 1 << 32
_HALF = 1 << 16
_Wide = tuple[jax.Array, jax.Array]  # hi, lo


@dataclass(frozen=True)
class Window:
    """The rows of one microbatch in an array of `shape` that has all the rows."""

    shape: tuple[int, ...]
    rows: Rows
    part: int  # rows of the microbatch

    @property
    def batch(self) -> int:
        """Rows of the whole."""
        return self.shape[self.rows.dim] // (self.rows.outer * self.rows.inner)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what the window shows."""
        size = self.rows.outer * self.part * self.rows.inner
        dim = self.rows.dim
        return (*self.shape[:dim], size, *self.shape[dim + 1 :])


def window_of(whole: jax.Array, index: jax.Array, window: Window) -> jax.Array:
    """The rows of microbatch `index` of a whole array."""
    dim, rows = window.rows.dim, window.rows
    before, after = window.shape[:dim], window.shape[dim + 1 :]
    split = lax.reshape(whole, (*before, rows.outer, window.batch, rows.inner, *after))
    starts = [jnp.zeros_like(index)] * split.ndim
    starts[dim + 1] = index * window.part
    sizes = (*before, rows.outer, window.part, rows.inner, *after)
    return lax.reshape(lax.dynamic_slice(split, starts, sizes), window.part_shape)


def places(index: jax.Array, window: Window, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The place of each item of the window along the dim of rows: iota, cut to the window."""
    rows = window.rows
    counted = dtype if jnp.issubdtype(dtype, jnp.integer) else "int32"
    block, stride = window.part * rows.inner, window.batch * rows.inner
    here = lax.broadcasted_iota(counted, window.part_shape, rows.dim)
    start = lax.convert_element_type(index, counted) * jnp.asarray(block, counted)
    moved = here + lax.broadcast(start, window.part_shape)
    if rows.outer > 1:
        moved = moved + (here // block) * jnp.asarray(stride - block, counted)
    return moved if counted is dtype else lax.convert_element_type(moved, dtype)


def threefry_bits(key: jax.Array, index: jax.Array, window: Window, bit_width: int) -> jax.Array:
    """The random bits of a threefry key in the window, those that the whole array would have.

    Item k of what JAX draws (`jax_threefry_partitionable`) is the hash of the words of k: so any
    part can be drawn alone. Where there are several keys, their dims come before the window's.
    """
    data = jax.random.key_data(key)
    shape = (*key.shape, *window.part_shape)
    words = [lax.index_in_dim(data, i, key.ndim, keepdims=False) for i in (0, 1)]
    keys = [lax.broadcast_in_dim(w, shape, range(key.ndim)) for w in words]
    own = range(key.ndim, len(shape))
    counts = [lax.broadcast_in_dim(w, shape, own) for w in _counters(index, window)]
    high, low = threefry2x32_p.bind(*keys, *counts)
    if bit_width == 64:
        wide = [lax.convert_element_type(b, jnp.uint64) for b in (high, low)]
        return lax.shift_left(wide[0], jnp.full_like(wide[0], 32)) | wide[1]
    mixed = high ^ low
    return mixed if bit_width == 32 else lax.convert_element_type(mixed, f"uint{bit_width}")


def _counters(index: jax.Array, window: Window) -> _Wide:
    """The words of k for each item of the window."""
    shape, wide = window.part_shape, math.prod(window.shape) > _WORD
    zero = jnp.zeros(shape, jnp.uint32)
    found = (zero, zero)
    for dim, size in enumerate(window.shape):
        if size == 1:
            continue
        along = (
            places(index, window, jnp.uint32)
            if dim == window.rows.dim
            else lax.broadcasted_iota(jnp.uint32, shape, dim)
        )
        stride = math.prod(window.shape[dim + 1 :])
        if wide:
            found = _sum(found, _product(along, stride))
        else:
            term = along * jnp.uint32(stride) if stride > 1 else along
            found = (zero, term if found[1] is zero else found[1] + term)
    return found


def _product(words: jax.Array, factor: int) -> _Wide:
    """Both words of a product of 32 bits and a factor below 2^64, modulo 2^64."""
    over, factor = divmod(factor, _WORD)
    high, low = (jnp.uint32(n) for n in divmod(factor, _HALF))
    top, bottom = words >> 16, words & jnp.uint32(_HALF - 1)
    middle = top * low + ((bottom * low) >> 16)
    carried = bottom * high + (middle & jnp.uint32(_HALF - 1))
    upper = top * high + (middle >> 16) + (carried >> 16) + words * jnp.uint32(over)
    return upper, words * jnp.uint32(factor)


def _sum(left: _Wide, right: _Wide) -> _Wide:
    low = left[1] + right[1]
    carry = lax.convert_element_type(low < left[1], jnp.uint32)
    return left[0] + right[0] + carry, low


_ALIKE = frozenset({"broadcast_in_dim", "empty"})  # every row of these is the same
# What these draw for a row depends on where it lies, and they split their keys by themselves.
_BY_POSITION = frozenset({"random_gamma", "rng_uniform"})
_LARGEST_DRAW = 64 << 20  # bytes of a whole draw of which every microbatch takes its rows
_THREEFRY = "key<fry>"


@dataclass(frozen=True)
class Sizes:
    """The step that is cut, the rows of its batch and those of one microbatch."""

    name: str
    batch: int
    part: int


class Way(Enum):
    """The way in which the rows of a microbatch are made."""

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
class BatchSources:
    """The values that must know the number of the microbatch, bodies of loops included.

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
        """True if no microbatch need know its number."""
        return not (self.sources or self.constants or self.inputs)


def find_batch_sources(whole: TracedStep, part: FlatProgram, sizes: Sizes) -> BatchSources:
    """The sources of a step, found by holding it against the same on one microbatch's rows.

    Raises BatchError for a source whose rows cannot be told or cut: two dims of rows (E7), sizes
    that are no multiple of the batch, a random generator that draws no part alone (E9).
    """
    return _SourceFinder(whole, part, sizes).found()


class _SourceFinder:
    def __init__(self, whole: TracedStep, part: FlatProgram, sizes: Sizes) -> None:
        self._whole, self._part, self._sizes = whole, part, sizes
        self._layouts: dict[int, Rows] = dict(_layouts(whole.program, part, sizes))
        self._sources: dict[Ref, Source] = {}
        self._constants: dict[tuple[Ref, int], tuple[Const, Rows]] = {}
        self._rows: list[tuple[str, Rows]] = []
        self._holders: set[Ref] = set()
        pairs = zip(whole.program.input_avals, part.input_avals, strict=True)
        # Inputs whose shapes differ are the batch, but for arrays that the step closes over: these
        # have rows of their own, as a table of positions has.
        given = [r for r, (a, b) in zip(part.inputs, pairs, strict=True) if a.shape != b.shape]
        constants = set(part.inputs[len(part.inputs) - len(whole.constants) :])
        self._of_batch = reached_from(part, [r for r in given if r not in constants])

    def found(self) -> BatchSources:
        """The sources of the whole step."""
        whole = self._whole.program
        # 1. Equations and literals of the program and of all bodies.
        self._visit(whole, self._part)
        count = len(self._whole.constants)
        # 2. Closed-over arrays with rows.
        heads = zip(whole.inputs, whole.input_avals, self._part.input_avals, strict=True)
        inputs = {
            ref: rows
            for ref, one, own in list(heads)[len(whole.inputs) - count :]
            if (rows := self._rows_of(one.shape, own.shape, "an array that it closes over"))
        }
        named = (*((f"%{r}", rows) for r, rows in inputs.items()), *self._rows)
        return BatchSources(self._sources, self._constants, inputs, frozenset(self._holders), named)

    def _visit(self, whole: FlatProgram, part: FlatProgram) -> bool:
        """Note the sources of a program; True if a microbatch must know its number there."""
        types, found = dict(whole.avals()), False
        for one, own in zip(whole.equations, part.equations, strict=True):
            # A loop that holds a source must be given the number of the microbatch.
            inner = [self._visit(a, b) for a, b in zip(one.bodies, own.bodies, strict=True)]
            if any(inner):
                self._holders.add(one.results[0])
            found |= any(inner)
            # Literal arrays with rows, which only bodies have.
            for i, (a, b) in enumerate(zip(one.operands, own.operands, strict=True)):
                if isinstance(a, Const) and isinstance(b, Const):
                    rows = self._rows_of(a.aval.shape, b.aval.shape, _show(one))
                    if rows is not None:
                        self._constants[one.results[0], i] = (a, rows)
                        found = True
            found |= self._note(one, own, types)
        return found

    def _note(self, whole: Equation, part: Equation, types: Mapping[Ref, Any]) -> bool:
        """Note an equation if it is a source; True if it is."""
        results = list(zip(_shapes(whole), _shapes(part), strict=True))
        # A source has rows in its results, ...
        if whole.bodies or not any(has_rows(*pair) for pair in results):
            return False
        if whole.primitive.name in _BY_POSITION:
            raise BatchError(_undrawable(self._sizes, whole))
        pairs = zip(whole.operand_shapes, part.operand_shapes, strict=True)
        # ... which are not all the same, and none in its operands, ...
        alike = whole.primitive.name in _ALIKE
        if whole.primitive.name == "iota":
            (size, less), along = results[0], whole.params["dimension"]
            alike = bool(size[along] == less[along])
        if alike or any(has_rows(*pair) for pair in pairs):
            return False
        # ... and nothing of the batch is in it, a sum over rows neither.
        if not self._of_batch.isdisjoint(refs(whole.operands)):
            return False
        rows = tuple(self._rows_of(*pair, _show(whole)) for pair in results)
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
        # threefry numbers are functions of their position, if JAX is set so: any part can be drawn
        # alone.
        config: Any = jax.config
        if kind == "random_bits" and config.jax_threefry_partitionable:
            aval = types[key] if isinstance(key, int) else getattr(key, "aval", None)
            if type_of(aval)[1] == _THREEFRY:
                return Way.DRAWN
        drawn = sum(Value("", *type_of(a)).nbytes for a in equation.result_avals)
        # Else all are drawn and cut, if that is not too much.
        if primitive(kind).draws and drawn > _LARGEST_DRAW:
            raise BatchError(_undrawable(self._sizes, equation))
        return Way.CUT

    def _rows_of(self, whole: Sequence[int], part: Sequence[int], where: str) -> Rows | None:
        """The place of the rows in a shape, by how it differs; None if it does not."""
        dims = [d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
        if not dims:
            return None
        size, less, sizes = whole[dims[0]], part[dims[0]], self._sizes
        # E7, or a size that does not grow with the batch.
        if len(dims) > 1 or size % sizes.batch or size * sizes.part != less * sizes.batch:
            raise BatchError(
                bulleted(
                    f"{sizes.name} cannot be cut into microbatches: an array that does not come "
                    "from the batch grows with it, but not by one row for each of the batch's.",
                    [
                        f"{where} makes {list(whole)} of {sizes.batch} rows, and {list(part)} of "
                        f"{sizes.part}"
                    ],
                    "Make it of one row for each example, or take microbatches=1.",
                )
            )
        found = self._layouts.get(size, Rows(0, 1, size // sizes.batch))
        return Rows(dims[0], found.outer, found.inner)


def _shapes(equation: Equation) -> list[tuple[int, ...]]:
    return [tuple(getattr(a, "shape", ())) for a in equation.result_avals]


def _layouts(whole: FlatProgram, part: FlatProgram, sizes: Sizes) -> Iterator[tuple[int, Rows]]:
    """The place of the rows in longer dims, by length: as the step's reshapes merge or split them.

    A source does not say: 64 items may be 16 rows of 4 or 4 times 16 rows. The last reshape tells;
    where none does, rows come first.

        reshape f32[16, 4] -> f32[64]       64: outer 1, inner 4
        reshape f32[4, 16] -> f32[64]       64: outer 4, inner 1
    """
    for one, own in zip(whole.walk(), part.walk(), strict=True):
        # One with `dimensions` turns them first, so that the order says nothing.
        if one.primitive.name != "reshape" or one.params.get("dimensions") is not None:
            continue
        sides = [(one.operand_shapes[0], own.operand_shapes[0]), (_shapes(one)[0], _shapes(own)[0])]
        for (split, split_part), (merged, merged_part) in (sides, sides[::-1]):
            at = [d for d, (a, b) in enumerate(zip(split, split_part, strict=True)) if a != b]
            to = [d for d, (a, b) in enumerate(zip(merged, merged_part, strict=True)) if a != b]
            if len(at) == len(to) == 1 and split[at[0]] == sizes.batch != merged[to[0]]:
                outer = math.prod(split[: at[0]]) // max(1, math.prod(merged[: to[0]]))
                inner = merged[to[0]] // max(1, outer * sizes.batch)
                if outer * sizes.batch * inner == merged[to[0]]:
                    yield merged[to[0]], Rows(0, outer, inner)


def _show(equation: Equation) -> str:
    return f"{equation.primitive.name} at {equation.line or '?'}"


def _undrawable(sizes: Sizes, equation: Equation) -> str:
    shown = ", ".join(Value("", *type_of(a)).type_text for a in equation.result_avals)
    return bulleted(
        f"{sizes.name} cannot be cut into microbatches: it draws random numbers of which no part "
        "can be drawn alone.",
        [f"{_show(equation)} draws {shown} for the whole batch"],
        "Use threefry keys (jax.random.key(seed)) with jax_threefry_partitionable, or a key for "
        "each example: jax.vmap over jax.random.split(key, rows).",
    )


# -- rewriting: every microbatch makes its own rows of what the whole batch makes ------------


INDEX_PATH = "microbatch"
_INDEX_TYPE: Any = jax.typeof(np.int32(0))
_FIRST = Const(np.zeros((), "int32"), _INDEX_TYPE)


def whole_from_sources(whole: TracedStep, sources: BatchSources) -> TracedStep:
    """The step on the whole batch with the equations that `part_from_sources` would write.

    It is the one microbatch there is, number 0, so that it stays the part's twin op for op.
    """
    fresh = whole.program.fresh()
    next(fresh)  # the part's index
    return _Rewriter(sources, fresh, 0).step(whole, _FIRST)


@dataclass(frozen=True)
class Numbered:
    """A step on a microbatch's rows that is told the microbatch's number by input `index`."""

    step: TracedStep
    index: str
    rows: tuple[tuple[str, Rows], ...]  # where values have rows that no operand gives them


def part_from_sources(part: TracedStep, sources: BatchSources, rows: int) -> Numbered:
    """The step on one microbatch's rows; its number is the last input but the closed-over arrays.

    Every source is then, bit for bit, the microbatch's rows of what the whole batch makes of it.
    """
    program, fresh = part.program, part.program.fresh()
    index, at = next(fresh), len(program.inputs) - len(part.constants)
    paths = part.input_paths
    numbered = replace(
        part,
        program=replace(
            program,
            inputs=(*program.inputs[:at], index, *program.inputs[at:]),
            input_avals=(*program.input_avals[:at], _INDEX_TYPE, *program.input_avals[at:]),
        ),
        input_paths=(*paths[:at], INDEX_PATH, *paths[at:]),
    )
    rewriter = _Rewriter(sources, fresh, rows)
    step = rewriter.step(numbered, index)
    return Numbered(step, f"%{index}", (*sources.rows, *rewriter.cut_rows))


class _Rewriter:
    """Rewrites the sources of one of the two traces, whose microbatch has so many rows; 0: all.

    Both traces get the same equations at other sizes, with the same numbers.
    """

    def __init__(self, sources: BatchSources, fresh: Iterator[Ref], rows: int) -> None:
        self._found, self._fresh, self._rows = sources, fresh, rows
        self.cut_rows: list[tuple[str, Rows]] = []  # of arrays written into bodies

    def step(self, traced: TracedStep, index: Ref | Const) -> TracedStep:
        """The step, its closed-over arrays cut to the rows before anything reads them."""
        program, place = traced.program, Place("", "", self._fresh)
        inputs, avals = list(program.inputs), list(program.input_avals)
        cuts: list[Equation] = []
        first = len(inputs) - len(traced.constants)
        for i, value in enumerate(traced.constants, first):
            rows = self._found.inputs.get(inputs[i])
            if rows is not None:
                result, inputs[i] = inputs[i], next(self._fresh)
                avals[i] = avals[i].update(shape=np.shape(value))
                cuts += self._cut(inputs[i], avals[i], rows, result, index, place)
        equations = (*cuts, *self._equations(program, index))
        return replace(
            traced,
            program=FlatProgram(tuple(inputs), tuple(avals), equations, program.outputs),
        )

    def _equations(self, program: FlatProgram, index: Ref | Const) -> Iterator[Equation]:
        types = dict(program.avals())
        for equation in program.equations:
            head = equation.results[0] if equation.results else -1
            if head in self._found.sources:
                yield from self._sourced(self._found.sources[head], equation, types, index)
                continue
            operands = list(equation.operands)
            for i in range(len(operands)):
                if (head, i) in self._found.constants:
                    const, rows = self._found.constants[head, i]
                    operands[i] = result = next(self._fresh)
                    self.cut_rows.append((f"%{result}", rows))
                    place = Place.beside(equation, self._fresh)
                    yield from self._cut(const, const.aval, rows, result, index, place)
            held = replace(equation, operands=tuple(operands))
            yield self._holding(held, index) if head in self._found.holders else held

    # -- sources ---------------------------------------------------------------------------

    def _window(self, shape: Sequence[int], rows: Rows) -> Window:
        whole = Window(tuple(shape), rows, 0)
        return replace(whole, part=self._rows or whole.batch)

    def _cut(
        self,
        value: Ref | Const,
        aval: Any,
        rows: Rows,
        result: Ref,
        index: Ref | Const,
        place: Place,
    ) -> tuple[Equation, ...]:
        """The microbatch's rows of an array that has all of them."""
        fun = partial(window_of, window=self._window(aval.shape, rows))
        return splice(fun, (value, index), (aval, _INDEX_TYPE), (result,), place)

    def _sourced(
        self, source: Source, own: Equation, types: Mapping[Ref, Any], index: Ref | Const
    ) -> Iterator[Equation]:
        whole, place = source.equation, Place.beside(own, self._fresh)
        if source.way is Way.CUT:
            # The equation on the whole batch, then the microbatch's rows of what it makes.
            pairs = zip(own.results, source.rows, strict=True)
            results = tuple(r if rows is None else next(self._fresh) for r, rows in pairs)
            yield replace(whole, operands=own.operands, results=results)
            for made, aval, rows, result in zip(
                results, whole.result_avals, source.rows, own.results, strict=True
            ):
                if rows is not None:
                    yield from self._cut(made, aval, rows, result, index, place)
            return
        rows = source.rows[0]
        assert rows is not None
        if source.way is Way.COUNTED:
            window = self._window(whole.result_avals[0].shape, rows)
            fun = partial(places, window=window, dtype=whole.result_avals[0].dtype)
            yield from splice(fun, (index,), (_INDEX_TYPE,), own.results, place)
            return
        key = own.operands[0]
        aval = key.aval if isinstance(key, Const) else types[key]
        shape, keys = whole.params["shape"], len(aval.shape)
        window = self._window(shape, replace(rows, dim=rows.dim - keys))
        fun = partial(threefry_bits, window=window, bit_width=whole.params["bit_width"])
        yield from splice(fun, (key, index), (aval, _INDEX_TYPE), own.results, place)

    # -- loops -----------------------------------------------------------------------------

    def _holding(self, loop: Equation, index: Ref | Const) -> Equation:
        """A loop whose bodies are given the index, as the last of their constants."""
        params = dict(loop.params)
        if loop.primitive.name == "scan":
            inner = [params["num_consts"]]
            outer = inner
            params["num_consts"] += 1
            params["linear"] = (False,) * (len(loop.operands) + 1)
        elif loop.primitive.name == "while":
            tests, rest = params["cond_nconsts"], params["body_nconsts"]
            inner, outer = [tests, rest], [tests, tests + 1 + rest]
            params["cond_nconsts"], params["body_nconsts"] = tests + 1, rest + 1
        else:
            inner = [len(b.inputs) for b in loop.bodies]
            outer = [len(loop.operands)]
        operands, shapes = list(loop.operands), list(loop.operand_shapes)
        for at in outer:
            operands.insert(at, index)
            shapes.insert(at, ())
        bodies: list[FlatProgram] = []
        for body, at in zip(loop.bodies, inner, strict=True):
            number = next(self._fresh)
            bodies.append(
                FlatProgram(
                    (*body.inputs[:at], number, *body.inputs[at:]),
                    (*body.input_avals[:at], _INDEX_TYPE, *body.input_avals[at:]),
                    tuple(self._equations(body, number)),
                    body.outputs,
                )
            )
        return replace(
            loop,
            params=params,
            operands=tuple(operands),
            operand_shapes=tuple(shapes),
            bodies=tuple(bodies),
        )
