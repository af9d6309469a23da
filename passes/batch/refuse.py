"""What is said of a step that cannot be cut into microbatches exactly, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.errors import BatchError, BatchStatisticError, RowsError, listing
from autopar.ir.graph import Graph, Op
from autopar.passes.batch.facts import Fault, Why, described
from autopar.passes.batch.loops import reading_graph
from autopar.passes.batch.phases import Phases, Reentry
from autopar.rules import primitive

ALWAYS = "microbatches=1 is always exact."
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
        "a statistic of the batch is used inside a loop (scan) that makes it",
        "Unroll the loop, or use statistics of one row (LayerNorm, GroupNorm).",
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


def refused(name: str, faults: Sequence[Fault]) -> BatchError:
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
        listing(
            f"{name} cannot be cut into microbatches exactly: {headline}.",
            [*shown, *more],
            f"{remedy} {ALWAYS}",
        )
    )


def reentry_text(phases: Phases, reentry: Reentry) -> str:
    """Both ends: "the mean over rows %5 (bn.py:12) is subtracted from rows: sub %9 (bn.py:14)"."""
    graph = phases.whole
    made = [statistic_text(phases, n) for n in sorted(phases.sums_behind(reentry.value))]
    use, value = _use(graph, reentry)
    is_are = "is" if len(made) == 1 else "are"
    verb = _VERBS.get((use.kind, use.operands.index(value)), "read row by row")
    return f"{' and '.join(made)} {is_are} {verb}: {described(use)}"


_VERBS = {
    ("add", 0): "added to rows",
    ("add", 1): "added to rows",
    ("add_any", 0): "added to rows",
    ("add_any", 1): "added to rows",
    ("sub", 1): "subtracted from rows",
    ("mul", 0): "multiplied with rows",
    ("mul", 1): "multiplied with rows",
    ("div", 1): "what rows are divided by",
    ("dot_general", 0): "multiplied with rows",
    ("dot_general", 1): "multiplied with rows",
}


def statistic_text(phases: Phases, name: str) -> str:
    """A result that combines rows: "the mean over rows %5: f32[8] (bn.py:12)"."""
    graph = phases.whole
    op = graph.ops[phases.makers[name]]
    line = f" ({op.origin.line})" if op.origin.line else ""
    combiner = phases.sums[name].combiner
    word = "mean" if combiner == "sum" and _is_divided(graph, name) else combiner
    return f"the {word} over rows {graph.values[name]}{line}"


def _is_divided(graph: Graph, name: str) -> bool:
    """Whether all that becomes of a sum is its division by a constant."""
    readers = [graph.ops[i] for i in reading_graph(graph).get(name, ())]
    return bool(readers) and all(
        op.kind == "div" and op.operands[0] == name and not isinstance(op.operands[1], str)
        for op in readers
    )


def _use(graph: Graph, reentry: Reentry) -> tuple[Op, str]:
    """The op at which a value that is spread over the rows meets them, and what it reads."""
    readers, op, value = reading_graph(graph), graph.ops[reentry.op], reentry.value
    while primitive(op.kind).moves or op.kind == "convert_element_type":
        following = readers.get(op.results[0].name, [])
        if not following:
            break
        op, value = graph.ops[following[0]], op.results[0].name
    return op, value


def reentry_faults(phases: Phases) -> Iterator[Fault]:
    """Every re-entry that no order of loops makes exact, statistics of forward passes first."""
    forward = [r for r in phases.reentries if phases.graph.ops[r.op].origin.region == "forward"]
    why = Why.STATISTIC if _reaches_gradients(phases) else Why.METRIC
    for reentry in forward:
        yield Fault(why, reentry_text(phases, reentry))
    for text in dict.fromkeys(reentry_text(phases, r) for r in phases.reentries if not forward):
        yield Fault(Why.DEEP, f"{text}; {phases.loops} passes over the microbatches in all")


def _reaches_gradients(phases: Phases) -> bool:
    """Whether a backward op waits for a sum over the batch within a loop."""
    return any(
        phase and phases.runs_in_loop(i) and phases.graph.ops[i].origin.region == "backward"
        for i, phase in enumerate(phases.phases)
    )
