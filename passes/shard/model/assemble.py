"""Prices a reading: from decisions and needs to a problem of nodes, edges and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost.memory import SPARE_SHARE
from autopar.ir.assignment import Assignment
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import Sharding, replicated
from autopar.ir.sharding_plan import phase_of
from autopar.ir.values import Value
from autopar.passes.shard.model.choices import Choice, canonical_shardings, required, sources
from autopar.passes.shard.model.decisions import Decision, Place, Read, Reading, ReadKind
from autopar.passes.shard.model.lifetimes import lifetimes, materialized, read_by_groups
from autopar.passes.shard.model.reshard_costs import ReshardCosts
from autopar.passes.shard.model.slack import Slack, find_slack
from autopar.passes.shard.solver.problem import Edge, Floats, Problem, Usage
from autopar.rules import HEAVY

# Values smaller than this share of the limit are not asked whether they are copied.
_SMALL_SHARE = 1 / 256


@dataclass(frozen=True)
class UseKey:
    """A value as the ops of one phase read it."""

    value: str
    phase: str
    runs: int


@dataclass(frozen=True)
class Assembled:
    """A problem with what its nodes mean: nodes are decisions, then shared uses."""

    problem: Problem
    choices: tuple[tuple[Choice, ...], ...]
    uses: Mapping[UseKey, int]  # -> node


def assemble(
    reading: Reading,
    choices: Sequence[tuple[Choice, ...]],
    moves: ReshardCosts,
    limit_bytes: float,
    in_flight: Mapping[str, int] | None = None,
    reuse_gathered: bool = False,
    all_exposed: bool = False,
) -> Assembled:
    """The problem of a reading whose decisions may take `choices`.

    `in_flight` says of which values several microbatches' are held at once. With
    `reuse_gathered` a value is moved for the forward and the backward pass once. With
    `all_exposed` no move is taken to run beside work.
    """
    return _Assembler(
        reading, choices, moves, limit_bytes, in_flight or {}, reuse_gathered, all_exposed
    ).assembled()


@dataclass(frozen=True)
class _Need:
    """A reader's need of a placed value."""

    value: Value
    place: Place
    reader: int
    wanted: tuple[Sharding, ...]
    read: Read


