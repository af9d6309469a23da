"""How often each op runs, and after how many passes over the microbatches its operands are known.

The phase of an input is 0; a result that combines rows of the batch has one more than the op that
makes it; any other result has the largest of its op's operands. Ops of phase k run in loop k, or
once after loop k - 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.batching import Rows, When
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.values import Input, Literal, Role, Value
from autopar.passes.batch.along import is_opaque
from autopar.passes.batch.facts import SAME, Fact, Share, Why, described, literal_fact
from autopar.passes.batch.spread import Spread


@dataclass(frozen=True)
class State:
    """A value as the ops after it find it."""

    fact: Fact
    phase: int = 0
    when: When = When.FREE  # ONCE: it is complete when loop `phase - 1` has ended


@dataclass(frozen=True)
class Reentry:
    """A value of the whole batch that an op reads in a loop."""

    value: str
    op: int


@dataclass(frozen=True)
class Phases:
    """When every op can run at the earliest; `sums` are the results that combine rows."""

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
        """How often the microbatches must be gone through."""
        looping = (p for i, p in enumerate(self.phases) if self.runs_in_loop(i))
        return 1 + max(looping, default=0)

    @cached_property
    def makers(self) -> Mapping[str, int]:
        """Value name -> the op that makes it."""
        return {v.name: i for i, op in enumerate(self.graph.ops) for v in op.results}

    def runs_in_loop(self, op: int) -> bool:
        """Whether a live op runs for each microbatch."""
        return op in self.live and self.whens[op] is When.LOOP

    def is_between_passes(self, reentry: Reentry) -> bool:
        """Whether forward ops alone make a statistic, and others read it."""
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


def read_phases(spread: Spread, known: Collection[str] = ()) -> Phases:
    """The phases of a step in which the values `known` are there from the start."""
    reader = _Reader(spread, frozenset(known))
    part, whole = spread.graphs.part, spread.graphs.whole
    live = live_ops(part, known)
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


def live_ops(graph: Graph, known: Collection[str] = ()) -> frozenset[int]:
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
    spread: Spread
    known: frozenset[str]
    whens: list[When] = field(default_factory=list[When])
    phases: list[int] = field(default_factory=list[int])
    states: dict[str, State] = field(default_factory=dict[str, State])
    sums: dict[str, Fact] = field(default_factory=dict[str, Fact])
    reentries: list[Reentry] = field(default_factory=list[Reentry])

    def __post_init__(self) -> None:
        graphs = self.spread.graphs
        given = {i.value.name: i.value for i in graphs.whole.inputs}
        for i in graphs.part.inputs:
            name = i.value.name
            if name == graphs.index:
                self.states[name] = State(Fact(Share.OWN), 0, When.LOOP)
            else:
                self.states[name] = self._input(given[name], i.value)

    def _input(self, whole: Value, part: Value) -> State:
        dim = self.spread.rows_dim(whole, part)
        if dim is None:
            return State(SAME)
        items = self.spread.cut.items_per_row(whole, part, dim)
        return State(Fact(Share.ROWS, Rows(dim, 1, max(items, 1))), 0, When.LOOP)

    def read(self, place: int, whole: Op, part: Op, *, is_live: bool) -> None:
        """Take in one op of the two traces."""
        found = [self.states[n] for n in part.value_operands()]
        loops = _goes_on(found, part) or self.spread.touches_rows(whole, part)
        phase = max((_known_at(s, loops) for s in found), default=0)
        scopes = self.spread.graphs.whole, self.spread.graphs.part
        if loops:
            given = tuple(self._in_loop(o) for o in part.operands)
            facts = self.spread.op(whole, part, given, scopes)
            if is_live:
                self._note_reentries(place, part)
                self._note_calls(whole)
        else:
            given = tuple(self._outside(o) for o in part.operands)
            facts = () if whole.graphs else self.spread.op(whole, part, given, scopes)
            facts = tuple(facts) or (SAME,) * len(part.results)
        self.whens.append(When.LOOP if loops else When.ONCE if phase else When.FREE)
        self.phases.append(phase)
        for value, fact in zip(part.results, facts, strict=True):
            self.states[value.name] = self._result(value.name, fact, phase, loops=loops)

    def _result(self, name: str, fact: Fact, phase: int, *, loops: bool) -> State:
        if fact.share is Share.PART:
            self.sums[name] = fact
            if name not in self.known:
                return State(SAME, phase + 1, When.ONCE)
        if name in self.known:
            return State(SAME)
        return State(fact, phase, When.LOOP if loops else When.ONCE if phase else When.FREE)

    def _in_loop(self, operand: Operand) -> Fact:
        """What an op in a loop sees of an operand: what is complete is the same everywhere."""
        if isinstance(operand, Literal):
            return literal_fact(operand)
        state = self.states[operand]
        if state.when is not When.ONCE:
            return state.fact
        value = self.spread.graphs.part.values[operand]
        is_scalar = not value.shape and value.is_floating
        return Fact(multiple_of=frozenset([operand] if is_scalar else ()))

    def _outside(self, operand: Operand) -> Fact:
        """What an op outside of loops sees of an operand."""
        if isinstance(operand, Literal):
            return literal_fact(operand)
        return Fact(zero=self.states[operand].fact.zero)

    def _note_calls(self, op: Op) -> None:
        for call in filter(is_opaque, op.host_calls):
            text = f"{described(call)} is called in the loop over microbatches"
            self.spread.fault(Why.CALLED, text)

    def _note_reentries(self, place: int, part: Op) -> None:
        for name in dict.fromkeys(part.value_operands()):
            state = self.states[name]
            if state.when is When.ONCE and state.phase:
                self.reentries.append(Reentry(name, place))


def _goes_on(found: Sequence[State], part: Op) -> bool:
    """Whether an op that reads these runs in the loop that makes them.

    What a loop leaves as it is, such as a weight that passed the barrier of a recomputation, is
    read on within it, unless something is read as well that is complete only later.
    """
    if any(s.fact.is_own for s in found):
        return True
    left = [s.phase for s in found if s.when is When.LOOP]
    complete = max((s.phase for s in found if s.when is When.ONCE), default=0)
    return bool(left and part.results) and max(left) >= complete


def _known_at(state: State, loops: bool) -> int:
    """The phase of an op that reads this: what a loop leaves as it is, is there when it ends."""
    left = state.when is When.LOOP and not loops
    return state.phase + 1 if left else state.phase


def bare_values(graph: Graph, whole: Graph, known: Collection[str]) -> frozenset[str]:
    """Values made of the batch alone, or of keys and counters: no parameter is in them.

    A closed-over matrix in floating point counts as a parameter.
    """
    given = {i.value.name: i.value for i in whole.inputs}
    bare = {n.value.name for n in graph.inputs if _is_bare(n, given.get(n.value.name))}
    bare.update(known)
    for op in graph.ops:
        bare.update(_bare_results(op, bare))
    return frozenset(bare)


def _is_bare(item: Input, whole: Value | None) -> bool:
    value = item.value
    if whole is None or whole.shape != value.shape or not value.is_floating:
        return True
    return item.role is not Role.STATE and len(value.shape) <= 1


def _bare_results(op: Op, bare: Collection[str]) -> Iterator[str]:
    if op.kind == "optimization_barrier":
        for operand, value in zip(op.operands, op.results, strict=True):
            if isinstance(operand, Literal) or operand in bare:
                yield value.name
    elif not op.host_calls and all(n in bare for n in op.value_operands()):
        yield from (v.name for v in op.results)
