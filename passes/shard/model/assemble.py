"""Prices a reading: from decisions and needs to a problem of nodes, edges and memory.

Some moves have slack: nothing on the critical path waits for them at once. A parameter can be
gathered while the layers before its own run, and a gradient reduced while those after it do;
activations, and what the update moves, are waited for. So is what a trip of a loop adds to a sum:
the next trip begins with the sum. A gradient that two parts of the step give (tied weights) is
added on each device and reduced once, when the update first reads the sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from autopar.cost.memory import SPARE_SHARE
from autopar.ir.graph import Op
from autopar.ir.sharding import Assignment, MeshShape, Sharding, replicated
from autopar.ir.sharding_plan import phase_of
from autopar.ir.values import Role, Value
from autopar.passes.base import Holding
from autopar.passes.shard.model.choices import Row
from autopar.passes.shard.model.costs import ReshardCosts
from autopar.passes.shard.model.decisions import (
    Choice,
    Decision,
    Place,
    Read,
    Reading,
    ReadKind,
)
from autopar.passes.shard.model.lifetimes import lifetimes, materialized, read_by_groups
from autopar.passes.shard.solver.problem import Copy, Edge, Floats, Problem, Usage


@dataclass(frozen=True)
class Slack:
    """Decisions that hold state as the model reads it, and those that only the update reads.

    Of the latter, the `carried` ones go into sums that a loop carries, and the `joined` ones are
    sums of gradients that come from different ops.
    """

    state: frozenset[int]
    late: frozenset[int]
    carried: frozenset[int]
    joined: frozenset[int]

    def gathers(self, place: Place, read: Read) -> bool:
        """True if a read moves state for the forward or backward pass."""
        return place.decision in self.state and read.region != "update"

    def reduces(self, read: Read) -> bool:
        """True if the result of an op of the backward pass is a gradient of state."""
        if not isinstance(read.standing, Place) or read.region == "update":
            return False
        held = read.standing.decision
        return held in self.late - self.carried or held in self.state

    def reduces_joined(self, place: Place) -> bool:
        """True if partial sums of a place are reduced when the update reads them."""
        return place.decision in self.joined


def find_slack(reading: Reading) -> Slack:
    """The slack of every decision of a reading."""
    state = {
        place.decision
        for given in reading.graph.inputs
        if given.role is Role.STATE
        and isinstance(place := reading.standings[given.value.name], Place)
    }
    readers: defaultdict[int, set[int]] = defaultdict(set)  # by ops and groups before the update
    for read in reading.reads:
        if not isinstance(read.standing, Place) or (read.kind is ReadKind.OP and read.operand < 0):
            continue
        decision = read.standing.decision
        # Loops pass state in through ports of its own sharding.
        if read.kind is ReadKind.EXACT and decision in state and read.region != "update":
            state.add(read.reader)
        if read.region != "update":
            readers[decision].add(read.reader)
    late = {d for d, decision in enumerate(reading.decisions) if decision.op is None} - state
    _drop_read_early(late, state, readers)
    carried = _carried(reading, late)
    joined = frozenset(d for d in late - carried if reading.decisions[d].joined)
    return Slack(frozenset(state), frozenset(late), carried, joined)


def _drop_read_early(late: set[int], state: set[int], readers: dict[int, set[int]]) -> None:
    """Leave only decisions that the update reads, if need be through others of them."""
    early = late
    while early:
        allowed = late | state
        early = {d for d in late if not readers.get(d, set()) <= allowed}
        late -= early


def _carried(reading: Reading, late: set[int]) -> frozenset[int]:
    """The values of loop carries, and those that are added to them."""
    found = {d for d in late if reading.decisions[d].carried}
    feeds: defaultdict[int, set[int]] = defaultdict(set)
    for read in reading.reads:
        if isinstance(read.standing, Place) and read.kind is not ReadKind.OP:
            feeds[read.reader].add(read.standing.decision)
    waiting = sorted(found)
    for d in waiting:
        fresh = sorted(feeds[d] & late - found)
        found.update(fresh)
        waiting += fresh
    return frozenset(found)


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
    """A problem with what its nodes mean: nodes are decisions, then shared uses.

    The copies are those that moves make for ops, of which no row is told.
    """

    problem: Problem
    choices: tuple[tuple[Choice, ...], ...]
    uses: Mapping[UseKey, int]  # -> node
    copies: tuple[Copy, ...] = ()


def assemble(
    reading: Reading,
    choices: Sequence[tuple[Choice, ...]],
    moves: ReshardCosts,
    limit_bytes: float,
    held: Mapping[str, Holding] | None = None,
    reuse_gathered: bool = False,
    all_exposed: bool = False,
) -> Assembled:
    """The problem of a reading whose decisions may take `choices`, as an `Assembler` poses it."""
    assembler = Assembler(reading, choices, moves, held, reuse_gathered)
    return assembler.within(limit_bytes, all_exposed)


@dataclass(frozen=True)
class _Need:
    """A reader's need of a placed value."""

    value: Value
    place: Place
    reader: int
    wanted: Row
    read: Read


