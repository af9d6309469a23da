"""Phase analysis: in which pass over the microbatches each op can run, and in which it does.

    phase(input) = 0
    phase(op)    = max over its operands
    phase(sum over rows) = 1 + phase(op that makes it)

Ops of phase k run in loop k, or once after loop k - 1. A masked mean, loss = sum(l * mask) / b with
b = sum(mask):

    phase 0    l * mask, a = sum(l * mask), b = sum(mask)
    phase 1    ct = 1 / b, and with it the whole backward pass: N = 2

b holds no parameter, so R1 takes it over the whole batch first: ct has phase 0, and N = 1.

    1. `analyze_phases`    the phase and the fact of every value, and the sums that loops read
    2. `hoist_sums`        R1, repeated until no such sum is left
    3. `place_ops`         the loops of every op, accumulators, and values that cross loops
    4. `find_rescales`     R2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.batching import FREE, Accumulator, Hoist, Moment, Rescale, Rows, When
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.values import Literal, Role
from autopar.passes.batch.dim_propagation import is_opaque
from autopar.passes.batch.lattice import REPLICATED, Fact, Share, literal_fact
from autopar.passes.batch.refuse import Why, describe
from autopar.passes.batch.transfer import TransferFunctions

_LAYOUTS = frozenset(("transpose", "reshape", "squeeze", "expand_dims"))


@dataclass(frozen=True)
class State:
    """A value as the ops after it find it."""

    fact: Fact
    phase: int = 0
    when: When = When.FREE  # ONCE: it is complete when loop `phase - 1` has ended


@dataclass(frozen=True)
class Reentry:
    """A re-entry: a completed value of the whole batch that an op reads in a loop."""

    value: str
    op: int


@dataclass(frozen=True)
class Phases:
    """The earliest loop of every op; `sums` are the results that combine rows."""

    whole: Graph
    graph: Graph  # of a microbatch, its ops those of the whole
    live: frozenset[int]
    whens: tuple[When, ...]
    phases: tuple[int, ...]
    states: Mapping[str, State]
    sums: Mapping[str, Fact]
    reentries: tuple[Reentry, ...]

    @cached_property
    def loops(self) -> int:
        """N, the number of passes over the microbatches."""
        looping = (p for i, p in enumerate(self.phases) if self.runs_in_loop(i))
        return 1 + max(looping, default=0)

    @cached_property
    def makers(self) -> Mapping[str, int]:
        """Value name -> the op that makes it."""
        return {v.name: i for i, op in enumerate(self.graph.ops) for v in op.results}

    def runs_in_loop(self, op: int) -> bool:
        """True if an op is live and runs for each microbatch."""
        return op in self.live and self.whens[op] is When.LOOP

    def is_between_passes(self, reentry: Reentry) -> bool:
        """True if forward ops alone make a statistic, and others read it (R3)."""
        # A schedule with all forwards first has the statistic when the first backward begins.
        makers = {self._region(self.makers[n]) for n in self.sums_behind(reentry.value)}
        return makers == {"forward"} and self._region(reentry.op) != "forward"

    def _region(self, op: int) -> str:
        return self.graph.ops[op].origin.region

    def sums_behind(self, value: str) -> frozenset[str]:
        """The results that combine rows from which a once value is made."""
        makers = self.makers
        found, seen, left = set[str](), {value}, [value]
        while left:
            name = left.pop()
            if name in self.sums:
                found.add(name)
            elif name in makers and self.states[name].phase:
                for operand in self.graph.ops[makers[name]].value_operands:
                    if operand not in seen:
                        seen.add(operand)
                        left.append(operand)
        return frozenset(found)


def analyze_phases(transfer: TransferFunctions, known: Collection[str] = ()) -> Phases:
    """The phases of a step in which the values `known` are there from the start."""
    part, whole, known = transfer.graphs.part, transfer.graphs.whole, frozenset(known)
    # 1. Live ops, backwards: those that an output or an effect needs. Known values need no op.
    needed = {o for o in part.outputs if isinstance(o, str)} - known
    live: set[int] = set()
    for i in range(len(part.ops) - 1, -1, -1):
        op = part.ops[i]
        if op.acts or any(v.name in needed for v in op.results):
            live.add(i)
            needed.update(name for name in op.value_operands if name not in known)
    # 2. phase(input) = 0. The number of a microbatch is local; inputs with rows are sharded; the
    #    rest is replicated.
    states: dict[str, State] = {}
    inputs = {i.value.name: i.value for i in whole.inputs}
    for value in (i.value for i in part.inputs):
        if value.name == transfer.graphs.index:
            states[value.name] = State(Fact(Share.LOCAL), 0, When.LOOP)
            continue
        dim = transfer.rows_dim(inputs[value.name], value)
        if dim is None:
            states[value.name] = State(REPLICATED)
        else:
            items = transfer.cut.items_per_row(inputs[value.name], value, dim)
            fact = Fact(Share.SHARDED, Rows(dim, 1, max(items, 1)))
            states[value.name] = State(fact, 0, When.LOOP)
    # 3. Ops of both traces in order, side by side: op i of the one is op i of the other.
    kept = {*part.outputs, *known}
    read_once = {name for name, ops in readers_of(part).items() if len(ops) == 1} - kept
    whens: list[When] = []
    phases: list[int] = []
    sums: dict[str, Fact] = {}
    reentries: list[Reentry] = []
    for i, (one, own) in enumerate(zip(whole.ops, part.ops, strict=True)):
        read = {name: states[name] for name in own.value_operands}
        # A sum that is only laid out anew is added up as it comes out: a product is written in any
        # order, while a whole sum, laid out anew once a step, is there twice.
        moved = _moved_sum(own, sums, read_once)
        if moved is not None:
            states[moved] = State(sums[moved], states[moved].phase - 1, When.LOOP)
            read = {moved: states[moved]}
        loops = _stays_in_loop(list(read.values()), own) or transfer.touches_rows(one, own)
        # phase(op) = max over its operands; what a loop leaves to an op outside of it is complete
        # one phase later.
        phase = max(
            (s.phase + (s.when is When.LOOP and not loops) for s in read.values()), default=0
        )
        when = When.LOOP if loops else When.ONCE if phase else When.FREE
        whens.append(when)
        phases.append(phase)
        # The facts of its results. Outside of loops it matters of a value only if it is zero.
        facts: Sequence[Fact] = ()
        if moved is not None:
            facts = (sums.pop(moved),)
        elif loops or not one.graphs:
            given = [_operand_fact(o, states, part, loops=loops) for o in own.operands]
            facts = transfer.op(one, own, given, (whole, part))
        # A completed sum of an earlier pass is read in a loop: a re-entry.
        if loops and i in live:
            for name, state in read.items():
                if state.when is When.ONCE and state.phase:
                    reentries.append(Reentry(name, i))
            for call in filter(is_opaque, one.host_calls):
                text = f"{describe(call)} is called in the loop over microbatches"
                transfer.fault(Why.CALLED, text)
        # phase(sum over rows) = 1 + phase(op); when its loop ends it is replicated.
        for value, fact in zip(own.results, facts or (REPLICATED,) * len(own.results), strict=True):
            is_sum = fact.share is Share.PARTIAL
            if is_sum:
                sums[value.name] = fact
            if value.name in known:
                states[value.name] = State(REPLICATED)
            elif is_sum:
                states[value.name] = State(REPLICATED, phase + 1, When.ONCE)
            else:
                states[value.name] = State(fact, phase, when)
    return Phases(
        whole, part, frozenset(live), tuple(whens), tuple(phases), states, sums, tuple(reentries)
    )


def _moved_sum(op: Op, sums: Collection[str], read_once: Collection[str]) -> str | None:
    """The sum over rows of which an op makes the same numbers in another order or shape."""
    given = op.operands[0] if op.kind in _LAYOUTS else None
    return given if isinstance(given, str) and given in sums and given in read_once else None


def _operand_fact(
    operand: Operand, states: Mapping[str, State], graph: Graph, *, loops: bool
) -> Fact:
    """The fact of an operand as an op in a loop sees it, or else one outside of loops."""
    if isinstance(operand, Literal):
        return literal_fact(operand)
    state = states[operand]
    if not loops:
        return Fact(zero=state.fact.zero)
    if state.when is not When.ONCE:
        return state.fact
    # A completed value is replicated. A completed scalar starts as a multiple of itself: R2 asks
    # what stays proportional to it.
    value = graph.values[operand]
    is_scalar = not value.shape and value.is_floating
    return Fact(multiple_of=frozenset([operand] if is_scalar else ()))


def _stays_in_loop(found: Sequence[State], part: Op) -> bool:
    """True if an op that reads these runs in the loop that makes them.

    A value that a loop leaves as it is, such as a weight that passed the fence of a remat, is
    read on within it, unless the op also reads a value that is complete only later.
    """
    if any(s.fact.differs for s in found):
        return True
    # It reads a value that loop k left; it runs on in loop k unless another operand completes
    # later.
    left = [s.phase for s in found if s.when is When.LOOP]
    complete = max((s.phase for s in found if s.when is When.ONCE), default=0)
    return bool(left and part.results) and max(left) >= complete


def parameter_free_values(graph: Graph, whole: Graph, known: Collection[str]) -> frozenset[str]:
    """Values made of the batch alone, or of keys and counters: no parameter is in them.

    A closed-over matrix in floating point counts as a parameter.
    """
    given = {i.value.name: i.value for i in whole.inputs}
    found = set(known)
    for item in graph.inputs:
        value, one = item.value, given.get(item.value.name)
        has_rows = one is None or one.shape != value.shape
        is_vector = item.role is not Role.STATE and len(value.shape) <= 1
        if has_rows or not value.is_floating or is_vector:
            found.add(value.name)
    for op in graph.ops:
        # A fence hands on each operand by itself.
        if op.kind == "optimization_barrier":
            for operand, value in zip(op.operands, op.results, strict=True):
                if isinstance(operand, Literal) or operand in found:
                    found.add(value.name)
        elif not op.host_calls and all(n in found for n in op.value_operands):
            found.update(v.name for v in op.results)
    return frozenset(found)


# -- R1: sums over the whole batch before the loop -------------------------------------------


def hoist_sums(transfer: TransferFunctions) -> tuple[Phases, tuple[str, ...]]:
    """Analyse phases, hoisting sums until none is left to hoist; gives back the hoisted values.

    A re-entry is hoisted if no parameter is in the sums that it is made of: a mask's count, a
    number of tokens, the mean of the inputs.
    """
    # Each turn hoists all sums that can be, so that others behind them may follow: the mean, then
    # the variance about it.
    known: tuple[str, ...] = ()
    while True:
        phases = analyze_phases(transfer, known)
        parameter_free = parameter_free_values(phases.graph, transfer.graphs.whole, known)
        found: set[str] = set()
        for value in dict.fromkeys(r.value for r in phases.reentries):
            sums = phases.sums_behind(value)
            if sums <= parameter_free:
                found |= sums
        if not found:
            return phases, known
        order = phases.makers
        known = tuple(sorted({*known, *found}, key=lambda name: (order[name], name)))


def hoist_graph(whole: Graph, values: tuple[str, ...]) -> Hoist | None:
    """The ops of the whole batch's step that make these values; None where there are none."""
    if not values:
        return None
    needed, ops = set(values), list[int]()
    # The slice of the step that the hoisted values need, backwards.
    for i in range(len(whole.ops) - 1, -1, -1):
        op = whole.ops[i]
        if any(v.name in needed for v in op.results):
            ops.append(i)
            needed.update(op.value_operands)
    ops.reverse()
    inputs = tuple(i for i in whole.inputs if i.value.name in needed)
    graph = Graph(f"{whole.name}_hoist", inputs, tuple(whole.ops[i] for i in ops), values)
    return Hoist(graph, values, tuple(ops))


