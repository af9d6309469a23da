"""Prices a reading: from decisions and needs to a problem of nodes, edges and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder
from autopar.ir.assignment import Assignment
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import Sharding, replicated
from autopar.ir.values import Value
from autopar.passes.shard.choices import canonical_shardings
from autopar.passes.shard.decisions import Decision, Place, Read, Reading, ReadKind
from autopar.passes.shard.lifetimes import lifetimes, materialized
from autopar.passes.shard.needs import Choice, required, sources
from autopar.passes.shard.problem import Edge, Floats, Problem, Usage


@dataclass(frozen=True)
class UseKey:
    """A value as the ops of one region read it."""

    value: str
    region: str
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
    prices: Prices,
    resharder: Resharder,
    limit_bytes: float,
) -> Assembled:
    """The problem of a reading whose decisions may take `choices`."""
    return _Assembler(reading, choices, prices, resharder).assembled(limit_bytes)


@dataclass(frozen=True)
class _Need:
    """One reader's need of one placed value."""

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
        prices: Prices,
        resharder: Resharder,
    ) -> None:
        self._reading, self._prices, self._resharder = reading, prices, resharder
        self._mesh: MeshShape = prices.mesh
        self._choices: list[tuple[Choice, ...]] = list(choices)
        self._costs: list[Floats] = [np.zeros(len(c)) for c in choices]
        self._tables: dict[tuple[int, int], Floats] = {}
        self._uses: dict[UseKey, int] = {}
        self._matrices: dict[tuple[object, ...], Floats] = {}
        self._laid: dict[tuple[int, tuple[int, ...]], tuple[Sharding, ...]] = {}

    def assembled(self, limit_bytes: float) -> Assembled:
        kept = materialized(self._reading)
        self._price_ops()
        self._price_groups(kept)
        for read in self._reading.reads:
            if read.kind is ReadKind.OP and read.operand < 0:
                self._connect_result(read)
        self._connect_needs()
        self._price_outputs()
        edges = tuple(Edge(u, v, t) for (u, v), t in self._tables.items())
        problem = Problem(tuple(self._costs), edges, tuple(self._usages(kept)), limit_bytes)
        return Assembled(problem, tuple(self._choices), self._uses)

    # -- nodes -----------------------------------------------------------------------------

    def _price_ops(self) -> None:
        seen: dict[tuple[object, ...], Floats] = {}
        for index, decision in enumerate(self._reading.decisions):
            if decision.op is None:
                continue
            op = decision.op
            types = tuple(v.type_text for v in self._op_values(decision))
            key = (op.kind, op.rule, types, op.flops, decision.runs, self._choices[index])
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
            nbytes += value.nbytes / self._mesh.size([a for d in sharding.dims for a in d])
        heavy = op.kind in ("dot_general", "conv_general_dilated", "ragged_dot_general")
        dtype = op.results[0].dtype if op.results else "f32"
        seconds = (
            self._prices.compute(op.flops / share, nbytes, dtype)
            if heavy
            else self._prices.elementwise(nbytes)
        )
        return seconds * decision.runs

    def _op_values(self, decision: Decision) -> tuple[Value, ...]:
        op = decision.op
        assert op is not None
        return (*(self._values[o] if isinstance(o, str) else Value("", o.shape, o.dtype)
                  for o in op.operands), *op.results)  # fmt: skip

    @property
    def _values(self) -> Mapping[str, Value]:
        return self._reading.values

    def _price_groups(self, kept: frozenset[str]) -> None:
        """Element-wise work: every kept member is written once and read once."""
        for index, decision in enumerate(self._reading.decisions):
            written: dict[tuple[int, ...], float] = defaultdict(float)
            for value, place, path in decision.members:
                if path and value.name in kept:
                    written[place.dims] += 2.0 * value.nbytes * decision.runs
            for dims, nbytes in sorted(written.items()):
                shares = self._shares(index, dims)
                self._costs[index] = self._costs[index] + np.array(
                    [self._prices.elementwise(nbytes / s) for s in shares]
                )

    def _shares(self, node: int, dims: tuple[int, ...]) -> Floats:
        """Over how many devices a member of a group is divided, for each choice."""
        laid = self._shardings(node, dims)
        return np.array([float(self._mesh.size([a for d in s.dims for a in d])) for s in laid])

    def _shardings(self, node: int, dims: tuple[int, ...]) -> tuple[Sharding, ...]:
        """How a value with these dims lies for each choice of its group."""
        key = (node, dims)
        if key not in self._laid:
            place = Place(node, dims)
            self._laid[key] = tuple(
                place.sharding(c) for c in self._choices[node] if isinstance(c, Sharding)
            )
        return self._laid[key]

    def _usages(self, kept: frozenset[str]) -> Iterator[Usage]:
        for value, place, first, last in lifetimes(self._reading, kept):
            shares = self._shares(place.decision, place.dims)
            yield Usage(place.decision, first, last, value.nbytes / shares)

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
        self._add(read.reader, group, self._matrix(read.value, raw, after, combiners) * read.runs)

    def _connect_needs(self) -> None:
        direct: list[_Need] = []
        shared: dict[UseKey, list[_Need]] = defaultdict(list)
        for need in self._needs():
            if need.read.kind is ReadKind.OP and need.reader != need.place.decision:
                key = UseKey(need.value.name, need.read.region, need.read.runs)
                shared[key].append(need)
            else:
                direct.append(need)
        for key, needs in shared.items():
            if len({n.reader for n in needs}) > 1:
                self._share(key, needs)
            else:
                direct.extend(needs)
        for need in direct:
            before = self._shardings(need.place.decision, need.place.dims)
            table = self._matrix(need.value, before, need.wanted) * need.read.runs
            self._add(need.place.decision, need.reader, table)

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
        before = self._shardings(place.decision, place.dims)
        self._add(place.decision, node, self._matrix(value, before, lying) * key.runs)
        for need in needs:
            self._add(node, need.reader, self._matrix(value, lying, need.wanted) * key.runs)

    def _price_outputs(self) -> None:
        """Outputs that are no state leave as they lie, but as no partial sums."""
        leaving = {o for o, home in self._reading.outputs if home is None and isinstance(o, str)}
        for name in sorted(leaving):
            value, standing = self._values[name], self._reading.standings[name]
            if isinstance(standing, Place):
                before = self._shardings(standing.decision, standing.dims)
                after = tuple(Sharding(s.dims) for s in before)
                self._add(standing.decision, standing.decision, self._matrix(value, before, after))
                continue
            whole = (replicated(len(value.shape)),)
            for source, place, asked in sources(standing, value, whole):
                before = self._shardings(place.decision, place.dims)
                paid = self._matrix(source, before, asked)[:, 0]
                self._costs[place.decision] = self._costs[place.decision] + paid

    def _matrix(
        self,
        value: Value,
        before: tuple[Sharding, ...],
        after: tuple[Sharding, ...],
        combiners: tuple[str, ...] = (),
    ) -> Floats:
        """Seconds of moving a value from each of `before` to each of `after`."""
        key = (value.shape, value.dtype, before, after, combiners)
        if key not in self._matrices:
            self._matrices[key] = self._priced(value, before, after, combiners)
        return self._matrices[key]

    def _priced(
        self,
        value: Value,
        before: tuple[Sharding, ...],
        after: tuple[Sharding, ...],
        combiners: tuple[str, ...],
    ) -> Floats:
        partial = any(s.partial for s in (*before, *after))
        table = self._resharder.table(value, partial)
        rows: list[int] = []
        extra = np.zeros(len(before))
        for i, state in enumerate(before):
            special = bool(combiners) and combiners[i] != "sum" and bool(state.partial)
            if special:
                local = value.nbytes // self._mesh.size([a for d in state.dims for a in d])
                extra[i] = self._prices.collective("all-reduce", local, state.partial)
            rows.append(table.index.get(Sharding(state.dims) if special else state, -1))
        columns = [table.index.get(s, -1) for s in after]
        seconds = table.seconds[np.ix_(rows, columns)] + extra[:, None]
        seconds[np.array(rows) < 0, :] = np.inf
        seconds[:, np.array(columns) < 0] = np.inf
        return seconds

    def _add(self, left: int, right: int, table: Floats) -> None:
        if left == right:
            self._costs[left] = self._costs[left] + np.diagonal(table)
            return
        key, oriented = ((left, right), table) if left < right else ((right, left), table.T)
        held = self._tables.get(key)
        self._tables[key] = oriented if held is None else held + oriented
