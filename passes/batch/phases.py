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
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.batching import FREE, Accumulator, Hoist, Moment, Rescale, Rows, When
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.values import Input, Literal, Role, Value
from autopar.passes.batch.dim_propagation import is_opaque
from autopar.passes.batch.lattice import REPLICATED, Fact, Share, literal_fact
from autopar.passes.batch.refuse import Why, describe
from autopar.passes.batch.transfer import TransferFunctions


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
                for operand in self.graph.ops[makers[name]].value_operands():
                    if operand not in seen:
                        seen.add(operand)
                        left.append(operand)
        return frozenset(found)


def analyze_phases(transfer: TransferFunctions, known: Collection[str] = ()) -> Phases:
    """The phases of a step in which the values `known` are there from the start."""
    reader = _Reader(transfer, frozenset(known))
    part, whole = transfer.graphs.part, transfer.graphs.whole
    live = _live_ops(part, known)
    # Ops of both traces are read in order, side by side: op i of the one is op i of the other.
    for i, (one, own) in enumerate(zip(whole.ops, part.ops, strict=True)):
        reader.read(i, one, own, is_live=i in live)
    return Phases(
        whole,
        part,
        live,
        tuple(reader.whens),
        tuple(reader.phases),
        reader.states,
        reader.sums,
        tuple(reader.reentries),
    )


def _live_ops(graph: Graph, known: Collection[str] = ()) -> frozenset[int]:
    """Ops that an output or an effect needs, where `known` values need no op."""
    needed = {o for o in graph.outputs if isinstance(o, str)} - set(known)
    live: set[int] = set()
    for i in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[i]
        if op.acts or any(v.name in needed for v in op.results):
            live.add(i)
            needed.update(set(op.value_operands()) - set(known))
    return frozenset(live)


@dataclass
class _Reader:
    transfer: TransferFunctions
    known: frozenset[str]
    whens: list[When] = field(default_factory=list[When])
    phases: list[int] = field(default_factory=list[int])
    states: dict[str, State] = field(default_factory=dict[str, State])
    sums: dict[str, Fact] = field(default_factory=dict[str, Fact])
    reentries: list[Reentry] = field(default_factory=list[Reentry])

    def __post_init__(self) -> None:
        graphs = self.transfer.graphs
        given = {i.value.name: i.value for i in graphs.whole.inputs}
        for i in graphs.part.inputs:
            name = i.value.name
            # The number of a microbatch is local; inputs with rows are sharded; the rest is
            # replicated.
            if name == graphs.index:
                self.states[name] = State(Fact(Share.LOCAL), 0, When.LOOP)
            else:
                self.states[name] = self._input(given[name], i.value)

    def _input(self, whole: Value, part: Value) -> State:
        dim = self.transfer.rows_dim(whole, part)
        if dim is None:
            return State(REPLICATED)
        items = self.transfer.cut.items_per_row(whole, part, dim)
        return State(Fact(Share.SHARDED, Rows(dim, 1, max(items, 1))), 0, When.LOOP)

    def read(self, place: int, whole: Op, part: Op, *, is_live: bool) -> None:
        """Take in one op of the two traces."""
        found = [self.states[n] for n in part.value_operands()]
        loops = _stays_in_loop(found, part) or self.transfer.touches_rows(whole, part)
        # phase(op) = max over its operands
        phase = max((_phase_of_reader(s, loops) for s in found), default=0)
        scopes = self.transfer.graphs.whole, self.transfer.graphs.part
        if loops:
            given = tuple(self._in_loop(o) for o in part.operands)
            facts = self.transfer.op(whole, part, given, scopes)
            if is_live:
                self._note_reentries(place, part)
                self._note_calls(whole)
        else:
            given = tuple(self._outside(o) for o in part.operands)
            facts = () if whole.graphs else self.transfer.op(whole, part, given, scopes)
            facts = tuple(facts) or (REPLICATED,) * len(part.results)
        self.whens.append(When.LOOP if loops else When.ONCE if phase else When.FREE)
        self.phases.append(phase)
        for value, fact in zip(part.results, facts, strict=True):
            self.states[value.name] = self._result(value.name, fact, phase, loops=loops)

    def _result(self, name: str, fact: Fact, phase: int, *, loops: bool) -> State:
        # phase(sum over rows) = 1 + phase(op); when its loop ends it is replicated.
        if fact.share is Share.PARTIAL:
            self.sums[name] = fact
            if name not in self.known:
                return State(REPLICATED, phase + 1, When.ONCE)
        if name in self.known:
            return State(REPLICATED)
        return State(fact, phase, When.LOOP if loops else When.ONCE if phase else When.FREE)

    def _in_loop(self, operand: Operand) -> Fact:
        """The fact of an operand as an op in a loop sees it: a completed value is replicated."""
        if isinstance(operand, Literal):
            return literal_fact(operand)
        state = self.states[operand]
        if state.when is not When.ONCE:
            return state.fact
        value = self.transfer.graphs.part.values[operand]
        # A completed scalar starts as a multiple of itself: R2 asks what stays proportional to it.
        is_scalar = not value.shape and value.is_floating
        return Fact(multiple_of=frozenset([operand] if is_scalar else ()))

    def _outside(self, operand: Operand) -> Fact:
        """The fact of an operand as an op outside of loops sees it."""
        if isinstance(operand, Literal):
            return literal_fact(operand)
        return Fact(zero=self.states[operand].fact.zero)

    def _note_calls(self, op: Op) -> None:
        for call in filter(is_opaque, op.host_calls):
            text = f"{describe(call)} is called in the loop over microbatches"
            self.transfer.fault(Why.CALLED, text)

    def _note_reentries(self, place: int, part: Op) -> None:
        for name in dict.fromkeys(part.value_operands()):
            state = self.states[name]
            # A completed sum of an earlier pass is read in a loop: a re-entry.
            if state.when is When.ONCE and state.phase:
                self.reentries.append(Reentry(name, place))


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