# -- loops of ops, accumulators, and values that cross loops ---------------------------------


# Sums in these are rounded at each addition, so they are added up in f32.
_NARROW = ("bf16", "f16")
_ONCE = -1  # stands among the loops that read a value for the ops that run once


@dataclass(frozen=True)
class Placement:
    """Moments of all ops, accumulators, and what a later loop reads of each microbatch."""

    moments: tuple[Moment, ...]
    accumulators: tuple[Accumulator, ...]
    crossing: tuple[str, ...]


def place_ops(phases: Phases, parameter_free: Collection[str]) -> Placement:
    """Place every op in the loop of its readers, and in several loops if it is cheap.

    Ops are met in reverse, so that each knows the loops of its readers. An op that must run in one
    loop but is read in a later one has values that cross: R6 does not hold.
    """
    graph = phases.graph
    cheap = _cheap_ops(phases, parameter_free)
    wanted: dict[str, set[int]] = defaultdict(set)
    moments: list[Moment] = [FREE] * len(graph.ops)
    crossing: list[str] = []
    for i in range(len(graph.ops) - 1, -1, -1):
        op, phase = graph.ops[i], phases.phases[i]
        if phases.whens[i] is When.ONCE:
            moments[i] = Moment(When.ONCE, (phase - 1,))
            if i in phases.live:
                for name in op.value_operands:
                    wanted[name].add(_ONCE)
        if phases.whens[i] is not When.LOOP:
            continue
        # The loops of its readers, and its own if it is summed or read once.
        readers = set[int]().union(*(wanted[v.name] for v in op.results))
        loops = sorted(_own_loops(phases, i, readers))
        # Too costly for several loops: it runs in the first, and its values cross to the later
        # ones.
        if len(loops) > 1 and i not in cheap:
            crossing += [
                v.name
                for v in op.results
                if phases.states[v.name].fact.differs and v.name not in phases.sums
                if any(k > loops[0] for k in wanted[v.name])
            ]
            loops = loops[:1]
        moments[i] = Moment(When.LOOP, tuple(loops))
        if i in phases.live:
            for name in op.value_operands:
                wanted[name].update(loops)
    accumulators = tuple(_accumulators(phases, moments, wanted))
    return Placement(tuple(moments), accumulators, tuple(crossing))


