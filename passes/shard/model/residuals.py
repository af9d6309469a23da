"""Reads a sharded step for recomputation: what waits for the backward pass, and what that holds.

Positions are those of the step's ops. A value in the body of a forward scan that one backward
scan takes slices of weighs its bytes times the trips while it waits, and once where it is made
again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.control_flow import PortKind
from autopar.ir.graph import Graph, Op, Operand
from autopar.passes.shard.model.costs import LocalCosts, is_elementwise
from autopar.passes.shard.model.recompute import Kept, Repeat, Tradeoff

# Ops that are not repeated: they act on the world, or their own bodies are remat already.
_ONCE = ("callback", "infeed", "outfeed", "rng_uniform", "remat2", "checkpoint", "while")


@dataclass(frozen=True)
class _Pair:
    """A forward scan and the one backward scan over what it stacked, by position."""

    forward: int
    backward: int
    length: int
    stacked: Mapping[str, str]  # result of the forward scan -> the value of its body


@dataclass(frozen=True)
class _Brought:
    """Bytes that a backward scan no longer reads, and those that it holds instead."""

    dropped: frozenset[str]
    stacks: Mapping[str, float]
    reads: tuple[str, ...]
    inside: float


@dataclass(frozen=True)
class OpMemory:
    """An op as memory sees it: its results, its region if it is fused, its bodies' bytes."""

    reads: tuple[str, ...]
    makes: tuple[tuple[str, float], ...]
    fuses: str
    inside: float