def _phase_of_reader(state: State, loops: bool) -> int:
    """The phase of an op that reads this; after the loop, if the op is outside of it."""
    left = state.when is When.LOOP and not loops
    return state.phase + 1 if left else state.phase


def parameter_free_values(graph: Graph, whole: Graph, known: Collection[str]) -> frozenset[str]:
    """Values made of the batch alone, or of keys and counters: no parameter is in them.

    A closed-over matrix in floating point counts as a parameter.
    """
    given = {i.value.name: i.value for i in whole.inputs}
    parameter_free = {
        n.value.name for n in graph.inputs if _is_parameter_free(n, given.get(n.value.name))
    }
    parameter_free.update(known)
    for op in graph.ops:
        parameter_free.update(_parameter_free_results(op, parameter_free))
    return frozenset(parameter_free)


def _is_parameter_free(item: Input, whole: Value | None) -> bool:
    value = item.value
    if whole is None or whole.shape != value.shape or not value.is_floating:
        return True
    return item.role is not Role.STATE and len(value.shape) <= 1


def _parameter_free_results(op: Op, parameter_free: Collection[str]) -> Iterator[str]:
    if op.kind == "optimization_barrier":
        for operand, value in zip(op.operands, op.results, strict=True):
            if isinstance(operand, Literal) or operand in parameter_free:
                yield value.name
    elif not op.host_calls and all(n in parameter_free for n in op.value_operands()):
        yield from (v.name for v in op.results)


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
        found = _hoistable_sums(phases, parameter_free)
        if not found:
            return phases, known
        order = phases.makers
        known = tuple(sorted({*known, *found}, key=lambda name: (order[name], name)))


def _hoistable_sums(phases: Phases, parameter_free: Collection[str]) -> frozenset[str]:
    found: set[str] = set()
    for value in dict.fromkeys(r.value for r in phases.reentries):
        sums = phases.sums_behind(value)
        if sums and all(name in parameter_free for name in sums):
            found |= sums
    return frozenset(found)


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
            needed.update(op.value_operands())
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
                for name in op.value_operands():
                    wanted[name].add(_ONCE)
        if phases.whens[i] is not When.LOOP:
            continue
        # The loops of its readers, and its own if it is summed or read once.
        readers = set[int]().union(*(wanted[v.name] for v in op.results))
        loops = sorted(_own_loops(phases, i, readers))
        # Too costly for several loops: it runs in the first, and its values cross to the later
        # ones.
        if len(loops) > 1 and i not in cheap:
            crossing += [v.name for v in op.results if _crosses(phases, v, wanted[v.name], loops)]
            loops = loops[:1]
        moments[i] = Moment(When.LOOP, tuple(loops))
        if i in phases.live:
            for name in op.value_operands():
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


def _crosses(phases: Phases, value: Value, readers: Collection[int], loops: list[int]) -> bool:
    """True if a later loop reads a value that an earlier one left for each microbatch."""
    own = phases.states[value.name].fact.differs and value.name not in phases.sums
    return own and any(k > loops[0] for k in readers)


def _cheap_ops(phases: Phases, parameter_free: Collection[str]) -> frozenset[int]:
    """Ops that any loop may run again: no parameter is in them, or nothing of the batch."""
    cheap: set[int] = set()
    costly = set[str]()
    for i, op in enumerate(phases.graph.ops):
        if phases.whens[i] is not When.LOOP:
            continue
        operands = op.value_operands()
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
                held = _held_in(value, total.combiner)
                yield Accumulator(value.name, phases.phases[i], total.combiner, held)
            # A value that is the same in every microbatch, but made in the loop: any one's is
            # taken.
            elif total is None and phases.states[value.name].fact.share is Share.REPLICATED:
                if value.name in returned or any(k not in loops for k in readers):
                    yield Accumulator(value.name, loops[0], "same")


def _held_in(value: Value, combiner: str) -> str:
    return "f32" if combiner in ("sum", "mul") and value.dtype in _NARROW else ""


def readers_of(graph: Graph) -> dict[str, list[int]]:
    """Value name -> the ops that read it, in order."""
    readers: dict[str, list[int]] = defaultdict(list)
    for i, op in enumerate(graph.ops):
        for name in dict.fromkeys(op.value_operands()):
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