def _own_loops(phases: Phases, op: int, readers: Collection[int]) -> set[int]:
    """The loops that an op must run in: those that read it, and the one that adds it up."""
    results = phases.graph.ops[op].results
    added = [v.name in phases.sums for v in results]
    # A sum is added up in the loop of its phase, wherever it is read.
    alone = bool(added) and all(added)
    loops = {k for k in readers if k != _ONCE and not alone}
    if any(added) or _ONCE in readers or not loops:
        loops.add(min(phases.phases[op], phases.loops - 1))
    return loops


def _cheap_ops(phases: Phases, parameter_free: Collection[str]) -> frozenset[int]:
    """Ops that any loop may run again: no parameter is in them, or nothing of the batch."""
    cheap: set[int] = set()
    costly = set[str]()
    for i, op in enumerate(phases.graph.ops):
        if phases.whens[i] is not When.LOOP:
            continue
        operands = op.value_operands
        # Cheap: made of nothing of the batch (a mask, random bits), or of the batch without
        # parameters.
        is_source = not any(phases.states[n].fact.differs for n in operands)
        is_bare = all(v.name in parameter_free for v in op.results)
        if (is_source or is_bare) and costly.isdisjoint(operands) and not op.graphs:
            cheap.add(i)
        else:
            costly.update(v.name for v in op.results if phases.states[v.name].fact.differs)
    return frozenset(cheap)


