"""Findings of a step before it is planned: what can be sharded, and what stands in the way."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import ArgumentError, BatchError
from autopar.frontend import StepSpec, TracedStep, trace
from autopar.gc_pause import paused_collection
from autopar.ir.batching import Batching
from autopar.ir.findings import BatchReading, Coverage, Finding, Findings, Severity, Topic
from autopar.ir.graph import Graph, Op
from autopar.ir.naming import and_more
from autopar.ir.paths import counted_paths
from autopar.ir.rule import Dim, Kind, Rule
from autopar.ir.text import show_bytes, show_count
from autopar.ir.values import Input, Role, Value
from autopar.planner.request import Request
from autopar.planner.sliced_step import Source, batched
from autopar.rules import REPLICATED, attach_rules

_SHOWN = 3  # of each list in a finding


def lint(
    spec: StepSpec, args: Sequence[object], kwargs: Mapping[str, object], request: Request
) -> Findings:
    """Lint a step on these arguments, arrays or shapes, for a request's cluster.

    A request for a number of microbatches asks whether there are so many. Nothing is planned and no
    device is touched. Raises TraceError where the step does not trace.
    """
    with paused_collection():
        traced = trace(spec, args, dict(kwargs))
        graph = attach_rules(traced.graph, request.rules)
        leaves = tuple(leaves_of(graph))
        source = Source.of(spec, args, dict(kwargs), traced, request)
        batch, found = read_rows(source, request)
        found += tuple(_findings(traced, graph, leaves, request))
    order = list(Severity)
    return Findings(
        step=traced.name,
        cluster=request.cluster.name,
        devices=request.cluster.device_count,
        coverage=coverage_of(leaves),
        batch=batch,
        found=tuple(sorted(found, key=lambda f: (order.index(f.severity), -f.nbytes, f.text))),
    )


def _findings(
    traced: TracedStep, graph: Graph, leaves: Sequence[Leaf], request: Request
) -> Iterator[Finding]:
    devices = request.cluster.device_count
    yield from rule_findings(leaves)
    yield from argument_findings(graph, devices)
    yield from value_findings(graph, leaves, devices)
    yield from gather_findings(leaves, devices)
    yield from state_findings(graph)
    yield from constant_findings(graph)
    yield from dtype_findings(traced, leaves)
    yield from memory_findings(graph, devices, request.budget_bytes)


# -- the ops of a step that hold no bodies ---------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """An op, its operands and results as values, and its runs in a step."""

    op: Op
    operands: tuple[Value, ...]
    runs: int

    @property
    def nbytes(self) -> int:
        """Bytes that all runs read and make."""
        return self.runs * sum(v.nbytes for v in (*self.operands, *self.op.results))


def leaves_of(graph: Graph, runs: int = 1) -> Iterator[Leaf]:
    """The ops without bodies, in order; a while loop is taken to run once."""
    for op in graph.ops:
        if not op.graphs:
            yield Leaf(op, tuple(map(graph.value, op.operands)), runs * op.runs)
        trips = op.control_flow.trips if op.control_flow is not None else 1
        for body in op.graphs:
            yield from leaves_of(body, runs * trips)


def reading_line(graph: Graph, name: str) -> str:
    """The user's line that first reads a value, "" where none is known."""
    readers = (op for op in graph.ops if op.origin.line and name in op.value_operands)
    return next((op.origin.line for op in readers), "")


def making_line(graph: Graph, name: str) -> str:
    """The user's line that makes a value, "" where none is known."""
    makers = (op for op in graph.ops if any(v.name == name for v in op.results))
    return next((op.origin.line for op in makers), "")


# -- coverage --------------------------------------------------------------------------------------


def coverage_of(leaves: Sequence[Leaf]) -> Coverage:
    """FLOPs and bytes of ops that have a rule which lets them be sharded, and of all."""
    covered = [leaf for leaf in leaves if not _is_whole(leaf.op)]
    return Coverage(
        sum(leaf.op.flops * leaf.runs for leaf in leaves),
        sum(leaf.op.flops * leaf.runs for leaf in covered),
        sum(leaf.nbytes for leaf in leaves),
        sum(leaf.nbytes for leaf in covered),
    )


