"""Oddities of a step's arguments: state that is lost, constants, types, sheer size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.frontend import TracedStep
from autopar.inspecting.leaves import Leaf, making_line, reading_line
from autopar.inspecting.words import and_more
from autopar.ir.findings import Finding, Severity, Topic
from autopar.ir.graph import Graph
from autopar.ir.paths import counted_paths
from autopar.ir.text import show_bytes
from autopar.ir.values import Role

_LARGE_CONSTANT = 16 * 2**20
_DOUBLE = ("f64", "c128")
_SHOWN = 3


def state_findings(graph: Graph) -> Iterator[Finding]:
    """Arguments that look like state but do not come back as they came."""
    changed = list(_changed(graph))
    for path, before, after, line in changed:
        yield Finding(
            Severity.WARNING,
            Topic.STATE,
            f"{path} is {before} when it comes and {after} when it goes, so it is no state: its "
            "buffer is not used again, and it is planned like a batch",
            "Return it with the shape and dtype that it came with, as with .astype.",
            line=line,
        )
    if not graph.donated and not changed:
        yield Finding(
            Severity.WARNING,
            Topic.STATE,
            "no argument comes back among the outputs: nothing is donated, and parameters are "
            "planned like a batch",
            "Return the new state, with the tree, shapes and dtypes of the old.",
        )


def _changed(graph: Graph) -> Iterator[tuple[str, str, str, str]]:
    """Inputs that are no state though an output has their path below the argument's name.

    With each its type, the output's, and the line that makes that.
    """
    returns, came = dict(graph.donated), {i for _, i in graph.donated}
    outputs = {
        path: graph.value(o)
        for n, (path, o) in enumerate(zip(graph.output_paths, graph.outputs, strict=True))
        if n not in returns
    }
    below = {path.partition("/")[2]: value for path, value in outputs.items()}
    for number, given in enumerate(graph.inputs):
        _, _, rest = given.path.partition("/")
        value = outputs.get(rest) or below.get(rest)
        if rest and value is not None and number not in came and given.role is Role.BATCH:
            before, after = given.value.type_text, value.type_text
            if before != after:
                yield given.path, before, after, making_line(graph, value.name)


def constant_findings(graph: Graph) -> Iterator[Finding]:
    """Large arrays that the step closes over."""
    large = [
        i.value
        for i in graph.inputs
        if i.role is Role.CONSTANT and i.value.nbytes >= _LARGE_CONSTANT
    ]
    if large:
        nbytes = sum(v.nbytes for v in large)
        yield Finding(
            Severity.WARNING,
            Topic.CONSTANT,
            f"the step closes over {and_more([v.type_text for v in large], _SHOWN)}: "
            f"{show_bytes(nbytes)} that are kept in the program and cannot be donated",
            "Pass them as arguments, or make them within the step.",
            line=reading_line(graph, large[0].name),
            count=len(large),
            nbytes=nbytes,
        )


def dtype_findings(traced: TracedStep, leaves: Sequence[Leaf]) -> Iterator[Finding]:
    """Double precision, and state whose type is weak only when it comes or when it goes."""
    double = [leaf for leaf in leaves if any(v.dtype in _DOUBLE for v in leaf.op.results)]
    if double:
        yield Finding(
            Severity.WARNING,
            Topic.DTYPE,
            f"{len(double)} ops compute in {double[0].op.results[0].dtype}: twice the bytes, and "
            "slow or emulated on accelerators",
            "Leave jax_enable_x64 off, or cast to float32.",
            line=double[0].op.origin.line,
            count=len(double),
            nbytes=sum(leaf.nbytes for leaf in double),
        )
    program = traced.program
    types = dict(program.avals())
    weak = [
        traced.input_paths[i]
        for o, i in traced.donated
        if isinstance(out := program.outputs[o], int)
        and getattr(types[out], "weak_type", False)
        != getattr(program.input_avals[i], "weak_type", False)
    ]
    if weak:
        yield Finding(
            Severity.NOTE,
            Topic.DTYPE,
            f"{and_more(counted_paths(weak), _SHOWN)}: a Python number when it comes or when it "
            "goes, an array the other time, so the second step is traced and planned anew",
            "Start from an array of a dtype: jnp.zeros((), jnp.int32).",
            count=len(weak),
        )


def memory_findings(graph: Graph, devices: int, budget_bytes: int) -> Iterator[Finding]:
    """Arguments that do not fit the devices, were each cut up as far as its dims allow."""
    least = sum(i.value.nbytes / _pieces(i.value.shape, devices) for i in graph.inputs)
    if least > budget_bytes:
        largest = max(graph.inputs, key=lambda i: i.value.nbytes)
        total = sum(i.value.nbytes for i in graph.inputs)
        yield Finding(
            Severity.ERROR,
            Topic.MEMORY,
            f"the arguments are {show_bytes(total)}: {show_bytes(least)} a device at the very "
            f"least, and one may hold {show_bytes(budget_bytes)}; the largest is {largest.path} "
            f"{largest.value.type_text}",
            "Take more devices or larger ones, fewer bytes an item, or less optimizer state.",
            count=len(graph.inputs),
            nbytes=total,
        )


def _pieces(shape: Sequence[int], devices: int) -> int:
    """Into how many equal pieces a value can be cut by axes whose sizes multiply to `devices`."""
    pieces, left = 1, devices
    for size in shape:
        share = math.gcd(size, left)
        pieces, left = pieces * share, left // share
    return pieces