@dataclass(frozen=True)
class _MovedFor:
    """A move between two nodes for some ops, and the bytes of what it makes."""

    left: int
    right: int
    seconds: Floats
    nbytes: Floats
    ops: tuple[Op | None, ...]


class _Sums:
    """Sums of what choices cost: [choice] of each node, [choice, choice] of each edge."""

    def __init__(self, choices: Sequence[tuple[Choice, ...]]) -> None:
        self.costs: list[Floats] = [np.zeros(len(c)) for c in choices]
        self.tables: dict[tuple[int, int], Floats] = {}

    def add(self, left: int, right: int, table: Floats) -> None:
        """Add seconds to an edge, or to a node that is both its ends."""
        if left == right:
            self.costs[left] = self.costs[left] + np.diagonal(table)
            return
        key, oriented = ((left, right), table) if left < right else ((right, left), table.T)
        held = self.tables.get(key)
        self.tables[key] = oriented if held is None else held + oriented


class Assembler:
    """Prices a reading once, and poses it as a problem under any limit.

    `held` says which values are held longer or more often than for one run. With
    `reuse_gathered` a value is moved for the forward and the backward pass once. Every move is
    added up twice: for the share that stays exposed beside work, and whole, as if all waited for
    it. Only where something enters a loop do a problem's choices depend on the limit; then it is
    priced again for each.
    """

    def __init__(
        self,
        reading: Reading,
        choices: Sequence[tuple[Choice, ...]],
        moves: ReshardCosts,
        held: Mapping[str, Holding] | None = None,
        reuse_gathered: bool = False,
    ) -> None:
        self._held, self._reuse_gathered = held or {}, reuse_gathered
        self._reading, self._moves, self._prices = reading, moves, moves.prices
        self.mesh: MeshShape = moves.prices.mesh
        self._counts = reading.merged.counts
        self._known = moves.choices
        self.given = tuple(map(self._known.options, choices))
        most = max((h.times for h in self._held.values()), default=1)
        once = sum(v.nbytes * self._counts[name] for name, v in self._values.items())
        self._unsharded_bytes = most * once
        self._slack: Slack = find_slack(reading)
        self._gathered = moves.prices.exposed_share("all-gather")
        self._reduced = moves.prices.exposed_share("reduce-scatter")
        # Ports that may be a copy, which is held while the loop runs, and how many choices they
        # have without. The first half of their choices then lie as what enters, the second are
        # copies: whether a move is made, which takes both its ends to know, is a choice of one.
        self._copied: dict[int, int] = {}
        self._usages: tuple[Usage, ...] | None = None
        self._copies: tuple[Copy, ...] = ()
        self._price()

    def reusing_gathered(self) -> Assembler:
        """The same reading, priced where values are moved once for both passes."""
        other = copy(self)
        other._reuse_gathered = True
        other._price()
        return other

    @property
    def entries(self) -> int:
        """The number of prices of moves that are kept."""
        tables = (t for s in (self._overlapped, self._exposed) for t in s.tables.values())
        return sum(t.size for t in tables)

    def within(self, limit_bytes: float, all_exposed: bool = False) -> Assembled:
        """The problem under a limit; with `all_exposed` no move is taken to run beside work."""
        # All values together, as they are unsharded, may be within the limit.
        binds = self._unsharded_bytes > limit_bytes
        copied = self._may_be_copies(limit_bytes) if binds else {}
        if copied != self._copied:
            self._copied = copied
            self._price()
        if binds and self._usages is None:
            self._usages = self._found_usages()
            self._copies = self._found_copies()
        sums = self._exposed if all_exposed else self._overlapped
        edges = tuple(Edge(u, v, t) for (u, v), t in sums.tables.items())
        usages = self._usages if binds and self._usages else ()
        problem = Problem(tuple(sums.costs), edges, usages, limit_bytes)
        return Assembled(problem, tuple(self._choices), self._uses, self._copies if binds else ())

    def _may_be_copies(self, limit_bytes: float) -> dict[int, int]:
        found: dict[int, int] = {}
        for read in self._reading.reads:
            if read.enters and isinstance(read.standing, Place):
                if read.value.nbytes > _SMALL_SHARE * limit_bytes:
                    found[read.reader] = len(self.given[read.reader])
        return found

    def _price(self) -> None:
        """Price every choice of every node, and every move between them."""
        self._choices: list[tuple[Choice, ...]] = [
            self._known.options(c * 2) if i in self._copied else c for i, c in enumerate(self.given)
        ]
        self._overlapped, self._exposed = _Sums(self._choices), _Sums(self._choices)
        self._uses: dict[UseKey, int] = {}
        self._usages = None
        self._moved_for: list[_MovedFor] = []
        kept = materialized(self._reading)
        self._price_ops()
        self._price_groups(kept)
        self._price_turned()
        for read in self._reading.reads:
            if read.kind is ReadKind.OP and read.operand < 0:
                self._connect_result(read)
        self._connect_needs()
        self._price_outputs()
        for left, right in self._reading.ties:
            self._tie(left, right)

    def _pay(self, node: int, seconds: Floats) -> None:
        """Add seconds to the choices of a node."""
        for sums in (self._overlapped, self._exposed):
            sums.costs[node] = sums.costs[node] + seconds

    def _add(self, left: int, right: int, table: Floats, exposed: Floats | None = None) -> None:
        """Add a move's seconds beside work, and those `exposed` to an edge; by default the same."""
        self._overlapped.add(left, right, table)
        self._exposed.add(left, right, table if exposed is None else exposed)

    # -- nodes -----------------------------------------------------------------------------

    def _price_ops(self) -> None:
        for index, decision in enumerate(self._reading.decisions):
            if decision.op is not None:
                values = self._op_values(decision)
                once = self._moves.op_seconds(decision.op, values, self._choices[index])
                self._pay(index, once * decision.runs * decision.count)

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
                self._pay(index, decision.count * np.array(seconds))

    def _price_turned(self) -> None:
        """Copies of what ops read in another order than it lies in."""
        reading, mesh, platform = self._reading, self.mesh, self._prices.platform
        if platform == "tpu":  # whose products take operands in any order
            return
        for path, found in reading.turned(platform == "gpu").items():
            op, rule = found.op, found.op.rule
            assert rule is not None
            # 1. How each choice shards what is read: by the op's own, or as its group lies.
            node, home = reading.op_decisions.get(path), reading.standings[op.results[0].name]
            if node is not None:
                runs = reading.decisions[node].runs * reading.decisions[node].count
                lying = [
                    {t.operand: c.operand_sharding(rule, t.operand, mesh) for t in found.turned}
                    for c in self._choices[node]
                    if isinstance(c, Assignment)
                ]
            elif isinstance(home, Place):
                node = home.decision
                members = reading.decisions[node].members
                runs = next(m.runs * m.copies for m in members if m.value == op.results[0])
                lying = [
                    dict.fromkeys((t.operand for t in found.turned), sharding)
                    for sharding in self._shardings(node, home.dims)
                ]
            else:
                continue
            # 2. What is written out so takes its time.
            moved = (found.nbytes(lies, mesh, platform == "gpu") for lies in lying)
            seconds = [self._prices.elementwise(nbytes) if nbytes else 0.0 for nbytes in moved]
            self._pay(node, runs * np.array(seconds))

    def _shares(self, node: int, dims: tuple[int, ...]) -> Floats:
        """Over how many devices a member of a group is divided, for each choice."""
        return self._known.pieces(self._shardings(node, dims)).astype(np.float64)

    def _shardings(self, node: int, dims: tuple[int, ...]) -> Row:
        """The sharding of a value with these dims for each choice of its group."""
        return self._known.lying(self._choices[node], dims)

    def _found_usages(self) -> tuple[Usage, ...]:
        """The bytes that are held and when."""
        # What waits from part to part is among the arguments of each.
        arguments = {*(i.value.name for i in self._reading.merged.whole.inputs), *self._held}
        weighed: dict[tuple[str, Place, int, bool], Floats] = {}
        usages: list[Usage] = []
        self._made: dict[str, list[int]] = defaultdict(list)
        platform, once = self._prices.platform, Holding()
        for name, value, place, first, last, copies in lifetimes(
            self._reading, platform, self._held
        ):
            node = place.decision
            if not copies:
                self._made[value.name].append(first)
            if copies and node not in self._copied:
                continue
            times = copies or self._held.get(name, once).times
            key = (value.name, place, times, bool(copies))
            if key not in weighed:
                nbytes = times * value.nbytes / self._shares(node, place.dims)
                if copies:
                    nbytes[: self._copied[node]] = 0.0
                set_aside = 0.0 if name in arguments else np.floor(SPARE_SHARE * nbytes)
                weighed[key] = nbytes + set_aside
            usages.append(Usage(node, first, last, weighed[key]))
        return tuple(usages)

    def _found_copies(self) -> tuple[Copy, ...]:
        """The bytes of the copies that ops read, and of their results before they are reduced."""
        found: list[Copy] = []
        for moved in self._moved_for:
            if not moved.seconds.any():
                continue
            times = [
                t
                for op in moved.ops
                if op is not None
                for r in op.results
                for t in self._made.get(r.name, ())[:1]
            ]
            if times:
                found.append(
                    Copy(
                        moved.left, moved.right, min(times), max(times), moved.seconds, moved.nbytes
                    )
                )
        return tuple(found)

    # -- edges -----------------------------------------------------------------------------

    def _connect_result(self, read: Read) -> None:
        """From an op's raw result, partial where it reduced, to the group that holds it."""
        assert isinstance(read.standing, Place)
        assert read.op is not None
        op, position, group = read.op, -1 - read.operand, read.standing.decision
        assert op.rule is not None
        raw, combiners = self._known.made(op.rule, position, self._choices[read.reader])
        after = self._shardings(group, read.standing.dims)
        table = self._moves.matrix(read.value, raw, after, combiners)
        local = self._local(read.value, raw)
        self._moved_for.append(_MovedFor(read.reader, group, table, local.T, (op,)))
        exposed = table * (1.0 * read.runs * read.count)
        if self._slack.reduces(read):
            table = table * (self._reduced * read.runs * read.count)
            self._add(read.reader, group, table, exposed)
        else:
            self._add(read.reader, group, exposed)

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
            if need.read.kind is ReadKind.OP and need.reader != need.place.decision:
                lying = self._shardings(need.place.decision, need.place.dims)
                moved = self._moves.matrix(need.value, lying, need.wanted)
                local = self._local(need.value, need.wanted)
                self._moved_for.append(
                    _MovedFor(need.place.decision, need.reader, moved, local, (need.read.op,))
                )
            table, exposed = self._moved(need.value, need.place, need.wanted, self._times([need]))
            if need.read.enters and need.reader in self._copied:
                exposed = self._entered(need, table if exposed is None else exposed)
                table = self._entered(need, table)
            self._add(need.place.decision, need.reader, table, exposed)

    def _local(self, value: Value, wanted: Row) -> Floats:
        """[1, wanted] bytes of a copy."""
        return (value.nbytes // self._known.pieces(wanted))[None, :].astype(np.float64)

    def _moved(
        self, value: Value, place: Place, wanted: Row, times: tuple[float, float]
    ) -> tuple[Floats, Floats | None]:
        """[choices of the place, wanted] seconds of moves from where a value is kept.

        Those beside work, and those exposed, None where they are the same.
        """
        before = self._shardings(place.decision, place.dims)
        table = self._moves.matrix(value, before, wanted)
        overlapped = table
        if self._slack.reduces_joined(place):
            partial = np.array([bool(lies.partial) for lies in before])
            overlapped = np.where(partial[:, None], table * self._reduced, table)
        if overlapped is table and times[0] == times[1]:
            return table * times[0], None
        return overlapped * times[0], table * times[1]

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
                    local = lies.local_bytes(need.value, self.mesh)
                    table[i, j + count] = self._prices.elementwise(2 * local) * need.read.runs
        return table

    def _times(self, needs: Sequence[_Need]) -> tuple[float, float]:
        """The number of times that a step moves a value for its readers: at most once a copy.

        A move that runs beside work counts for the share that stays exposed; the second number
        counts it whole.
        """
        often: list[tuple[float, float]] = []
        for need in needs:
            copies = min(need.read.count, self._counts.get(need.value.name, 1))
            share = self._gathered if self._slack.gathers(need.place, need.read) else 1.0
            often.append((share * need.read.runs * copies, 1.0 * need.read.runs * copies))
        return max(beside for beside, _ in often), max(whole for _, whole in often)

    def _needs(self) -> Iterator[_Need]:
        for read in self._reading.reads:
            if read.kind is ReadKind.OP and read.operand < 0:
                continue
            wanted = self._known.wanted(read, self._choices[read.reader])
            for value, place, asked in self._known.sources(read.standing, read.value, wanted):
                yield _Need(value, place, read.reader, asked, read)

    def _share(self, key: UseKey, needs: Sequence[_Need]) -> None:
        """A node between a value and several ops of a region: moved once, read by all."""
        value, place = needs[0].value, needs[0].place
        node = len(self._choices)
        states = self._known.states(value)
        self._choices.append(states)
        for sums in (self._overlapped, self._exposed):
            sums.costs.append(np.zeros(len(states)))
        self._uses[key] = node
        lying = self._shardings(node, tuple(range(len(value.shape))))
        self._add(place.decision, node, *self._moved(value, place, lying, self._times(needs)))
        ops = tuple(need.read.op for need in needs)
        moved = self._moves.matrix(value, self._shardings(place.decision, place.dims), lying)
        local = self._local(value, lying)
        self._moved_for.append(_MovedFor(place.decision, node, moved, local, ops))
        for need in needs:
            table = self._moves.matrix(value, lying, need.wanted)
            local = self._local(value, need.wanted)
            self._moved_for.append(_MovedFor(node, need.reader, table, local, (need.read.op,)))
            beside, whole = self._times([need])
            exposed = table * whole
            self._add(node, need.reader, exposed if beside == whole else table * beside, exposed)

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
                after = self._known.row([Sharding(s.dims) for s in before])
                table = self._moves.matrix(value, before, after) * count
                self._add(standing.decision, standing.decision, table)
                continue
            whole = self._known.row([replicated(len(value.shape))])
            for source, place, asked in self._known.sources(standing, value, whole):
                before = self._shardings(place.decision, place.dims)
                paid = self._moves.matrix(source, before, asked)[:, 0]
                self._pay(place.decision, paid * count)

    def _tie(self, left: int, right: int) -> None:
        """Two decisions that are taken alike, where that can be."""
        mine, theirs = self._choices[left], self._choices[right]
        alike = np.array([[a == b for b in theirs] for a in mine])
        if alike.any():
            self._add(left, right, np.where(alike, 0.0, np.inf))
