"""Refusals of steps that cannot be cut into microbatches exactly: reasons and remedies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from autopar.errors import BatchError, BatchStatisticError, RowsError, bulleted
from autopar.ir.graph import Op

_LINE = re.compile(r"\(([^()]+:\d+)\)")


class Why(Enum):
    """Reasons against cutting a step, each with one remedy; E1 to E12 number the errors."""

    # Rows: the aligned traces and the rows through each op.
    AXIS = "axis"  # E1: no batch axis, or an ambiguous one
    STRUCTURE = "structure"  # E2: the program depends on how many rows there are
    CONSTANT = "constant"  # E3: a number of rows is used as an index or an option
    COUPLED = "coupled"  # E5: an op mixes rows
    TWICE = "twice"  # E7: a value holds the rows in two dims
    OPAQUE = "opaque"  # E8: code that cannot be seen into
    RANDOM = "random"  # E9: random bits of which no rows can be had alone
    CALLED = "called"  # E10: Python that must be called once a step
    # Phases: sums over the batch that other ops wait for.
    BARRIER = "barrier"  # E4: needs all forwards before all backwards
    STATISTIC = "statistic"  # E6: BatchNorm and its like
    LOOPED = "looped"  # E11: a statistic is used inside the loop's body that makes it
    METRIC = "metric"  # E11: a statistic of a statistic, of which no gradient is taken
    DEEP = "deep"  # E11: too many statistics, one after the other
    NOTHING = "nothing"  # E12: nothing depends on the batch


@dataclass(frozen=True)
class Fault:
    """A reason against cutting the step, as a sentence that names value and line."""

    why: Why
    text: str

    @property
    def lines(self) -> tuple[str, ...]:
        """The user's lines that the sentence names, in order."""
        return tuple(dict.fromkeys(_LINE.findall(self.text)))


def describe(op: Op, place: int = 0) -> str:
    """A result of an op with its type and the user's line: "add %3: f32[8,4] (train.py:8)"."""
    value = f" {op.results[place]}" if op.results else ""
    line = f" ({op.origin.line})" if op.origin.line else ""
    return f"{op.kind}{value}{line}"


_ALWAYS = "microbatches=1 is always exact."
_SHOWN = 4

# For each reason: its error, what it comes to, and the remedy.
_REASONS: Mapping[Why, tuple[type[BatchError], str, str]] = {
    Why.AXIS: (
        BatchError,
        "no batch axis could be told",
        'Say which axis counts the examples: batch_axes={"path/of/leaf": 1}.',
    ),
    Why.STRUCTURE: (
        BatchError,
        "its structure depends on the batch size",
        "Write it so that every batch size runs the same operations.",
    ),
    Why.CONSTANT: (
        BatchError,
        "the batch size is used as a position or an option",
        "Read each row by what lies beside it: jnp.take_along_axis, or jax.vmap over the rows.",
    ),
    Why.COUPLED: (
        RowsError,
        "an operation mixes rows of the batch",
        "Keep rows apart until they are summed: jax.vmap of the code for one example does so.",
    ),
    Why.TWICE: (
        RowsError,
        "a value compares every row of the batch with every other",
        "A loss over pairs of rows needs the whole batch; compare rows within fixed groups.",
    ),
    Why.OPAQUE: (
        RowsError,
        "what some code does to the rows is not known",
        "Give it a rule in a RuleBook that lets the dim of the rows pass.",
    ),
    Why.RANDOM: (
        RowsError,
        "random numbers are drawn for the whole batch at once",
        "Use threefry keys (jax.random.key), or a key for each row.",
    ),
    Why.CALLED: (
        RowsError,
        "Python would be called once for each microbatch",
        "Call it with what the whole batch gives, such as a mean, and read its results outside "
        "of loops; or give it a rule in a RuleBook that lets the dim of the rows pass.",
    ),
    Why.LOOPED: (
        BatchStatisticError,
        "a statistic of the batch is used inside the loop that makes it",
        "Use statistics of one row (LayerNorm, GroupNorm), or write the trips of a short scan out.",
    ),
    Why.STATISTIC: (
        BatchStatisticError,
        "the forward pass depends on statistics of the whole batch, as BatchNorm does in training",
        "Use LayerNorm or GroupNorm, or frozen statistics (use_running_average=True).",
    ),
    Why.METRIC: (
        BatchStatisticError,
        "a value that it returns needs another pass over the batch",
        "Return what it is made of: for a deviation, the means of x and of x**2.",
    ),
    Why.DEEP: (
        BatchStatisticError,
        "its gradients wait for sums over the whole batch that forward passes alone do not give",
        "Take gradients through fewer statistics of the whole batch (jax.lax.stop_gradient).",
    ),
    Why.BARRIER: (
        BatchStatisticError,
        "its gradients need a statistic that only the end of all forward passes gives",
        "Choose a schedule that runs all forwards before all backwards (gpipe).",
    ),
    Why.NOTHING: (
        BatchError,
        "nothing that it returns depends on the batch",
        "Name the arguments that are given anew at every step.",
    ),
}


def refusal(name: str, faults: Sequence[Fault]) -> BatchError:
    """The error of a step that has these faults: the first reason's, once for each user's line."""
    why = faults[0].why
    kind, headline, remedy = _REASONS[why]
    found = [fault for fault in faults if fault.why is why]
    by_lines: dict[tuple[str, ...], str] = {}
    for fault in found:
        by_lines.setdefault(fault.lines or (fault.text,), fault.text)
    shown = list(by_lines.values())[:_SHOWN]
    like, others = len(found) - len(shown), len(faults) - len(found)
    more = [f"and {like} more like {'this' if len(shown) == 1 else 'these'}"] if like else []
    more += [f"besides, {others} other reason{'s' * (others > 1)}"] if others else []
    return kind(
        bulleted(
            f"{name} cannot be cut into microbatches exactly: {headline}.",
            [*shown, *more],
            f"{remedy} {_ALWAYS}",
        )
    )
