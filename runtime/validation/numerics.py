"""Runs the planned step beside the plain one on random arguments, and tells errors from rounding.

Arguments are of the step's types, in range of what they index, with new batches every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from autopar.errors import VerifyError
from autopar.frontend.traced import Equation, FlatProgram, Ref, TracedStep, refs
from autopar.ir.verification import Numerics, OutputError
from autopar.runtime.bind import is_key
from autopar.runtime.validation.steps import FlatStep, as_numbers, drawn_keys, on_host, rounding_of

_RAW_KEY = ((2,), "uint32")
_SEEDS = 1000  # more than a step has leaves of keys


@dataclass(frozen=True)
class Drawn:
    """The flat arguments of each step: those given, and where only shapes were, random ones.

    State is used by the first step alone, which hands its own on.
    """

    first: tuple[Any, ...]
    batches: tuple[Mapping[int, Any], ...]  # of each later step, what differs from the first
    notes: tuple[str, ...]

    def leaves(self, step: int) -> list[Any]:
        """The flat arguments of a step, state as in the first."""
        fresh = self.batches[step - 1] if step else {}
        return [fresh.get(i, leaf) for i, leaf in enumerate(self.first)]


def drawn(traced: TracedStep, leaves: Sequence[Any], steps: int, positive: bool = False) -> Drawn:
    """Arguments for some steps; `leaves` are the given ones, arrays or their types.

    Random state is small enough for deep steps to stay finite, and with `positive` never below
    zero, as second moments want it; whole numbers in it are 0, as counters start.
    """
    bounds = index_bounds(traced.program)
    missing = [i for i, leaf in enumerate(leaves) if _is_type(leaf)]
    state = set(traced.state_inputs)

    def draw(i: int, step: int) -> Any:
        rng = np.random.default_rng((i, step))
        if i in state:
            return _state(leaves[i], rng, positive, i)
        return _batch(leaves[i], rng, bounds.get(i, 2), i + _SEEDS * (step + 1))

    first = [draw(i, 0) if i in missing else on_host([_array(leaf)])[0]
             for i, leaf in enumerate(leaves)]  # fmt: skip
    later = tuple({i: draw(i, step) for i in missing if i not in state} for step in range(1, steps))
    return Drawn(tuple(first), later, tuple(_notes(traced, missing, positive)))


def _notes(traced: TracedStep, missing: Sequence[int], positive: bool) -> list[str]:
    state = [i for i in missing if i in traced.state_inputs]
    notes: list[str] = []
    if state:
        kind = "positive random numbers" if positive else "random numbers"
        notes.append(f"{len(state)} arrays of state were {kind}, not trained or initialized ones")
    if len(missing) > len(state):
        notes.append("batches were random numbers")
    return notes


def _is_type(leaf: Any) -> bool:
    """True if a leaf is no array or number but the type of one."""
    is_array = getattr(leaf, "__array__", None) is not None or getattr(leaf, "devices", None)
    return getattr(leaf, "dtype", None) is not None and not is_array


def _array(leaf: Any) -> Any:
    return leaf if getattr(leaf, "dtype", None) is not None else np.asarray(leaf)


def _state(kind: Any, rng: np.random.Generator, positive: bool, seed: int) -> Any:
    """Floats of about one over the number of items that are summed in a product with them."""
    if is_key(kind.dtype):
        return drawn_keys(tuple(kind.shape), kind.dtype, seed)
    if not _is_float(kind.dtype):
        return np.zeros(kind.shape, kind.dtype)
    rows = math.prod(kind.shape[:-1])
    normal = rng.standard_normal(kind.shape)
    scaled = np.abs(normal) / rows if positive else normal / math.sqrt(rows)
    return _cast(scaled, kind.dtype)


def _batch(kind: Any, rng: np.random.Generator, bound: int, seed: int) -> Any:
    shape, dtype = tuple(kind.shape), kind.dtype
    if is_key(dtype):
        return drawn_keys(shape, dtype, seed)
    if _is_float(dtype):
        return _cast(rng.standard_normal(shape), dtype)
    if np.issubdtype(dtype, np.complexfloating):
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    if (shape, str(dtype)) == _RAW_KEY:
        return rng.integers(2**32, size=shape, dtype=np.uint32)
    return rng.integers(bound, size=shape).astype(dtype)


def _cast(numbers: Array, dtype: Any) -> Array:
    return cast("Array", np.asarray(numbers).astype(dtype))


def _is_float(dtype: Any) -> bool:
    """True for dtypes of floats, bfloat16 and the like among them."""
    return np.issubdtype(dtype, np.floating) or str(dtype).startswith(("bfloat", "float"))


# -- the range of an index ---------------------------------------------------------------------


# Ops whose result is an index where an operand is one.
_PASSING = frozenset({
    "add", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "copy", "max",
    "min", "pad", "reshape", "rev", "select_n", "sharding_constraint", "slice", "squeeze",
    "transpose",
})  # fmt: skip


def index_bounds(program: FlatProgram) -> dict[int, int]:
    """Input -> how many rows, classes or positions its numbers tell apart, where that shows.

    It shows in a gather, whose indexed dim has a size, and in a comparison with an iota (one-hot).
    The least size counts. Bodies of scans are followed, those of other loops are not.
    """
    found: dict[int, int] = {}
    for number, ref in enumerate(program.inputs):
        sizes = tuple(_sizes(program, frozenset([ref])))
        if sizes:
            found[number] = max(1, min(sizes))
    return found


def _sizes(program: FlatProgram, indices: frozenset[Ref]) -> Iterator[int]:
    """Sizes of what values made from some indices tell apart."""
    reached, counted = set(indices), dict[Ref, int]()
    for equation in program.equations:
        name = equation.primitive.name
        read = [r for r in refs(equation.operands) if r in reached]
        if name == "iota":
            counted[equation.results[0]] = equation.params["shape"][equation.params["dimension"]]
        elif name in _PASSING and not read:
            counts = [counted[r] for r in refs(equation.operands) if r in counted]
            counted.update((r, counts[0]) for r in equation.results if counts)
        elif not read:
            continue
        elif name == "gather":
            yield from _gathered(equation, reached)
        elif name == "eq":
            yield from (counted[r] for r in refs(equation.operands) if r in counted)
        elif name == "scan":
            given = zip(equation.bodies[0].inputs, equation.operands, strict=True)
            inside = frozenset(r for r, o in given if isinstance(o, int) and o in reached)
            yield from _sizes(equation.bodies[0], inside)
        elif name in _PASSING:
            reached.update(equation.results)


def _gathered(equation: Equation, reached: set[Ref]) -> Iterator[int]:
    """The sizes of the dims that a gather indexes with one of some values."""
    if equation.operands[1] in reached:
        numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        shape = equation.operand_shapes[0]
        yield from (shape[d] - sizes[d] + 1 for d in numbers.start_index_map)


STEPS = 3
_PERTURBED = 2
_UNSOUND = (
    "the plain step itself gives infinities or no numbers on these arguments: give it real ones "
    "(arrays, or a create_state beside the step)"
)

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Validation:
    """A step as its user wrote it, and as it was planned; both are functions of flat arguments.

    `leaves` are those arguments, arrays or their types. `where` are the meshes that the planned one
    runs on.
    """

    traced: TracedStep
    leaves: tuple[Any, ...]
    plain: FlatStep
    planned: FlatStep
    where: str
    devices: int
    notes: tuple[str, ...] = ()


def numerics(validation: Validation, steps: int = STEPS) -> Numerics:
    """The errors of the planned step, and what is rounding among them.

    The plain step runs again from arguments that differ by one rounding: what it then does to
    itself, the planned one may do as well. Raises VerifyError where the arguments do not fit.
    """
    given, expected = _plain_run(validation, steps)
    mine = _run(validation.planned, validation.traced, given, steps)
    rounding = rounding_of(validation.traced.program)
    again = (
        _run(validation.plain, validation.traced, given, steps, _perturbation(rounding, seed))
        for seed in range(_PERTURBED)
    )
    outputs = output_errors(expected, mine, again)
    unsound = () if _is_finite(expected) else (_UNSOUND,)
    notes = (*validation.notes, *given.notes, *unsound)
    return Numerics(steps, validation.devices, validation.where, rounding, outputs, notes)


def _plain_run(validation: Validation, steps: int) -> tuple[Drawn, list[Result]]:
    """Arguments on which the plain step gives numbers, if any that are drawn do; and these."""
    given = drawn(validation.traced, validation.leaves, steps)
    results = _run(validation.plain, validation.traced, given, steps)
    if _is_finite(results):
        return given, results
    given = drawn(validation.traced, validation.leaves, steps, positive=True)
    return given, _run(validation.plain, validation.traced, given, steps)


def _is_finite(results: Sequence[Result]) -> bool:
    return all(np.isfinite(r.change).all() for r in results)


def _as_it_is(leaf: Any) -> Any:
    return leaf


def _run(
    step: FlatStep, traced: TracedStep, given: Drawn, steps: int, change: Change = _as_it_is
) -> list[Result]:
    """The results of every step and the state after the last; `change` is of all arguments."""
    returns = dict(traced.donated)
    leaves = list(map(change, given.leaves(0)))
    first = list(leaves)
    found: list[Result] = []
    for i in range(steps):
        made = step(leaves)
        if len(made) != len(traced.output_paths):
            raise VerifyError(
                f"{traced.name} gave {len(made)} arrays and was traced with "
                f"{len(traced.output_paths)}: what it returns may depend only on shapes"
            )
        found += [
            Result(traced.output_paths[o], as_numbers(made[o]))
            for o in range(len(made)) if o not in returns
        ]  # fmt: skip
        if i + 1 < steps:
            leaves = list(map(change, given.leaves(i + 1)))
        for output, own in returns.items():
            leaves[own] = made[output]
    found += [
        Result(traced.input_paths[own], as_numbers(leaves[own]), as_numbers(first[own]))
        for own in returns.values()
    ]
    return found


def _perturbation(rounding: float, seed: int) -> Change:
    """A change of every float by the rounding or nothing, or its opposite, by chance."""
    rng = np.random.default_rng(seed)

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or np.issubdtype(leaf.dtype, np.integer):
            return leaf
        numbers: np.ndarray[Any, Any] = leaf
        if numbers.dtype == np.bool_:
            return numbers
        signs = rng.integers(-1, 2, size=numbers.shape)
        wide = np.complex128 if np.iscomplexobj(numbers) else np.float64
        return np.asarray(numbers.astype(wide) * (1.0 + rounding * signs)).astype(numbers.dtype)

    return change


# -- errors and rounding -----------------------------------------------------------------------


Array = np.ndarray[Any, Any]

TOLERANCE = 1e-5  # of each tensor's largest magnitude, for floats; nothing else may differ
# Of how far the plain step goes when its arguments change by one rounding: sums in another order
# round anew at every level, and the largest of a few draws is not the largest there is.
_NOISE = 4.0


@dataclass(frozen=True)
class Result:
    """An output of a step: its path, its numbers, and for state those that it started from."""

    path: str
    numbers: Array
    start: Array | None = None

    @property
    def change(self) -> Array:
        """The change over the steps, so that an update does not drown in what it is added to."""
        return _wide(self.numbers) - (0.0 if self.start is None else _wide(self.start))


def output_errors(
    plain: Sequence[Result], planned: Sequence[Result], perturbed: Iterable[Sequence[Result]]
) -> tuple[OutputError, ...]:
    """The errors of a planned run, path by path, beside the noise of the plain one.

    `perturbed` are plain runs from arguments that differ by one rounding. A path that occurs
    several times, once a step, has its worst error.
    """
    noise = np.zeros(len(plain))
    for run in perturbed:
        gaps = [_gap(a.change, b.change) for a, b in zip(run, plain, strict=True)]
        noise = np.maximum(noise, gaps)
    found: dict[str, OutputError] = {}
    for mine, expected, own in zip(planned, plain, noise.tolist(), strict=True):
        error = _output_error(mine, expected, float(own))
        held = found.get(error.path)
        if held is None or _excess(error) > _excess(held):
            found[error.path] = error
    return tuple(found.values())


def _output_error(mine: Result, expected: Result, noise: float) -> OutputError:
    scale = _scale(expected.numbers)
    least = TOLERANCE if _is_inexact(expected.numbers) else 0.0
    same = mine.numbers.shape == expected.numbers.shape
    same = same and mine.numbers.dtype == expected.numbers.dtype
    error = _gap(_wide(mine.numbers), _wide(expected.numbers)) / scale if same else np.inf
    return OutputError(expected.path, error, noise / scale, max(least, _NOISE * noise / scale))


def _excess(error: OutputError) -> float:
    """By how much an error is over its tolerance."""
    return error.error - error.tolerance


def _gap(left: Array, right: Array) -> float:
    """The largest difference; infinite where one is a number and the other is not."""
    if not left.size:
        return 0.0
    finite = np.isfinite(left)
    if not np.array_equal(finite, np.isfinite(right)):
        return float("inf")
    odd = ~finite
    if not np.array_equal(left[odd], right[odd], equal_nan=True):
        return float("inf")
    return float(np.max(np.abs(left[finite] - right[finite]), initial=0.0))


def _scale(numbers: Array) -> float:
    """The largest magnitude that is a number; 1 where there is none."""
    wide = np.abs(_wide(numbers))
    return float(np.max(wide[np.isfinite(wide)], initial=0.0)) or 1.0


def _wide(numbers: Array) -> Array:
    """Numbers in which differences of any dtype can be taken."""
    kind = np.complex128 if np.iscomplexobj(numbers) else np.float64
    return numbers.astype(kind)


def _is_inexact(numbers: Array) -> bool:
    return not np.issubdtype(numbers.dtype, np.integer) and numbers.dtype != np.bool_