def _accumulators(
    phases: Phases, moments: list[Moment], wanted: Mapping[str, Collection[int]]
) -> Iterator[Accumulator]:
    """Results that are read after the loop that makes them."""
    graph = phases.graph
    returned = {o for o in graph.outputs if isinstance(o, str)}
    for i in filter(phases.runs_in_loop, sorted(phases.live)):
        loops = moments[i].loops
        for value in graph.ops[i].results:
            readers, total = wanted.get(value.name, ()), phases.sums.get(value.name)
            # A sum over rows, added up over the microbatches by its combiner.
            if total is not None and (readers or value.name in returned):
                rounds = total.combiner in ("sum", "mul") and value.dtype in _NARROW
                held_in = "f32" if rounds else ""
                yield Accumulator(value.name, phases.phases[i], total.combiner, held_in)
            # A value that is the same in every microbatch, but made in the loop: any one's is
            # taken.
            elif total is None and phases.states[value.name].fact.share is Share.REPLICATED:
                if value.name in returned or any(k not in loops for k in readers):
                    yield Accumulator(value.name, loops[0], "same")


def readers_of(graph: Graph) -> dict[str, list[int]]:
    """Value name -> the ops that read it, in order."""
    readers: dict[str, list[int]] = defaultdict(list)
    for i, op in enumerate(graph.ops):
        for name in dict.fromkeys(op.value_operands):
            readers[name].append(i)
    return readers


# -- R2: sums that only scale accumulators ---------------------------------------------------


def find_rescales(
    transfer: TransferFunctions,
    phases: Phases,
    known: tuple[str, ...],
    accumulators: tuple[Accumulator, ...],
) -> tuple[Rescale, ...]:
    """The rewritings that save loops: the derivative of the log of a mean, a loss's own scale.

    A scalar qualifies where every accumulator that it reaches is its multiple, and no value that
    the loops hand out by rows or as they are depends on it.
    """
    handed = set(phases.graph.outputs)
    scalars = dict.fromkeys(r.value for r in phases.reentries)
    sums = {a.value: phases.sums[a.value] for a in accumulators if a.value in phases.sums}
    others = [phases.states[a.value].fact for a in accumulators if a.value not in phases.sums]
    others += [phases.states[o].fact for o in handed if isinstance(o, str) and o not in sums]
    found: list[Rescale] = []
    for scalar in scalars:
        # Each accumulator that the scalar reaches must be its multiple, and no other output may see
        # it.
        reached = tuple(name for name, fact in sums.items() if scalar in fact.scalars)
        clean = all(scalar in sums[name].multiple_of for name in reached)
        if reached and clean and not any(scalar in f.scalars for f in others):
            found.append(Rescale(scalar, reached))
    if not found:
        return ()
    # Worth it only if the step then needs fewer passes.
    saved = analyze_phases(transfer, (*known, *(r.value for r in found)))
    return tuple(found) if saved.loops < phases.loops else ()
