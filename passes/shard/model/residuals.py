"""Reads a sharded step for recomputation: what waits for the backward pass, and what that holds.

What may be kept is what lies in memory, by the kernels of the listing: work that is fused into its
readers is repeated with them. Positions are those of the step's ops. A value in the body of a
forward scan that one backward scan takes slices of weighs its bytes times the trips while it waits,
and once where it is made again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from autopar.cost.kernels import Pieces
from autopar.cost.liveness import Moment
from autopar.cost.memory import StepKernels, step_kernels
from autopar.cost.ops import is_fused_into_readers
from autopar.cost.prices import Prices, elementwise_seconds
from autopar.cost.sizes import Sizes
from autopar.cost.timeline import Timed, timed_listing
from autopar.ir.control_flow import PortKind
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.listing import Listing, LocalOp, Loop
from autopar.passes.shard.model.costs import LocalCosts, is_elementwise, local_costs
from autopar.passes.shard.model.recompute import Kept, Repeat, Tradeoff
from autopar.passes.shard.model.rerun import Brought, Passes, Rerun

_NONE: Pieces = frozenset()

# Ops that are not repeated: they act on the world, or their own bodies are remat already.
_ONCE = ("callback", "infeed", "outfeed", "rng_uniform", "remat2", "checkpoint", "while")


@dataclass(frozen=True)
class _Pair:
    """A forward scan and the one backward scan over what it stacked, by position."""

    forward: int
    backward: int
    length: int
    stacked: Mapping[str, str]  # result of the forward scan -> the value of its body


class Residuals:
    """A step with what could be kept or made again in it.

    `sizes` and `timed` are those of the listing, where another has read and timed it.
    """

    def __init__(
        self,
        graph: Graph,
        listing: Listing,
        prices: Prices,
        sizes: Sizes | None = None,
        timed: Timed | None = None,
    ) -> None:
        self.graph, self._listing, self._prices = graph, listing, prices
        self._sizes = sizes or Sizes(graph, prices.mesh, prices.platform)
        self._timed = timed
        self._pairs = {p.forward: p for p in _pairs(graph)}
        self._readers = _readers(graph)
        self._outer: dict[str, Operand] = {}  # constants and slices of paired bodies
        self._position: dict[str, int] = {}
        self._trips: dict[str, int] = {}
        self._repeatable: dict[str, Op] = {}
        self._rootless: set[str] = set()  # made of literals: to make one again is to keep it
        for at, op in enumerate(graph.ops):
            if op.origin.region == "forward":
                self._meet(at, op, self._pairs.get(at))

    def _meet(self, at: int, op: Op, pair: _Pair | None, trips: int = 1) -> None:
        """Note an op of the forward pass, maybe a paired scan, or of such a scan's body."""
        self._position.update((r.name, at) for r in op.results)
        self._trips.update((r.name, trips) for r in op.results)
        if self._rootless.issuperset(op.value_operands):
            self._rootless.update(r.name for r in op.results)
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
            self._meet(at, inner, None, pair.length)

    # What lies where is read when it is asked for: where no scan stacks, nothing may be faster.

    @cached_property
    def _costs(self) -> LocalCosts:
        return local_costs(self.graph, self._listing, self._prices)

    @cached_property
    def _step(self) -> StepKernels:
        graph, listing, sizes = self.graph, self._listing, self._sizes
        timed = self._timed or timed_listing(graph, listing, self._prices, sizes)
        return step_kernels(graph, listing, sizes, timed)

    @cached_property
    def _passes(self) -> Passes:
        return Passes(self.graph, self._step)

    @cached_property
    def _moment(self) -> Moment:
        """The moment at which most is held while nothing is repeated."""
        return self._step.moment(self._step.stored)

    @cached_property
    def _stored(self) -> Set[str]:
        """The values that lie in memory."""
        pieces = self._passes.value_of.items()
        return {value for piece, value in pieces if piece in self._step.written}

    @property
    def stacks(self) -> bool:
        """True if a scan stacks values for a backward one."""
        return bool(self._stacked)

    # -- the choice ------------------------------------------------------------------------

    @cached_property
    def tradeoff(self) -> Tradeoff:
        """Values that may be kept, ops that may be repeated.

        Only what lies in memory may be kept. Work that is fused into its readers is repeated with
        them, from what lies in memory behind it.
        """
        needed = {n for name in self._needed for n in self._held_for(name)}
        names = [n for n in self._position if self._is_held(n)]
        numbers = {n: i for i, n in enumerate(names)}
        ops: dict[str, int] = {}
        repeats: list[Repeat] = []
        repeatable = {n: op for n, op in self._repeatable.items() if n not in self._rootless}
        for name in names:
            op = repeatable.get(name)
            if op is not None and op.results[0].name not in ops:
                ops[op.results[0].name] = len(repeats)
                fused = self._fused_into(op)
                seconds = self._stored_seconds(op) + sum(map(self._seconds, fused.values()))
                reads = {numbers[n] for n in self._behind[name] if n in numbers}
                made = tuple(r.name for r in op.results)
                repeats.append(Repeat(made, seconds, tuple(sorted(reads))))
        kept = tuple(
            Kept(
                n,
                self._waiting_bytes(n),
                n in needed,
                ops[repeatable[n].results[0].name] if n in repeatable else -1,
                self._position[n],
                self._keeping_seconds(n),
            )
            for n in names
        )
        return Tradeoff(kept, tuple(repeats))

    @property
    def inside_scans(self) -> frozenset[int]:
        """The ops in paired scans that may be repeated, which `jax.checkpoint` repeats too."""
        repeats = enumerate(self.tradeoff.repeats)
        return frozenset(o for o, r in repeats if self._trips[r.names[0]] > 1)

    def values(self, again: frozenset[int]) -> tuple[str, ...]:
        """The values that are made again where these ops are repeated, in the order of the step.

        Those are their results, what is fused into them, and what the backward pass has fused
        into its own work and would compute from them.
        """
        chosen = {n for o in again for n in self.tradeoff.repeats[o].names}
        front = [
            n
            for n in self._needed
            if not self._is_held(n) and not chosen.isdisjoint(self._behind.get(n, ()))
        ]
        front += chosen
        found: set[str] = set()
        while front:
            name = front.pop()
            if name not in found:
                op = self._repeatable[name]
                found.update(r.name for r in op.results)
                front += self._fused_into(op)
        return tuple(n for n in self._position if n in found)

    def _is_held(self, name: str) -> bool:
        """True if a value lies in memory of its own, from the forward pass on."""
        if name in self._free or name in self._outer:
            return False
        stacked = name in self._stacked
        return stacked or name in self._stored or name not in self._repeatable

    def _held_for(self, name: str) -> Collection[str]:
        """The values that lie in memory behind one: itself, or those that it is computed from."""
        return (name,) if self._is_held(name) else self._behind.get(name, ())

    @cached_property
    def _behind(self) -> Mapping[str, frozenset[str]]:
        """The values in memory behind each value that does not lie there itself."""
        found: dict[str, frozenset[str]] = {}
        for name in self._position:
            if name in self._repeatable and name not in self._free:
                held = (
                    {read} if self._is_held(read) else found.get(read, _NONE)
                    for read in map(self._source, self._repeatable[name].value_operands)
                    if read in self._position
                )
                found[name] = _NONE.union(*held)
        return found

    def _fused_into(self, op: Op) -> Mapping[str, Op]:
        """The ops that are repeated inside another, by their results."""
        found: dict[str, Op] = {}
        front = [op]
        while front:
            for read in map(self._source, front.pop().value_operands):
                inner = self._repeatable.get(read)
                known = read in found or read in self._free or self._is_held(read)
                if inner is not None and not known:
                    found[read] = inner
                    front.append(inner)
        return found

    def _seconds(self, op: Op) -> float:
        """Seconds of a second run; a value that only the backward pass reads is merely moved."""
        name = op.results[0].name
        once = self._costs.seconds.get(name, 0.0)
        return once * self._trips[name]

    def _stored_seconds(self, op: Op) -> float:
        """Seconds of a second run; what several ops then read lies in memory again."""
        moved = 2 * sum(self._nbytes(r.name) for r in op.results)
        once = (
            elementwise_seconds(self._prices.cluster.chip, moved) * self._trips[op.results[0].name]
        )
        several = is_elementwise(op) and self._read_back[op.results[0].name] > 1
        return max(self._seconds(op), once if several else 0.0)

    @cached_property
    def _read_back(self) -> Counter[str]:
        """The number of ops of backward scans' bodies that read each value stacked for them."""
        found = Counter[str]()
        for pair in self._pairs.values():
            op = self.graph.ops[pair.backward]
            body, flow = op.graphs[0], op.control_flow
            assert flow is not None
            slices = {
                given.value.name: pair.stacked[outer]
                for given, port in zip(body.inputs, flow.inputs[0], strict=True)
                if port.operand is not None
                and isinstance(outer := op.operands[port.operand], str)
                and outer in pair.stacked
            }
            for inner in body.ops:
                found.update(slices[r] for r in {*inner.value_operands} if r in slices)
        return found

    def _waiting_bytes(self, name: str) -> float:
        """Bytes of keeping a value: none if the peak has passed when it is first read."""
        if name in self._needed and self._last_chance(name) <= self._peak_position:
            return 0.0
        return self._stacked.get(name, self._nbytes(name) * self._trips[name])

    def _keeping_seconds(self, name: str) -> float:
        """Seconds of keeping a value: a scan writes its stack for the backward one to read.

        On GPUs the stack is filled with zeros before, and what the scan's body reads itself, or a
        product makes, is copied there.
        """
        chip, nbytes = self._prices.cluster.chip, self._stacked.get(name, 0.0)
        if chip.platform != "gpu":
            return elementwise_seconds(chip, 2 * nbytes)
        if not nbytes:
            return 0.0
        # A kernel a trip puts it there, which a copy reads from where it was made.
        runs, puts = self._trips[name], 2 if name in self._copied else 1
        return elementwise_seconds(chip, 2 * nbytes) + runs * elementwise_seconds(
            chip, puts * nbytes / runs
        )

    @cached_property
    def _copied(self) -> Set[str]:
        """The values of paired scans' bodies that are made elsewhere than in their stacks."""
        found = set[str]()
        for pair in self._pairs.values():
            scan = self.graph.ops[pair.forward]
            body, flow = scan.graphs[0], scan.control_flow
            ports = flow.outputs[0] if flow is not None else ()
            found.update(
                o
                for o, p in zip(body.outputs, ports, strict=True)
                if p.is_carry and isinstance(o, str)
            )
            for op in body.ops:
                found.update(op.value_operands)
                found.update(r.name for r in op.results if not is_fused_into_readers(op))
        return found

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
        moment = self._moment
        for kernel in reversed(moment.stored.kernels[: moment.at + 1]):
            step = kernel.instruction(moment.block)
            if isinstance(step, LocalOp | Loop):
                return step.equation[0]
        return 0

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
        found.update(o for op in updates for o in op.value_operands)
        for pair in self._pairs.values():
            for result, inner in pair.stacked.items():
                shared = any(i != pair.backward for i in self._readers[result])
                found.update({inner} if shared or result in found else ())
            found.update(pair.stacked)
        return frozenset(found)

    # -- what is held ----------------------------------------------------------------------

    def peak(self, again: frozenset[int]) -> float:
        """The most bytes held at once beside the arguments, if these ops are repeated."""
        moment = self._moment
        if again:
            chosen = frozenset(self.values(again))
            scans = {at: self._brought(pair, chosen) for at, pair in self._pairs.items()}
            moment = self._step.moment(Rerun(self._passes, chosen, scans).stored())
        return self._step.laid_out(moment)

    def _brought(self, pair: _Pair, chosen: Collection[str]) -> Brought:
        """The inputs of a backward scan that makes chosen values of its partner's body."""
        body = self.graph.ops[pair.forward].graphs[0]
        stacked = set(pair.stacked.values())
        again = set(chosen) - self._free
        dropped = {r for r, v in pair.stacked.items() if self._source(v) in again}
        stacks: dict[str, int] = {}
        reads: list[str] = []
        ops = [op for op in body.ops if op.results and op.results[0].name in chosen]
        for op in ops:
            for name in map(self._source, op.value_operands):
                if name in self.graph.values:
                    reads.append(name)
                elif name and name not in chosen and name not in stacked:
                    stacks[f"{name}*"] = int(self._nbytes(name) * pair.length)
        inside = int(self._held_again(ops, stacked))
        return Brought(pair.backward, frozenset(dropped), stacks, tuple(reads), inside)

    def _held_again(self, ops: Sequence[Op], needed: Collection[str]) -> float:
        """The most bytes that these ops of a body hold, if they run in their order.

        What work is fused into its readers holds is what lies in memory behind it; what lies behind
        a value that is `needed` is held to the end.
        """
        behind: dict[str, frozenset[str]] = {}
        last: dict[str, int] = {}
        for at, op in enumerate(ops):
            sources = _NONE.union(*(behind.get(n, _NONE) for n in op.value_operands))
            last.update(dict.fromkeys(sources, at))
            for r in op.results:
                behind[r.name] = sources if is_fused_into_readers(op) else frozenset((r.name,))
        kept = _NONE.union(*(behind[n] for n in behind if n in needed))
        last.update(dict.fromkeys(kept, len(ops)))
        dying: dict[int, list[str]] = defaultdict(list)
        for name, at in last.items():
            dying[at].append(name)
        held = most = 0.0
        for at, op in enumerate(ops):
            own = (r.name for r in op.results if r.name in last and r.name in behind[r.name])
            held += sum(map(self._nbytes, own))
            most = max(most, held)
            held -= sum(map(self._nbytes, dying[at]))
        return most


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
        for operand in op.value_operands:
            found[operand].append(at)
    return found