def _is_whole(op: Op) -> bool:
    """True if the primitive runs whole on every device, for want of a rule or on purpose."""
    return op.rule is None or not op.rule.known or op.kind in REPLICATED


def rule_findings(leaves: Sequence[Leaf]) -> Iterator[Finding]:
    """A finding for each primitive without a rule, and each that is kept whole on purpose."""
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        if _is_whole(leaf.op):
            groups.setdefault(leaf.op.kind, []).append(leaf)
    for kind, group in groups.items():
        rule = group[0].op.rule
        unknown = rule is None or not rule.known
        nbytes, flops = sum(g.nbytes for g in group), sum(g.op.flops * g.runs for g in group)
        why = "has no sharding rule" if unknown else f"is kept whole ({REPLICATED[kind]})"
        work = f", {show_count(flops, 'FLOP')}" if flops else ""
        lines = list(dict.fromkeys(g.op.origin.line for g in group if g.op.origin.line))
        also = f"; also at {', '.join(lines[1:_SHOWN])}" if len(lines) > 1 else ""
        yield Finding(
            Severity.WARNING if unknown else Severity.NOTE,
            Topic.NO_RULE,
            f"{kind} {why}: every device does all of it ({show_bytes(nbytes)}{work} a step){also}",
            f"Give it a rule: rules=RuleBook({{{kind!r}: ...}}), or write it in other operations.",
            line=lines[0] if lines else "",
            count=len(group),
            nbytes=nbytes,
        )


# -- the rows of the batch -------------------------------------------------------------------------

_LINE = re.compile(r"[\w./-]+\.py:\d+")
_ALWAYS = "microbatches=1 is always exact."
_RESCALED = "a scalar of the whole batch only scales sums: they are multiplied by it afterwards"


def read_rows(source: Source, request: Request) -> tuple[BatchReading, tuple[Finding, ...]]:
    """Cut the batch in trial, and return what is found on the way.

    Where the request says no number of microbatches, the fewest that the rows allow are tried, and
    that there are none is a warning; else it is an error.
    """
    wanted = request.microbatches if request.microbatches != 1 else None
    rows = 0
    try:
        rows = source.rows
        count = wanted or next((m for m in range(2, rows + 1) if rows % m == 0), 1)
        # The step as so many microbatches; it is rescaled for that if its trace is another.
        given = source.trace_at(count, cut=False)
        trace, batching = batched(given, request.rules, request.setting())
    except (BatchError, ArgumentError) as error:
        severity = Severity.ERROR if wanted else Severity.WARNING
        return BatchReading(rows, wanted or 0), (_refusal(error, severity),)
    reading = BatchReading(
        rows=rows,
        microbatches=count,
        loops=max(1, batching.loops),
        hoisted=len(batching.hoist.values) if batching.hoist is not None else 0,
        rescaled=trace is not given,
        barrier=batching.barrier,
        notes=((_RESCALED,) if trace is not given else ()) + batching.notes,
    )
    return reading, tuple(_batch_findings(batching))


def _refusal(error: Exception, severity: Severity) -> Finding:
    """An error of a headline, bullets and a remedy, as a finding."""
    headline, *rest = str(error).splitlines()
    faults = [line.removeprefix("* ") for line in rest if line.startswith("* ")]
    remedy = rest[-1] if len(rest) > len(faults) else _ALWAYS
    line = _LINE.search(" ".join(faults) or headline)
    text = "; ".join([headline.rstrip("."), *faults])
    return Finding(severity, Topic.BATCH, text, remedy, line=line[0] if line else "")


def _batch_findings(batching: Batching) -> Iterator[Finding]:
    if batching.barrier:
        note = next((n for n in batching.notes if n.startswith("all forwards")), "")
        line = _LINE.search(note)
        yield Finding(
            Severity.NOTE,
            Topic.BARRIER,
            note or "all forwards come before all backwards",
            "In stages it runs under gpipe alone, which holds every microbatch's activations.",
            line=line[0] if line else "",
        )


