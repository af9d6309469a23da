"""Makes every microbatch start from its own rows of what the whole batch would start from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from autopar.frontend.counters import Window, places, threefry_bits, window_of
from autopar.frontend.splice import Place, spliced
from autopar.frontend.survey import Source, Survey, Way
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep
from autopar.ir.batching import Rows

INDEX_PATH = "microbatch"
_INDEX_TYPE: Any = jax.typeof(np.int32(0))
_FIRST = Const(np.zeros((), "int32"), _INDEX_TYPE)


def whole_from_sources(whole: TracedStep, survey: Survey) -> TracedStep:
    """The step on the whole batch with the equations that `part_from_sources` would write.

    It is the one microbatch there is, number 0, so that it stays the part's twin op for op.
    """
    fresh = whole.program.fresh()
    next(fresh)  # the part's index
    return _Rewriter(survey, fresh, 0).step(whole, _FIRST)


@dataclass(frozen=True)
class Numbered:
    """A step on a microbatch's rows that is told the microbatch's number by input `index`."""

    step: TracedStep
    index: str
    rows: tuple[tuple[str, Rows], ...]  # where values have rows that no operand gives them


def part_from_sources(part: TracedStep, survey: Survey, rows: int) -> Numbered:
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
    rewriter = _Rewriter(survey, fresh, rows)
    step = rewriter.step(numbered, index)
    return Numbered(step, f"%{index}", (*survey.rows, *rewriter.cut_rows))


class _Rewriter:
    """Rewrites the sources of one of the two traces, whose microbatch has so many rows; 0: all.

    Both traces get the same equations at other sizes, with the same numbers.
    """

    def __init__(self, survey: Survey, fresh: Iterator[Ref], rows: int) -> None:
        self._survey, self._fresh, self._rows = survey, fresh, rows
        self.cut_rows: list[tuple[str, Rows]] = []  # of arrays written into bodies

    def step(self, traced: TracedStep, index: Ref | Const) -> TracedStep:
        """The step, its closed-over arrays cut to the rows before anything reads them."""
        program, place = traced.program, Place("", "", self._fresh)
        inputs, avals = list(program.inputs), list(program.input_avals)
        cuts: list[Equation] = []
        first = len(inputs) - len(traced.constants)
        for i, value in enumerate(traced.constants, first):
            rows = self._survey.inputs.get(inputs[i])
            if rows is not None:
                result, inputs[i] = inputs[i], next(self._fresh)
                avals[i] = avals[i].update(shape=np.shape(value))
                cuts += self._cut(inputs[i], avals[i], rows, result, index, place)
        equations = (*cuts, *self._equations(program, index))
        return replace(
            traced,
            program=FlatProgram(tuple(inputs), tuple(avals), equations, program.outputs),
        )

    def _body(self, program: FlatProgram, at: int) -> FlatProgram:
        """A loop's body that is given the index as its input `at`."""
        index = next(self._fresh)
        inputs, avals = program.inputs, program.input_avals
        return FlatProgram(
            (*inputs[:at], index, *inputs[at:]),
            (*avals[:at], _INDEX_TYPE, *avals[at:]),
            tuple(self._equations(program, index)),
            program.outputs,
        )

    def _equations(self, program: FlatProgram, index: Ref | Const) -> Iterator[Equation]:
        types = dict(program.avals())
        for equation in program.equations:
            head = equation.results[0] if equation.results else -1
            if head in self._survey.sources:
                yield from self._sourced(self._survey.sources[head], equation, types, index)
                continue
            operands = list(equation.operands)
            for i in range(len(operands)):
                if (head, i) in self._survey.constants:
                    const, rows = self._survey.constants[head, i]
                    operands[i] = result = next(self._fresh)
                    self.cut_rows.append((f"%{result}", rows))
                    place = Place.beside(equation, self._fresh)
                    yield from self._cut(const, const.aval, rows, result, index, place)
            held = replace(equation, operands=tuple(operands))
            yield self._holding(held, index) if head in self._survey.holders else held

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
        return spliced(fun, (value, index), (aval, _INDEX_TYPE), (result,), place)

    def _sourced(
        self, source: Source, own: Equation, types: Mapping[Ref, Any], index: Ref | Const
    ) -> Iterator[Equation]:
        whole, place = source.equation, Place.beside(own, self._fresh)
        if source.way is Way.CUT:
            yield from self._taken(source, own, index, place)
            return
        rows = source.rows[0]
        assert rows is not None
        if source.way is Way.COUNTED:
            window = self._window(whole.result_avals[0].shape, rows)
            fun = partial(places, window=window, dtype=whole.result_avals[0].dtype)
            yield from spliced(fun, (index,), (_INDEX_TYPE,), own.results, place)
            return
        key = own.operands[0]
        aval = key.aval if isinstance(key, Const) else types[key]
        shape, keys = whole.params["shape"], len(aval.shape)
        window = self._window(shape, replace(rows, dim=rows.dim - keys))
        fun = partial(threefry_bits, window=window, bit_width=whole.params["bit_width"])
        yield from spliced(fun, (key, index), (aval, _INDEX_TYPE), own.results, place)

    def _taken(
        self, source: Source, own: Equation, index: Ref | Const, place: Place
    ) -> Iterator[Equation]:
        """The equation on the whole batch, then the microbatch's rows of what it makes."""
        whole = source.equation
        results = tuple(
            r if rows is None else next(self._fresh)
            for r, rows in zip(own.results, source.rows, strict=True)
        )
        yield replace(whole, operands=own.operands, results=results)
        for made, aval, rows, result in zip(
            results, whole.result_avals, source.rows, own.results, strict=True
        ):
            if rows is not None:
                yield from self._cut(made, aval, rows, result, index, place)

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
        return replace(
            loop,
            params=params,
            operands=tuple(operands),
            operand_shapes=tuple(shapes),
            bodies=tuple(self._body(b, at) for b, at in zip(loop.bodies, inner, strict=True)),
        )
