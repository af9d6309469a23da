"""Inputs of a step that hold rows of the batch, and its arguments cut to fewer rows."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import ArgumentError, BatchError, bulleted
from autopar.frontend.trace.arguments import StepSpec, split_static, type_of_leaf
from autopar.frontend.traced import TracedStep

# Path pattern -> the axis of the rows, or None where a leaf has none.
BatchAxes = Mapping[str, int | None]
_RAW_KEY = ((2,), "uint32")
_SHOWN = 8


@dataclass(frozen=True)
class BatchInputs:
    """The rows of the whole batch, and the inputs that have them: (number of input, axis)."""

    extent: int
    axes: tuple[tuple[int, int], ...]


def batch_inputs(traced: TracedStep, batch_axes: BatchAxes | None = None) -> BatchInputs:
    """The inputs given anew at every step whose axis 0 all have in common.

    State, constants, scalars and random keys that stand alone have no rows. `batch_axes` maps
    paths, or patterns of them such as "frozen/*", to another axis or to None; a path stands for
    all that is below it. Raises BatchError where extents disagree or nothing has rows (E1);
    ArgumentError where a pattern matches no path.
    """
    program = traced.program
    given = range(len(program.inputs) - len(traced.constants))
    fresh = [i for i in given if i not in traced.state_inputs]
    # Axes by path; of several patterns that match a path, the last one counts.
    paths = [traced.input_paths[i] for i in fresh]
    named: dict[str, int | None] = {}
    for pattern, axis in (batch_axes or {}).items():
        hits = [p for p in paths if p.startswith(f"{pattern}/") or fnmatch.fnmatchcase(p, pattern)]
        if not hits:
            raise ArgumentError(
                f"batch_axes names {pattern!r}, which no argument matches that is given anew at "
                f"every step. Those are {', '.join(paths[:_SHOWN]) or 'none'}."
            )
        named.update(dict.fromkeys(hits, axis))
    found: list[tuple[int, int]] = []
    for i, path in zip(fresh, paths, strict=True):
        kind = type_of_leaf(program.input_avals[i])
        shape, axis = kind[0], named.get(path, None if kind == _RAW_KEY else 0)
        if axis is None or not (shape or path in named):
            continue
        if not -len(shape) <= axis < len(shape):
            raise ArgumentError(f"batch_axes names axis {axis} of {path}, of shape {list(shape)}.")
        found.append((i, axis % len(shape)))
    return BatchInputs(_common_extent(traced, found), tuple(found))


def _common_extent(traced: TracedStep, found: Sequence[tuple[int, int]]) -> int:
    """The extent of all the axes; E1 where there is none."""
    avals = traced.program.input_avals
    extents = {avals[i].shape[axis] for i, axis in found}
    if len(extents) == 1:
        return int(extents.pop())
    if not found:
        taken = f" State is what comes back: {traced.state_names}." if traced.state_inputs else ""
        raise BatchError(
            f"{traced.name} cannot be cut into microbatches: no argument of it that is given anew "
            f"at every step has an axis of rows.{taken} Give the batch as an argument of its own, "
            "or tell by state_argnums which arguments are state."
        )
    shown = [f"{traced.input_paths[i]}: {avals[i].str_short()}, axis {a}" for i, a in found]
    more = len(shown) - _SHOWN
    raise BatchError(
        bulleted(
            f"{traced.name} cannot be cut into microbatches: its arguments have "
            f"{' or '.join(map(str, sorted(extents)))} rows.",
            shown[:_SHOWN] + ([f"and {more} more"] if more > 0 else []),
            "Say which axis counts the examples, or that there is none: "
            'batch_axes={"path/of/leaf": 1, "frozen/*": None}.',
        )
    )


def rows_of_one(extent: int, microbatches: int) -> int:
    """Rows of one microbatch; ArgumentError where the batch does not come out even."""
    if microbatches < 1 or extent % microbatches:
        able = ", ".join(str(n) for n in range(1, extent + 1) if extent % n == 0)
        raise ArgumentError(
            f"a batch of {extent} rows cannot be cut into {microbatches} microbatches of one size. "
            f"microbatches may be {able}; or feed a batch whose size is a multiple of it."
        )
    return extent // microbatches


def with_rows(
    spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any], batch: BatchInputs, rows: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The step's arguments as shapes in which the inputs of the batch have so many rows."""
    leaves, tree = jax.tree_util.tree_flatten(split_static(spec, args, kwargs))
    for i, axis in batch.axes:
        shape, _ = type_of_leaf(leaves[i])
        shape = (*shape[:axis], rows, *shape[axis + 1 :])
        leaves[i] = jax.ShapeDtypeStruct(
            shape, leaves[i].dtype, weak_type=getattr(leaves[i], "weak_type", False)
        )
    positional, named = jax.tree_util.tree_unflatten(tree, leaves)
    numbers, _ = spec.static(args)
    dynamic = iter(positional)
    return tuple(a if i in numbers else next(dynamic) for i, a in enumerate(args)), {
        **kwargs,
        **named,
    }