class _Assembler:
    def __init__(
        self,
        reading: Reading,
        choices: Sequence[tuple[Choice, ...]],
        moves: ReshardCosts,
        limit_bytes: float,
        in_flight: Mapping[str, int],
        reuse_gathered: bool,
        all_exposed: bool,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._in_flight, self._reuse_gathered = in_flight, reuse_gathered
        self._reading, self._moves, self._prices = reading, moves, moves.prices
        self._mesh: MeshShape = moves.prices.mesh
        self._counts = reading.merged.counts
        self._choices: list[tuple[Choice, ...]] = list(choices)
        # Ports that may be a copy, which is held while the loop runs, and how many choices they
        # have without. The first half of their choices then lie as what enters, the second are
        # copies: whether a move is made, which takes both its ends to know, is a choice of one.
        self._copied: dict[int, int] = {}
        if self._may_bind():
            self._double_entered()
        self._costs: list[Floats] = [np.zeros(len(c)) for c in self._choices]
        self._tables: dict[tuple[int, int], Floats] = {}
        self._uses: dict[UseKey, int] = {}
        self._laid: dict[tuple[int, tuple[int, ...]], tuple[Sharding, ...]] = {}
        self._slack: Slack = find_slack(reading)
        self._gathered = 1.0 if all_exposed else moves.prices.exposed_share("all-gather")
        self._reduced = 1.0 if all_exposed else moves.prices.exposed_share("reduce-scatter")

    def _may_bind(self) -> bool:
        """True if all values together, as they are unsharded, are more than the limit."""
        values, most = self._values, max(self._in_flight.values(), default=1)
        held = sum(v.nbytes * self._counts[name] for name, v in values.items())
        return most * held > self._limit_bytes

    def _double_entered(self) -> None:
        for read in self._reading.reads:
            if not read.enters or read.reader in self._copied:
                continue
            if isinstance(read.standing, Place) and self._counts_in_memory(read.value):
                self._copied[read.reader] = len(self._choices[read.reader])
                self._choices[read.reader] *= 2

    def _counts_in_memory(self, value: Value) -> bool:
        return value.nbytes > _SMALL_SHARE * self._limit_bytes

    def assembled(self) -> Assembled:
        kept = materialized(self._reading)
        self._price_ops()
        self._price_groups(kept)
        for read in self._reading.reads:
            if read.kind is ReadKind.OP and read.operand < 0:
                self._connect_result(read)
        self._connect_needs()
        self._price_outputs()
        for left, right in self._reading.ties:
            self._tie(left, right)
        edges = tuple(Edge(u, v, t) for (u, v), t in self._tables.items())
        problem = Problem(tuple(self._costs), edges, self._usages(), self._limit_bytes)
        return Assembled(problem, tuple(self._choices), self._uses)

    # -- nodes -----------------------------------------------------------------------------

    def _price_ops(self) -> None:
        seen: dict[tuple[object, ...], Floats] = {}
        for index, decision in enumerate(self._reading.decisions):
            if decision.op is None:
                continue
            op = decision.op
            types = tuple(v.type_text for v in self._op_values(decision))
            key = (op.kind, op.rule, types, op.flops, decision.runs, decision.count,
                   self._choices[index])  # fmt: skip
            if key not in seen:
                seen[key] = np.array([self._op_seconds(decision, c) for c in self._choices[index]])
            self._costs[index] = self._costs[index] + seen[key]

    def _op_seconds(self, decision: Decision, choice: Choice) -> float:
        op = decision.op
        assert op is not None
        assert op.rule is not None
        assert isinstance(choice, Assignment)
        share = choice.share(self._mesh)
        nbytes = 0.0
        for i, value in enumerate(self._op_values(decision)):
            sharding = (
                choice.operand_sharding(op.rule, i, self._mesh)
                if i < len(op.operands)
                else choice.result_sharding(op.rule, i - len(op.operands), self._mesh)
            )
            nbytes += sharding.local_bytes(value, self._mesh)
        heavy = op.kind in HEAVY
        dtype = op.results[0].dtype if op.results else "f32"
        seconds = (
            self._prices.compute(op.flops / share, nbytes, dtype)
            if heavy
            else self._prices.elementwise(nbytes)
        )
        return seconds * decision.runs * decision.count

    def _op_values(self, decision: Decision) -> tuple[Value, ...]:
        op = decision.op
        assert op is not None
        return (*(self._values[o] if isinstance(o, str) else Value("", o.shape, o.dtype)
                  for o in op.operands), *op.results)  # fmt: skip

    @property
    def _values(self) -> Mapping[str, Value]:
        return self._reading.values

    def _price_groups(self, kept: frozenset[str]) -> None:
        """Element-wise work: every kept member that it makes is stored once by it, and every other
        that it reads is loaded; other ops pay for what they read themselves."""
        loaded = set(read_by_groups(self._reading))
        for index, decision in enumerate(self._reading.decisions):
            written: dict[tuple[int, ...], float] = defaultdict(float)
            for value, place, path, count, runs in decision.members:
                if value.name in kept and (path or value.name in loaded):
                    written[place.dims] += value.nbytes * runs * count
            for dims, nbytes in sorted(written.items()):
                shares = self._shares(index, dims)
                # The start of a kernel is paid by each of the look-alikes.
                seconds = [self._prices.elementwise(nbytes / decision.count / s) for s in shares]
                self._costs[index] = self._costs[index] + decision.count * np.array(seconds)

    def _shares(self, node: int, dims: tuple[int, ...]) -> Floats:
        """Over how many devices a member of a group is divided, for each choice."""
        laid = self._shardings(node, dims)
        return np.array([float(s.pieces(self._mesh)) for s in laid])

    def _shardings(self, node: int, dims: tuple[int, ...]) -> tuple[Sharding, ...]:
        """The sharding of a value with these dims for each choice of its group."""
        key = (node, dims)
        if key not in self._laid:
            place = Place(node, dims)
            self._laid[key] = tuple(
                place.sharding(c) for c in self._choices[node] if isinstance(c, Sharding)
            )
        return self._laid[key]

    def _usages(self) -> tuple[Usage, ...]:
        """The bytes that are held and when; nothing if all values together are within the limit."""
        if not self._may_bind():
            return ()
        arguments = {i.value.name for i in self._reading.merged.whole.inputs}
        spare = SPARE_SHARE * (self._mesh.device_count > 1)
        weighed: dict[tuple[str, Place, int, bool], Floats] = {}
        usages: list[Usage] = []
        platform = self._prices.cluster.chip.platform
        for name, value, place, first, last, copies in lifetimes(self._reading, platform):
            node = place.decision
            if copies and node not in self._copied:
                continue
            times = copies or self._in_flight.get(name, 1)
            key = (value.name, place, times, bool(copies))
            if key not in weighed:
                nbytes = times * value.nbytes / self._shares(node, place.dims)
                if copies:
                    nbytes[: self._copied[node]] = 0.0
                set_aside = 0.0 if name in arguments else np.floor(spare * nbytes)
                weighed[key] = nbytes + set_aside
            usages.append(Usage(node, first, last, weighed[key]))
        return tuple(usages)

    # -- edges -----------------------------------------------------------------------------

    def _connect_result(self, read: Read) -> None:
        """From an op's raw result, partial where it reduced, to the group that holds it."""
        assert isinstance(read.standing, Place)
        assert read.op is not None
        op, position, group = read.op, -1 - read.operand, read.standing.decision
        assert op.rule is not None
        rule, choices = op.rule, self._choices[read.reader]
        raw = tuple(
            c.result_sharding(rule, position, self._mesh)
            for c in choices
            if isinstance(c, Assignment)
        )
        combiners = tuple(c.combiner(rule) for c in choices if isinstance(c, Assignment))
        after = self._shardings(group, read.standing.dims)
        table = self._moves.matrix(read.value, raw, after, combiners)
        share = self._reduced if self._slack.reduces(read) else 1.0
        self._add(read.reader, group, table * (share * read.runs * read.count))

    def _connect_needs(self) -> None:
        direct: list[_Need] = []
        shared: dict[UseKey, list[_Need]] = defaultdict(list)
        for need in self._needs():
            if need.read.kind is ReadKind.OP and need.reader != need.place.decision:
                phase = phase_of(need.read.region, self._reuse_gathered)
                key = UseKey(need.value.name, phase, need.read.runs)
                shared[key].append(need)
            else:
                direct.append(need)
        for key, needs in shared.items():
            if len({n.reader for n in needs}) > 1:
                self._share(key, needs)
            else:
                direct.extend(needs)
        for need in direct:
            table = self._moved(need.value, need.place, need.wanted) * self._times(need)
            if need.read.enters and need.reader in self._copied:
                table = self._entered(need, table)
            self._add(need.place.decision, need.reader, table)

    def _moved(self, value: Value, place: Place, wanted: tuple[Sharding, ...]) -> Floats:
        """[choices of the place, wanted] seconds of a move from where a value is kept."""
        before = self._shardings(place.decision, place.dims)
        table = self._moves.matrix(value, before, wanted)
        if self._slack.reduces_joined(place):
            partial = np.array([bool(lies.partial) for lies in before])
            table = np.where(partial[:, None], table * self._reduced, table)
        return table

    def _entered(self, need: _Need, table: Floats) -> Floats:
        """Seconds of entering a loop as it lies, where that is possible, or as a copy.

        A copy of what lies alike is never made, but costs no more than time: single choices move.
        """
        before = self._shardings(need.place.decision, need.place.dims)
        count, table = self._copied[need.reader], table.copy()
        for j, wanted in enumerate(need.wanted[:count]):
            for i, lies in enumerate(before):
                if lies != wanted:
                    table[i, j] = np.inf
                else:
                    local = lies.local_bytes(need.value, self._mesh)
                    table[i, j + count] = self._prices.elementwise(2 * local) * need.read.runs
        return table

    def _times(self, need: _Need) -> float:
        """The number of times that a step moves a value for a reader: at most once for each copy.

        A move that runs beside work counts for the share that stays exposed.
        """
        share = self._gathered if self._slack.gathers(need.place, need.read) else 1.0
        return share * need.read.runs * min(need.read.count, self._counts.get(need.value.name, 1))

    def _needs(self) -> Iterator[_Need]:
        for read in self._reading.reads:
            if read.kind is ReadKind.OP and read.operand < 0:
                continue
            wanted = required(read, self._choices[read.reader], self._mesh)
            for value, place, asked in sources(read.standing, read.value, wanted):
                yield _Need(value, place, read.reader, asked, read)

    def _share(self, key: UseKey, needs: Sequence[_Need]) -> None:
        """A node between a value and several ops of a region: moved once, read by all."""
        value, place = needs[0].value, needs[0].place
        node = len(self._choices)
        sizes = [1 if value.dtype.startswith("key") else n for n in value.shape]
        states: tuple[Choice, ...] = tuple(canonical_shardings(sizes, self._mesh, False))
        self._choices.append(states)
        self._costs.append(np.zeros(len(states)))
        self._uses[key] = node
        lying = self._shardings(node, tuple(range(len(value.shape))))
        often = max(self._times(n) for n in needs)
        self._add(place.decision, node, self._moved(value, place, lying) * often)
        for need in needs:
            table = self._moves.matrix(value, lying, need.wanted)
            self._add(node, need.reader, table * self._times(need))

    def _price_outputs(self) -> None:
        """Outputs that are no state leave as they lie, but as no partial sums."""
        runs = {r.name: op.runs for op in self._reading.graph.ops for r in op.results}
        leaving = {
            o: count * runs.get(o, 1)
            for o, home, count in self._reading.outputs
            if home is None and isinstance(o, str)
        }
        for name, count in sorted(leaving.items()):
            value, standing = self._values[name], self._reading.standings[name]
            if isinstance(standing, Place):
                before = self._shardings(standing.decision, standing.dims)
                after = tuple(Sharding(s.dims) for s in before)
                table = self._moves.matrix(value, before, after) * count
                self._add(standing.decision, standing.decision, table)
                continue
            whole = (replicated(len(value.shape)),)
            for source, place, asked in sources(standing, value, whole):
                before = self._shardings(place.decision, place.dims)
                paid = self._moves.matrix(source, before, asked)[:, 0]
                self._costs[place.decision] = self._costs[place.decision] + paid * count

    def _tie(self, left: int, right: int) -> None:
        """Two decisions that are taken alike, where that can be."""
        mine, theirs = self._choices[left], self._choices[right]
        alike = np.array([[a == b for b in theirs] for a in mine])
        if alike.any():
            self._add(left, right, np.where(alike, 0.0, np.inf))

    def _add(self, left: int, right: int, table: Floats) -> None:
        if left == right:
            self._costs[left] = self._costs[left] + np.diagonal(table)
            return
        key, oriented = ((left, right), table) if left < right else ((right, left), table.T)
        held = self._tables.get(key)
        self._tables[key] = oriented if held is None else held + oriented