# -- dims that do not divide -----------------------------------------------------------------------

_LEAST_UNEVEN_SHARE = 0.01  # of the bytes of all arguments, or of all values that ops make


def divides(size: int, devices: int) -> bool:
    """True if some axis of some mesh of so many devices divides a dim."""
    return math.gcd(size, devices) > 1


def _is_odd(size: int, devices: int) -> bool:
    """True if a dim is long enough to be sharded and cannot be."""
    return size >= devices > 1 and not divides(size, devices)


def nearest(size: int, devices: int) -> str:
    """The sizes around one that all devices divide: "50256 or 50264"."""
    below = size - size % devices
    return f"{below} or {below + devices}" if below else str(devices)


@dataclass(frozen=True)
class _Place:
    """A dim of an argument."""

    given: Input
    dim: int

    @property
    def is_rows(self) -> bool:
        """True if it is the first of something that is given anew at every step."""
        return self.given.role is Role.BATCH and self.dim == 0

    def __str__(self) -> str:
        return f"dim {self.dim} of {self.given.path}"


def argument_findings(graph: Graph, devices: int) -> Iterator[Finding]:
    """Dims of arguments that weigh something, and rows of the batch; one finding for each size."""
    total = sum(i.value.nbytes for i in graph.inputs)
    groups: dict[int, list[_Place]] = {}
    for given in graph.inputs:
        for d, size in enumerate(given.value.shape):
            place = _Place(given, d)
            if _is_odd(size, devices) or (place.is_rows and size % devices):
                groups.setdefault(size, []).append(place)
    for size, group in groups.items():
        nbytes = sum(p.given.value.nbytes for p in group)
        if nbytes >= _LEAST_UNEVEN_SHARE * total or any(p.is_rows for p in group):
            yield _uneven_finding(graph, size, group, devices)


def _uneven_finding(graph: Graph, size: int, group: Sequence[_Place], devices: int) -> Finding:
    where = and_more(counted_paths(map(str, group)), _SHOWN)
    most = math.gcd(size, devices)
    said = f"no axis of {devices} devices divides {size}"
    if most > 1:
        said = f"only {most} of {devices} devices can share {size} out"
    rows = ", which the rows of the batch are" if any(p.is_rows for p in group) else ""
    return Finding(
        Severity.WARNING if most == 1 else Severity.NOTE,
        Topic.INDIVISIBLE,
        f"{said}{rows}: {where}",
        f"{'Take' if rows else 'Make it'} {nearest(size, devices)}{'' if rows else ' would do'}.",
        line=reading_line(graph, group[0].given.value.name),
        count=len(group),
        nbytes=sum(p.given.value.nbytes for p in group),
    )


def value_findings(graph: Graph, leaves: Sequence[Leaf], devices: int) -> Iterator[Finding]:
    """Dims that no argument has, such as one less than the length of a sequence."""
    known = {n for i in graph.inputs for n in i.value.shape}
    made = [(leaf, v) for leaf in leaves for v in leaf.op.results]
    total = sum(v.nbytes * leaf.runs for leaf, v in made)
    groups: dict[int, list[tuple[int, Leaf]]] = {}
    for leaf, value in made:
        for size in {n for n in value.shape if n not in known and _is_odd(n, devices)}:
            groups.setdefault(size, []).append((value.nbytes * leaf.runs, leaf))
    for size, group in groups.items():
        nbytes = sum(n for n, _ in group)
        if nbytes < _LEAST_UNEVEN_SHARE * total:
            continue
        largest = max(group, key=lambda pair: pair[0])[1].op
        like = f"{largest.kind} {largest.results[0].type_text}"
        yield Finding(
            Severity.NOTE,
            Topic.INDIVISIBLE,
            f"no axis of {devices} devices divides {size}, a dim of {len(group)} values that take "
            f"{show_bytes(nbytes)} in a step, such as {like}",
            f"Where it can be chosen, {nearest(size, devices)} would do.",
            line=largest.origin.line,
            count=len(group),
            nbytes=nbytes,
        )


