"""The second trace of a step, on the rows of one microbatch, made to agree with the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from jax import lax

from autopar.errors import BatchError, RowsError, TraceError, bulleted
from autopar.frontend.microbatch.alignment import (
    Trial,
    align,
    has_rows,
    resize,
    rows_behind_barriers,
)
from autopar.frontend.microbatch.batch_inputs import (
    BatchAxes,
    BatchInputs,
    batch_inputs,
    rows_of_one,
    with_rows,
)
from autopar.frontend.microbatch.batch_sources import (
    Sizes,
    find_batch_sources,
    part_from_sources,
    whole_from_sources,
)
from autopar.frontend.microbatch.batched_gather import find_batched_gathers
from autopar.frontend.plain_data import type_of
from autopar.frontend.rewrite.later_calls import LaterCalls, split_later_calls
from autopar.frontend.rewrite.layer_scans import layer_scans
from autopar.frontend.rewrite.remat import inline_remats
from autopar.frontend.rewrite.scan_split import Cuts, split_at
from autopar.frontend.rewrite.splice import Place, splice
from autopar.frontend.trace.arguments import StepSpec
from autopar.frontend.trace.graph import build
from autopar.frontend.trace.step import seal, trace
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep
from autopar.ir.batching import Rows
from autopar.ir.values import Value
from autopar.rules import primitive

_OTHER_ROWS = (2, 3)


@dataclass(frozen=True)
class MicrobatchTrace:
    """A step on the whole batch and on the rows of one microbatch: op for op alike, remat opened.

    In `part` every constant that stems from the batch size is the whole batch's, and what does
    not come from the batch but has rows of it is that microbatch's rows: `index` is the input
    that holds its number, 0 first; empty where nothing needs it. In `whole` the number is the
    literal 0. `sources` are the values that have rows though nothing of the batch is in them.
    `calls` are made with the step's last outputs, which no user sees, once it has run.
    """

    whole: TracedStep
    part: TracedStep
    microbatches: int
    index: str = ""
    sources: tuple[tuple[str, Rows], ...] = ()
    calls: FlatProgram | None = None

    @classmethod
    def of_whole(cls, traced: TracedStep) -> MicrobatchTrace:
        """A step that is run whole: its one microbatch is the batch."""
        return cls(traced, traced, 1)

    def resized(self, microbatches: int, batch: int) -> MicrobatchTrace | None:
        """The step of so many rows in other microbatches, with no trace of its own.

        None where a microbatch makes or takes rows by its number, or its sizes do not grow as
        the rows do.
        """
        counts = self.microbatches, microbatches
        if 1 in counts or self.index or self.sources or self.calls is not None:
            return None
        trial = Trial(batch, batch // self.microbatches, batch // microbatches)
        try:
            program = resize(self.whole.program, self.part.program, trial)
        except BatchError:
            return None
        part = replace(self.part, program=program)
        part = replace(part, graph=build(part, self.part))
        return replace(self, part=part, microbatches=microbatches)


def trace_microbatch(
    spec: StepSpec,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    microbatches: int,
    batch_axes: BatchAxes | None = None,
    traced: TracedStep | None = None,
) -> MicrobatchTrace:
    """Trace the step on the whole batch and on one of so many equal parts of its rows.

    The rows are axis 0 of every array that is given anew at each step, keys and scalars left out;
    `batch_axes` names other axes by path, or None for what has no rows. Raises ArgumentError where
    the batch does not divide so; BatchError where extents disagree (E1), the step's structure
    depends on the batch size (E2), the batch size says which rows to read (E3), or a microbatch's
    rows of what the step makes by itself cannot be told (E7, E9). `traced` is the step's trace on
    these arguments, where it is there already.
    """
    traced = trace(spec, args, kwargs) if traced is None else traced
    if microbatches == 1:
        later = split_later_calls(_prepare(traced))
        whole = replace(later.step, graph=build(later.step, traced))
        return MicrobatchTrace(whole, whole, 1, calls=later.calls)
    # 1. Which inputs hold rows.
    batch = batch_inputs(traced, batch_axes)
    rows = rows_of_one(batch.extent, microbatches)
    # 2. The trace on one microbatch's rows, with the whole batch's constants.
    later, program = _on_part(spec, args, kwargs, _prepare(traced), batch, rows)
    # 3. Both traces rewritten alike: barriers hold rows alone, sums stand beside state.
    one, program = split_state_sums(*rows_behind_barriers(later.step.program, program))
    whole, part = replace(later.step, program=one), replace(later.step, program=program)
    # 4. Iotas, random bits and tables: each microbatch makes its own rows.
    found, index = find_batch_sources(whole, program, Sizes(spec.name, batch.extent, rows)), ""
    sources = found.rows
    if not found.is_empty:
        whole = whole_from_sources(whole, found)
        numbered = part_from_sources(part, found, rows)
        part, index, sources = numbered.step, numbered.index, numbered.rows
    whole = replace(whole, graph=build(whole, traced))
    part = replace(part, graph=build(part, whole))
    return MicrobatchTrace(whole, part, microbatches, index, sources, later.calls)


def _on_part(
    spec: StepSpec,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    traced: TracedStep,
    batch: BatchInputs,
    rows: int,
) -> tuple[LaterCalls, FlatProgram]:
    """The step with calls taken out of it, and its program on so many rows.

    A slice that calls read may take rows of the batch, or of something else as long as a
    microbatch has rows. Only where it is the latter do the two traces differ; then all slices are
    the step's.
    """
    later = split_later_calls(traced, batch.extent, [i for i, _ in batch.axes])
    try:
        return later, _part_program(spec, args, kwargs, later.step, batch, rows, slices=True)
    except BatchError as error:
        again = split_later_calls(traced)
        if again.calls is None:
            raise
        try:
            return again, _part_program(spec, args, kwargs, again.step, batch, rows, slices=False)
        except BatchError:
            raise error from None


def _prepare(traced: TracedStep) -> TracedStep:
    """A trace as it is compared: remat opened, rows read by their own numbers as such."""
    return replace(traced, program=find_batched_gathers(inline_remats(traced.program)))


def _part_program(
    spec: StepSpec,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    whole: TracedStep,
    batch: BatchInputs,
    rows: int,
    *,
    slices: bool,
) -> FlatProgram:
    """The program of so many rows, alike with the whole's but for sizes.

    On a single row JAX writes other operations than on many, so one on another number of rows is
    taken, its sizes brought down. `slices` of its rows may be left to calls.
    """
    # JAX drops dims of size 1, so one row is traced as two (or three) and brought down.
    tried = rows if rows > 1 else _OTHER_ROWS[batch.extent == _OTHER_ROWS[0]]
    few = with_rows(spec, args, kwargs, batch, tried)
    try:
        part = _prepare(seal(spec, *few))
        inputs = [i for i, _ in batch.axes] if slices else ()
        part = split_later_calls(part, tried, inputs).step
    except TraceError as error:
        raise BatchError(
            bulleted(
                f"{whole.name} cannot be cut into microbatches: it traces on {batch.extent} rows "
                f"but not on {tried}.",
                [str(error)],
                "State must not hold rows of the batch, nor the step ask for one batch size. State "
                f"is what comes back, here {whole.state_names}: state_argnums says it otherwise.",
            )
        ) from error
    try:
        program = align(whole, part)
    except BatchError as error:
        pair = _first_pairs(whole.program, part.program)
        raise error if pair is None else RowsError(_describe_pairs(whole.name, pair)) from error
    return (
        program
        if tried == rows
        else resize(whole.program, program, Trial(batch.extent, tried, rows))
    )


def _first_pairs(whole: FlatProgram, part: FlatProgram) -> Equation | None:
    """The first equation that makes a value with two dims of rows, as far as the traces agree.

    What goes wrong after it goes wrong because of it: a diagonal is read by the batch size.
    """
    for one, own in zip(whole.walk(), part.walk(), strict=False):
        if one.primitive is not own.primitive or one.line != own.line:
            return None
        for a, b in zip(one.result_avals, own.result_avals, strict=False):
            shape, short = type_of(a)[0], type_of(b)[0]
            if len(shape) != len(short):  # another operation: one row, say, is squeezed away
                return None
            if sum(n != m for n, m in zip(shape, short, strict=True)) > 1:
                return one
    return None


def _describe_pairs(name: str, equation: Equation) -> str:
    shown = ", ".join(Value("", *type_of(a)).type_text for a in equation.result_avals)
    return bulleted(
        f"{name} cannot be cut into microbatches: every row of the batch meets every other.",
        [f"{equation.primitive.name} at {equation.line or '?'} makes {shown}, with rows twice"],
        "A loss over pairs of rows needs the whole batch: compare rows within fixed groups, or "
        "take microbatches=1.",
    )


def split_microbatch(trace: MicrobatchTrace, cuts: Cuts) -> MicrobatchTrace:
    """Both traces of a step cut at the same layers; raises what `split_at` raises.

    Values that JAX makes with rows of the batch in dim 0 are made whole.
    """
    scans = layer_scans(trace.whole)
    rows = {int(name.removeprefix("%")): rows for name, rows in trace.sources}
    kept = frozenset(ref for ref, own in rows.items() if own.dim == 0)
    first = max(next(t.program.fresh()) for t in (trace.whole, trace.part))
    whole, _ = split_at(trace.whole, scans, cuts, first, kept)
    part, now = split_at(trace.part, scans, cuts, first, kept, whole)
    sources = tuple((f"%{r}", own) for ref, own in rows.items() for r in now(ref))
    return replace(trace, whole=whole, part=part, sources=sources)


# -- state that counts its batch -------------------------------------------------------------------
#
#     new = state.at[labels].add(1)          every microbatch would add the state itself once
#     sum = zeros.at[labels].add(1)          a sum over rows, as any other
#     new = state + sum                      once, when all rows are in it
#
# Whole numbers are the same; floating-point ones are added in another order.


def split_state_sums(whole: FlatProgram, part: FlatProgram) -> tuple[FlatProgram, FlatProgram]:
    """Take sums over rows apart from the values that they are added to, in both traces alike."""
    chosen = frozenset(_state_sums(whole, part))
    if not chosen:
        return whole, part
    first = max(next(program.fresh()) for program in (whole, part))
    return _rewrite(whole, chosen, count(first)), _rewrite(part, chosen, count(first))


def _state_sums(whole: FlatProgram, part: FlatProgram) -> Iterator[Ref]:
    """The results of equations that add rows to a value without rows that is not zero."""
    zeros: set[Ref] = set()
    for one, own in zip(whole.equations, part.equations, strict=True):
        row = primitive(one.primitive.name)
        if row.keeps_zero and all(_is_zero(o, zeros) for o in one.operands):
            zeros.update(one.results)
        if not row.adds or _is_zero(one.operands[0], zeros):
            continue
        shapes = list(zip(one.operand_shapes, own.operand_shapes, strict=True))
        if not has_rows(*shapes[0]) and any(has_rows(*pair) for pair in shapes[1:]):
            yield one.results[0]


def _is_zero(operand: Ref | Const, zeros: set[Ref]) -> bool:
    if isinstance(operand, Const):
        return not operand.aval.shape and not operand.value
    return operand in zeros


def _rewrite(program: FlatProgram, chosen: frozenset[Ref], fresh: Iterator[Ref]) -> FlatProgram:
    equations: list[Equation] = []
    for adding in program.equations:
        if not adding.results or adding.results[0] not in chosen:
            equations.append(adding)
            continue
        # zeros; the sum over rows alone; its addition to the value
        aval, place = adding.result_avals[0], Place.beside(adding, fresh)
        zeros, total = next(fresh), next(fresh)
        full = partial(lax.full, aval.shape, 0, aval.dtype)
        equations += splice(full, (), (), (zeros,), place)
        operands = (zeros, *adding.operands[1:])
        equations.append(replace(adding, operands=operands, results=(total,)))
        summed = (adding.operands[0], total)
        equations += splice(lax.add, summed, (aval, aval), adding.results, place)
    return replace(program, equations=tuple(equations))