class Residuals:
    """A step with what could be kept or made again in it."""

    def __init__(self, graph: Graph, costs: LocalCosts) -> None:
        self.graph, self._costs = graph, costs
        self._pairs = {p.forward: p for p in _pairs(graph)}
        self._readers = _readers(graph)
        self._outer: dict[str, Operand] = {}  # constants and slices of paired bodies
        self._position: dict[str, int] = {}
        self._trips: dict[str, int] = {}
        self._repeatable: dict[str, Op] = {}
        for at, op in enumerate(graph.ops):
            if op.origin.region == "forward":
                self._meet(at, op, 1)

    def _meet(self, at: int, op: Op, trips: int) -> None:
        """Note an op of the forward pass, or of a paired scan's body."""
        self._position.update((r.name, at) for r in op.results)
        self._trips.update((r.name, trips) for r in op.results)
        pair = self._pairs.get(at) if trips == 1 else None
        if pair is None:
            kinds = {op.kind, *(inner.kind for g in op.graphs for inner in g.walk())}
            if not any(word in kind for kind in kinds for word in _ONCE):
                self._repeatable.update((r.name, op) for r in op.results)
            return
        body, flow = op.graphs[0], op.control_flow
        assert flow is not None
        for given, port in zip(body.inputs, flow.inputs[0], strict=True):
            self._position[given.value.name] = at
            self._trips[given.value.name] = pair.length
            if port.operand is not None and not port.is_carry:
                self._outer[given.value.name] = op.operands[port.operand]
        for inner in body.ops:
            self._meet(at, inner, pair.length)

    # -- the choice ------------------------------------------------------------------------

    @cached_property
    def tradeoff(self) -> Tradeoff:
        """Values that may be kept, ops that may be repeated."""
        needed, free = self._needed, self._free
        names = [n for n in self._position if n not in free and n not in self._outer]
        numbers = {n: i for i, n in enumerate(names)}
        ops: dict[str, int] = {}
        repeats: list[Repeat] = []
        for name in names:
            op = self._repeatable.get(name)
            if op is not None and op.results[0].name not in ops:
                ops[op.results[0].name] = len(repeats)
                reads = {self._source(o) for o in op.value_operands()}
                held = tuple(sorted(numbers[r] for r in reads if r in numbers))
                made = tuple(r.name for r in op.results)
                repeats.append(Repeat(made, self._seconds(op), held))
        kept = tuple(
            Kept(
                n,
                self._waiting_bytes(n),
                n in needed,
                ops[self._repeatable[n].results[0].name] if n in self._repeatable else -1,
                self._position[n],
            )
            for n in names
        )
        return Tradeoff(kept, tuple(repeats))

    def _seconds(self, op: Op) -> float:
        """Seconds of a second run; a value that only the backward pass reads is merely moved."""
        name = op.results[0].name
        once = self._costs.seconds.get(name, 0.0)
        return once * self._trips[name]

    def _waiting_bytes(self, name: str) -> float:
        """Bytes of keeping a value: none if the peak has passed when it is first read."""
        if name in self._needed and self._last_chance(name) <= self._peak_position:
            return 0.0
        return self._stacked.get(name, self._nbytes(name) * self._trips[name])

    def _last_chance(self, name: str) -> int:
        """The last op during which a value that is needed only waits, if it is made again."""
        pair = self._pairs.get(self._position[name])
        if pair is not None and name not in self.graph.values:
            return pair.backward + 1
        readers = self._readers.get(name, ())
        return min(i for i in readers if self.graph.ops[i].origin.region == "backward")

    @cached_property
    def _peak_position(self) -> int:
        """The op at which most is held while nothing is repeated."""
        outputs = {o for o in self.graph.outputs if isinstance(o, str)}
        _, when = most_held(list(self._schedule(set())), outputs - self._in_place)
        return when

    @cached_property
    def _stacked(self) -> Mapping[str, float]:
        """Bytes of what paired scans stack, by the value of the body that it is."""
        return {v: self._nbytes(r) for p in self._pairs.values() for r, v in p.stacked.items()}

    def _nbytes(self, name: str) -> float:
        return self._costs.nbytes.get(name, 0.0)

    def _source(self, name: str) -> str:
        """A constant or slice of a paired scan's body is a value outside."""
        while name in self._outer:
            operand = self._outer[name]
            if not isinstance(operand, str):
                return ""
            name = operand
        return name

    @cached_property
    def _needed(self) -> frozenset[str]:
        """The values that the backward pass reads, in the body for what paired scans stacked."""
        found: set[str] = set()
        for name, readers in self._readers.items():
            if not any(self.graph.ops[i].origin.region == "backward" for i in readers):
                continue
            pair = self._pairs.get(self._position.get(name, -1))
            inner = pair.stacked.get(name) if pair is not None else None
            found.add(self._source(inner) if inner is not None else name)
        return frozenset(found)

    @cached_property
    def _free(self) -> frozenset[str]:
        """The values that are there anyway: arguments, outputs, stacks of other readers."""
        graph = self.graph
        found = {i.value.name for i in graph.inputs}
        found.update(o for o in graph.outputs if isinstance(o, str))
        updates = (op for op in graph.ops if op.origin.region == "update")
        found.update(o for op in updates for o in op.value_operands())
        for pair in self._pairs.values():
            for result, inner in pair.stacked.items():
                shared = any(i != pair.backward for i in self._readers[result])
                found.update({inner} if shared or result in found else ())
            found.update(pair.stacked)
        return frozenset(found)

    # -- what is held ----------------------------------------------------------------------

    def peak(self, again: frozenset[int]) -> float:
        """The most bytes held at once beside the arguments, if these ops are repeated."""
        chosen = {n for o in again for n in self.tradeoff.repeats[o].names}
        outputs = {o for o in self.graph.outputs if isinstance(o, str)}
        return most_held(list(self._schedule(chosen)), outputs - self._in_place)[0]

    def _schedule(self, chosen: set[str]) -> Iterator[OpMemory]:
        """The step as it runs with these values made again where backward ops first read them."""
        brought = {at: self._brought(pair, chosen) for at, pair in self._pairs.items()}
        entries = {self._pairs[at].backward: b for at, b in brought.items()}
        made: set[str] = set()
        for at, op in enumerate(self.graph.ops):
            reads = list(op.value_operands())
            inside = self._inside[at]
            if at in entries:
                reads = [r for r in reads if r not in entries[at].dropped]
                reads += entries[at].reads
                inside += entries[at].inside
            if op.origin.region == "backward":
                for step in self._steps_to(reads, chosen, made):
                    made.update(r.name for r in step.results)
                    yield self._held(step, step.value_operands(), made, "backward", 0.0)
                yield self._held(op, reads, made, "backward", inside)
            else:
                yield self._held(op, reads, set(), op.origin.region, inside)
            if at in brought and brought[at].stacks:
                yield OpMemory((), tuple(brought[at].stacks.items()), "", 0.0)

    def _held(
        self, op: Op, reads: Sequence[str], made: set[str], region: str, inside: float
    ) -> OpMemory:
        again = region == "backward"
        results = [r.name for r in op.results]
        nbytes = [0.0 if n in self._in_place else self._nbytes(n) for n in results]
        names = [f"{n}'" if n in made and again else n for n in results]
        return OpMemory(
            tuple(f"{r}'" if r in made and again else r for r in reads),
            tuple(zip(names, nbytes, strict=True)),
            region if is_elementwise(op) else "",
            inside,
        )

    def _steps_to(self, reads: Sequence[str], chosen: set[str], made: set[str]) -> list[Op]:
        found: dict[str, Op] = {}
        front = [r for r in reads if r in chosen and r not in made]
        while front:
            op = self._repeatable[front.pop()]
            if op.results[0].name not in found:
                found[op.results[0].name] = op
                front += [r for r in op.value_operands() if r in chosen and r not in made]
        return sorted(found.values(), key=lambda op: self._position[op.results[0].name])

    def _brought(self, pair: _Pair, chosen: set[str]) -> _Brought:
        """The inputs of a backward scan that makes chosen values of its partner's body."""
        body = self.graph.ops[pair.forward].graphs[0]
        stacked = set(pair.stacked.values())
        dropped = {r for r, v in pair.stacked.items() if self._source(v) in chosen - self._free}
        stacks: dict[str, float] = {}
        reads: list[str] = []
        inside = 0.0
        for op in body.ops:
            if op.results and op.results[0].name in chosen:
                if not is_elementwise(op):
                    inside += sum(self._nbytes(r.name) for r in op.results)
                for name in map(self._source, op.value_operands()):
                    if name in self.graph.values:
                        reads.append(name)
                    elif name and name not in chosen and name not in stacked:
                        stacks[f"{name}*"] = self._nbytes(name) * pair.length
        return _Brought(frozenset(dropped), stacks, (*reads, *stacks), inside)

    @cached_property
    def _in_place(self) -> frozenset[str]:
        """State that comes back takes the place of the state that went in."""
        returned = (self.graph.outputs[o] for o, _ in self.graph.donated)
        return frozenset(o for o in returned if isinstance(o, str))

    @cached_property
    def _inside(self) -> list[float]:
        """The most bytes that each op's bodies hold."""
        return [max((self._body_peak(g) for g in op.graphs), default=0.0) for op in self.graph.ops]

    def _body_peak(self, body: Graph) -> float:
        steps = [
            OpMemory(
                op.value_operands(),
                tuple((r.name, self._nbytes(r.name)) for r in op.results),
                op.origin.region if is_elementwise(op) else "",
                max((self._body_peak(g) for g in op.graphs), default=0.0),
            )
            for op in body.ops
        ]
        return most_held(steps, {o for o in body.outputs if isinstance(o, str)})[0]