# -- ops that force gathers ------------------------------------------------------------------------

_LEAST_GATHERED_SHARE = 0.005  # of the bytes that all ops read and make


@dataclass(frozen=True)
class _Forced:
    """A dim of an operand that an op cannot have sharded, and why."""

    leaf: Leaf
    value: Value
    dim: int
    why: str
    is_all: bool  # no other dim of the operand can be sharded either

    @property
    def nbytes(self) -> int:
        """Bytes of the operand over all runs of a step."""
        return self.value.nbytes * self.leaf.runs


def gather_findings(leaves: Sequence[Leaf], devices: int) -> Iterator[Finding]:
    """A finding for each kind of op, line and reason, if enough bytes go through it.

    It is a warning where the whole operand must be gathered, else a note: another dim may be
    sharded at no cost.
    """
    total = sum(leaf.nbytes for leaf in leaves)
    groups: dict[object, list[_Forced]] = {}
    for leaf in leaves:
        for forced in _forced(leaf, devices):
            key = (leaf.op.kind, leaf.op.origin.line, forced.why, forced.is_all)
            groups.setdefault(key, []).append(forced)
    for group in groups.values():
        nbytes = sum(f.nbytes for f in group)
        if nbytes >= _LEAST_GATHERED_SHARE * total:
            yield _gather_finding(group, nbytes)


def _gather_finding(group: Sequence[_Forced], nbytes: int) -> Finding:
    first = max(group, key=lambda f: f.nbytes)
    op = first.leaf.op
    rest = ", and no other dim can be sharded" if first.is_all else ""
    remedy = "Work along a dim that stays whole, or on fewer bytes."
    if not first.is_all:
        remedy = "It costs nothing while that dim is not sharded: autopar weighs it."
    return Finding(
        Severity.WARNING if first.is_all else Severity.NOTE,
        Topic.GATHER,
        f"{op.kind} {first.why} dim {first.dim} of {first.value.type_text}{rest}: "
        f"{show_bytes(nbytes)} in a step to gather or move if it is sharded",
        remedy,
        line=op.origin.line,
        count=len({id(f.leaf) for f in group}),
        nbytes=nbytes,
    )


def _forced(leaf: Leaf, devices: int) -> Iterator[_Forced]:
    """The dims of an op's operands that an axis divides but that the op cannot have sharded."""
    rule = leaf.op.rule
    if rule is None or not rule.known or rule.on_demand or leaf.op.kind in REPLICATED:
        return
    free = rule.shardable
    for value, dims in zip(leaf.operands, rule.operands, strict=True):
        if not value.name or value.dtype.startswith("key"):
            continue
        able = any(_divides_some(rule, dim, free, devices) for dim in dims)
        for d, (size, dim) in enumerate(zip(value.shape, dims, strict=True)):
            if divides(size, devices) and not _divides_some(rule, dim, free, devices):
                yield _Forced(leaf, value, d, _why(rule, dim, devices), not able)


def _divides_some(rule: Rule, dim: Dim, free: Sequence[int], devices: int) -> bool:
    return any(f in free and divides(rule.factors[f].size, devices) for f in dim)


def _why(rule: Rule, dim: Dim, devices: int) -> str:
    """The thing that the op does to a dim which forbids sharding it."""
    sizes = [rule.factors[f].size for f in dim]
    if len(dim) > 1:
        ways = " x ".join(map(str, sizes))
        first = next((n for n in sizes if n > 1), 1)
        odd = "" if divides(first, devices) else f", and no axis divides {first},"
        return f"reads as {ways}{odd}"
    kinds = {rule.factors[f].kind for f in dim}
    if Kind.PERMUTE in kinds:
        return "shifts items along"
    if kinds <= {Kind.REPLICATE}:
        return "needs all of"
    return "merges, as the minor part of a longer dim,"


# -- arguments -------------------------------------------------------------------------------------

_LARGE_CONSTANT = 16 * 2**20
_DOUBLE = ("f64", "c128")


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
