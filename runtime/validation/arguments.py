"""Random arguments of a step: of its types, in range of what they index, new batches every step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from autopar.frontend.traced import Equation, FlatProgram, Ref, TracedStep, refs
from autopar.runtime.bind import is_key
from autopar.runtime.validation.steps import drawn_keys, on_host

Array = np.ndarray[Any, Any]

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