def most_held(steps: Sequence[OpMemory], outputs: Collection[str]) -> tuple[float, int]:
    """The most bytes held at once, and at which step.

    What only element-wise work of its own region reads is fused and never held.
    """
    fuses: dict[str, str] = {n: s.fuses for s in steps for n, _ in s.makes}
    last = {r: at for at, s in enumerate(steps) for r in s.reads}
    last.update(dict.fromkeys(outputs, len(steps)))
    stored = {r for s in steps for r in s.reads if not s.fuses or fuses.get(r) != s.fuses}
    stored.update(outputs)
    dying: dict[int, float] = defaultdict(float)
    now = most = 0.0
    when = 0
    for at, step in enumerate(steps):
        for name, nbytes in step.makes:
            if name in stored and name in last:
                now += nbytes
                dying[last[name]] += nbytes
        if now + step.inside > most:
            most, when = now + step.inside, at
        now -= dying[at]
    return most, when


def _pairs(graph: Graph) -> Iterator[_Pair]:
    """Forward scans whose stacked results one backward scan of as many trips takes slices of."""
    stacks: dict[str, int] = {}
    partners: dict[int, set[int]] = defaultdict(set)
    for at, op in enumerate(graph.ops):
        flow = op.control_flow
        if flow is None:
            continue
        if op.origin.region == "forward":
            rows = flow.results_of(op.results, PortKind.STACKED)
            stacks.update((r.name, at) for r in rows)
        elif op.origin.region == "backward":
            for operand in flow.operands_of(op.operands, PortKind.SLICED):
                if isinstance(operand, str) and operand in stacks:
                    partners[stacks[operand]].add(at)
    for forward, found in partners.items():
        op, backward = graph.ops[forward], min(found)
        flow, other = op.control_flow, graph.ops[backward].control_flow
        assert flow is not None
        if len(found) > 1 or other is None or other.trips != flow.trips:
            continue
        stacked = {
            op.results[port.result].name: left
            for port, left in zip(flow.outputs[0], op.graphs[0].outputs, strict=True)
            if port.kind is PortKind.STACKED and port.result is not None and isinstance(left, str)
        }
        yield _Pair(forward, backward, flow.trips, stacked)


def _readers(graph: Graph) -> Mapping[str, Sequence[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for at, op in enumerate(graph.ops):
        for operand in op.value_operands():
            found[operand].append(at)
    return found
