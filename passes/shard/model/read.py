"""Reads a graph into decisions: which values follow which, and who needs what from whom.

Ops that follow an operand's sharding, and ops to compute again where they are read, decide nothing.

What crosses a loop's boundary passes through a port. A carry is one port for its start, the body's
input and output, and the result, so all lie alike. Constants and scanned inputs are ports too:
resharding before a port runs once, after it every trip.

Sums over microbatches or a loop's trips are read in groups of their own by what comes after. So a
sum may stay partial over devices while it grows, and is combined when it is whole: what is not
linear there (the squares of a norm) asks for the sum once, and not in every trip. The update reads
a gradient that several parts of the step give (tied weights) in the same way:

    lookup: scatter-add --.
                           add_any, partial over data --> one all-reduce --> the update
    head:   dot_general --'

The user's own with_sharding_constraint is a group whose sharding is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.ir.control_flow import ControlFlow, Port, PortKind
from autopar.ir.graph import Graph, Op, Operand, Origin
from autopar.ir.rule import Kind, Rule
from autopar.ir.sharding_plan import OpPath
from autopar.ir.values import Literal, Value
from autopar.passes.shard.model.decisions import (
    Decision,
    DecisionKind,
    Member,
    Place,
    Read,
    Reading,
    ReadKind,
    Rematerializable,
    Standing,
)
from autopar.passes.shard.model.merge_isomorphic import Merged, Variant


def spec(op: Op) -> tuple[tuple[str, ...] | None, ...]:
    """The dims of a with_sharding_constraint: their axes, None where one is open."""
    spec = op.param("spec")
    assert isinstance(spec, tuple)
    return tuple(tuple(str(a) for a in dim) if isinstance(dim, tuple) else None for dim in spec)


def label(op: Op) -> str:
    """The name of an op in errors and reports: its module and kind."""
    return f"{op.origin.module}/{op.kind}" if op.origin.module else op.kind


def is_pointwise(rule: Rule) -> bool:
    """True if all sharding passes through and each result dim is a factor of its own."""
    return (
        rule.known
        and all(f.kind is Kind.PASS for f in rule.factors)
        and all(len(dim) <= 1 for dims in (*rule.operands, *rule.results) for dim in dims)
    )


def is_rematerializable(op: Op, rule: Rule, standings: Sequence[Standing]) -> bool:
    """True if an op's result is made where it is read: iotas, broadcasts, what they alone feed."""
    if op.kind == "broadcast_in_dim" and any(isinstance(s, Place) for s in standings):
        return op.results[0].item_count > _operand_count(rule)
    if rule.on_demand:
        return True
    leaf = all(
        s is None or (isinstance(s, Rematerializable) and not s.has_source) for s in standings
    )
    small = bool(op.results) and not any(isinstance(o, Literal) and o.shape for o in op.operands)
    return leaf and small and is_pointwise(rule) and len(op.results) == 1


def _operand_count(rule: Rule) -> int:
    count = 1
    for dim in rule.operands[0]:
        for f in dim:
            count *= rule.factors[f].size
    return count


def renaming_of(rule: Rule, operand: int) -> tuple[int, ...] | None:
    """For each result dim the operand's dim it is, if every sharding passes both ways."""
    if not rule.known or any(f.kind is not Kind.PASS for f in rule.factors):
        return None
    shardable = set(rule.shardable)
    source: dict[int, int] = {}
    for d, dim in enumerate(rule.operands[operand]):
        major = rule.major(dim)
        if major is None:
            continue
        if major not in shardable:
            return None
        source[major] = d
    dims: list[int] = []
    for dim in rule.results[0]:
        major = rule.major(dim)
        if major is None:
            dims.append(-1)
        elif major in source:
            dims.append(source.pop(major))
        else:
            return None
    return tuple(dims) if not source else None


_BARRIER = "optimization_barrier"


class Readings:
    """Readings of graphs of which nothing is pinned: no mesh changes them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], tuple[Graph, Reading]] = {}

    def of(self, given: Graph, partial_sums: bool, merged: Callable[[], Merged]) -> Reading:
        """The reading of a graph, whose merged form is asked for the first time."""
        key = id(given), partial_sums
        if key not in self._known:
            self._known[key] = given, read_graph(merged(), partial_sums)  # its id stays its own
        return self._known[key][1]


def read_graph(merged: Merged, partial_sums: bool = True) -> Reading:
    """Decisions, standings and reads of a whole step; ops must carry their rules.

    `partial_sums` as a pass's setting has it.
    """
    reader = Reader(Sums(partial_sums))
    graph = merged.graph
    for given in graph.inputs:
        reader.count = merged.counts[given.value.name]
        reader.add_input(given.value, given.path)
    for _, index, place in sorted(
        (variant.first, c, k)
        for c, variants in enumerate(merged.variants)
        for k, variant in enumerate(variants)
    ):
        if place == 0:
            reader.read_class(graph, index, merged.variants[index])
        else:
            reader.read_variant(graph, index, merged.variants[index][place])
    outputs: list[tuple[Operand, int | None, int]] = []
    for operand, returned, count in merged.outputs():
        home = reader.standings.get(returned) if returned is not None else None
        target = home.decision if isinstance(home, Place) else None
        outputs.append((operand, target, count))
        if isinstance(operand, str) and target is not None:
            reader.count = count
            reader.need_exact(operand, graph.values[operand], target, 1, "update", "")
    return Reading(
        merged,
        tuple(reader.decisions),
        reader.standings,
        tuple(reader.reads),
        reader.followers,
        reader.partial_operands,
        reader.op_decisions,
        tuple(outputs),
        tuple(reader.ties),
    )


class Reader:
    """Goes through ops in order; groups grow as followers are found.

    `count` is how many ops of the step the one being read stands for.
    """

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self.count = 1
        self.ties: list[tuple[int, int]] = []
        self.decisions: list[Decision] = []
        self.standings: dict[str, Standing] = {}
        self.reads: list[Read] = []
        self.followers: dict[OpPath, int] = {}
        self.partial_operands: dict[OpPath, tuple[int, ...]] = {}
        self.op_decisions: dict[OpPath, int] = {}
        self._linear: set[str] = set()  # values that may still be partial sums of their root

    # -- decisions -------------------------------------------------------------------------

    def add_input(self, value: Value, path: str) -> None:
        """An argument of the step."""
        self.add_group(DecisionKind.INPUT, value, path or value.name, 1, "forward", "")

    def add_group(
        self, kind: DecisionKind, value: Value, label: str, runs: int, region: str, line: str
    ) -> int:
        """A new group whose root is `value`."""
        index = len(self.decisions)
        sizes = [1 if value.dtype.startswith("key") else n for n in value.shape]
        self.decisions.append(
            Decision(kind, label, value, sizes, runs, region, line, count=self.count)
        )
        place = Place(index, tuple(range(len(value.shape))))
        self.standings[value.name] = place
        self.decisions[index].members.append(Member(value, place, (), self.count, runs))
        return index

    def place(
        self, value: Value, decision: int, dims: tuple[int, ...], path: OpPath = (), runs: int = 1
    ) -> None:
        """Put a value into a group."""
        place = Place(decision, dims)
        self.standings[value.name] = place
        self.decisions[decision].narrow(dims, value.shape)
        self.decisions[decision].members.append(Member(value, place, path, self.count, runs))

    def mark_partial(self, decision: int, value: Value) -> None:
        """A group that may hold a partial sum, as seen through one of its values."""
        self.decisions[decision].may_be_partial = True
        self._linear.add(value.name)

    def add_sum(self, value: Value, home: Place, runs: int, origin: Origin) -> None:
        """Adds a sum that a loop has completed; ops after the loop read it apart from the trips."""
        self._sums.leave(self, value, home, runs, origin)

    def need_exact(
        self, operand: Operand, value: Value, target: int, runs: int, region: str, line: str,
        dims: tuple[int, ...] | None = None, enters: bool = False,
    ) -> None:  # fmt: skip
        """A value is needed in the very sharding of a decision; one that `enters` a loop, there."""
        if isinstance(operand, Literal):
            return
        own = dims if dims is not None else tuple(range(len(value.shape)))
        partial_ok = self.decisions[target].may_be_partial
        self.reads.append(
            Read(value, self.standing(operand), target, ReadKind.EXACT, 0, None, own, partial_ok,
                 runs, region, line, self.count, enters)
        )  # fmt: skip

    # -- ops -------------------------------------------------------------------------------

    def read_class(self, graph: Graph, index: int, variants: Sequence[Variant]) -> None:
        """An op of the step, for all that look like it."""
        op = graph.ops[index]
        self.count = sum(v.count for v in variants)
        before = len(self.reads)
        self._read_any(graph, op, (index,), 1)
        if len(variants) > 1 and not op.graphs:
            for at in range(before, len(self.reads)):
                if self.reads[at].operand >= 0:
                    self.reads[at] = replace(self.reads[at], count=variants[0].count)

    def read_variant(self, graph: Graph, index: int, variant: Variant) -> None:
        """The same op where it reads from other classes."""
        op, path = graph.ops[index], (index,)
        if op.graphs or op.kind == _BARRIER:
            self._tie(op, variant.op)
            return
        self.count = variant.count
        self._sums.enter(self, graph, variant.op)
        home = self.standings[op.results[0].name] if op.results else None
        if path in self.op_decisions:
            self.read_operands(graph, variant.op, path, self.op_decisions[path], (), op.runs)
        elif isinstance(home, Place):
            self.read_operands(graph, variant.op, path, home.decision, home.dims, op.runs)

    def _tie(self, op: Op, other: Op) -> None:
        """An op with bodies is read once, so what its look-alikes read must lie alike."""
        for mine, theirs in zip(op.operands, other.operands, strict=True):
            a, b = self.standing(mine), self.standing(theirs)
            if not (isinstance(a, Place) and isinstance(b, Place)):
                continue
            if a.decision != b.decision and a.dims == b.dims:
                self.ties.append((a.decision, b.decision))

    def read_ops(self, graph: Graph, path: OpPath, runs: int) -> None:
        """Reads the ops of a body."""
        for i, op in enumerate(graph.ops):
            self._read_any(graph, op, (*path, i), runs)

    def _read_any(self, graph: Graph, op: Op, path: OpPath, trips: int) -> None:
        runs = trips * op.runs
        if len(path) == 1:
            self._sums.enter(self, graph, op)
        if op.control_flow is not None and op.control_flow.is_remat:
            self._read_alias(op, path, runs)
        elif op.control_flow is not None:
            read_loop(self, graph, op, op.control_flow, path, runs)
        elif op.kind == _BARRIER:
            for operand, result in zip(op.operands, op.results, strict=True):
                self._name(result.name, operand)
        else:
            self._read_op(graph, op, path, runs)

    def _read_alias(self, op: Op, path: OpPath, runs: int) -> None:
        """Remat: the body's inputs and outputs are the outer values under other names."""
        body = op.graphs[0]
        for given, operand in zip(body.inputs, op.operands, strict=True):
            self._name(given.value.name, operand)
        self.read_ops(body, (*path, 0), runs)
        for result, inner in zip(op.results, body.outputs, strict=True):
            self._name(result.name, inner)

    def _name(self, name: str, operand: Operand) -> None:
        """Another name for what an operand is."""
        self.standings[name] = self.standing(operand)
        if isinstance(operand, str) and operand in self._linear:
            self._linear.add(name)

    def standing(self, operand: Operand) -> Standing:
        """The place of an operand; None for literals."""
        if not isinstance(operand, str):
            return None
        return self._sums.late(operand) or self.standings[operand]

    def _read_op(self, graph: Graph, op: Op, path: OpPath, runs: int) -> None:
        rule = op.rule
        assert rule is not None
        standings = tuple(self.standing(o) for o in op.operands)
        if is_constraint(op):
            read_constraint(self, graph, op, path, runs)
        elif is_rematerializable(op, rule, standings):
            self._add_rematerializable(graph, op, path, standings)
        elif (main := self._main_operand(op, rule, standings)) is not None and not self._joins(
            op, rule, standings
        ):
            self._follow(graph, op, path, main, runs)
        elif is_pointwise(rule) and len(op.results) == 1:
            self._start_group(graph, op, path, runs)
        else:
            self._decide_op(graph, op, path, runs)

    def _add_rematerializable(
        self, graph: Graph, op: Op, path: OpPath, standings: tuple[Standing, ...]
    ) -> None:
        values = tuple(graph.value(o) for o in op.operands)
        for value in op.results:
            sourced = any(
                isinstance(s, Place) or (isinstance(s, Rematerializable) and s.has_source)
                for s in standings
            )
            self.standings[value.name] = Rematerializable(
                op, path, standings, values, value, sourced
            )

    def _main_operand(self, op: Op, rule: Rule, standings: Sequence[Standing]) -> int | None:
        """The operand to follow: of those that name all the result's dims, the deepest."""
        if len(op.results) != 1:
            return None
        able = [
            i for i, s in enumerate(standings)
            if isinstance(s, Place)
            and (dims := renaming_of(rule, i)) is not None
            and not self._narrows_input(s, dims, op.results[0])
        ]  # fmt: skip
        return max(able, key=lambda i: self._rank(standings[i]), default=None)

    def _narrows_input(self, place: Place, dims: tuple[int, ...], result: Value) -> bool:
        """True if following an argument (x.reshape(4, -1)) would bar shardings of it."""
        home = self.decisions[place.decision]
        if home.kind is not DecisionKind.INPUT:
            return False
        named = [(place.dims[d], n) for d, n in zip(dims, result.shape, strict=True) if d >= 0]
        return any(d >= 0 and n % home.sizes[d] for d, n in named)

    def _rank(self, standing: Standing) -> tuple[int, int]:
        assert isinstance(standing, Place)
        return (self.decisions[standing.decision].depth, standing.decision)

    def _joins(self, op: Op, rule: Rule, standings: Sequence[Standing]) -> bool:
        """True if an op adds values of different groups of which one may be a partial sum."""
        if not (is_pointwise(rule) and op.results[0].is_floating):
            return False
        for group in rule.linear:
            places = [standings[i] for i in group]
            if len(group) < 2 or not all(isinstance(p, Place) for p in places):
                continue
            homes = {p.decision for p in places if isinstance(p, Place)}
            names = [op.operands[i] for i in group]
            if len(homes) > 1 and any(n in self._linear for n in names):
                return True
        return False

    def _follow(self, graph: Graph, op: Op, path: OpPath, main: int, runs: int) -> None:
        rule = op.rule
        assert rule is not None
        place = self.standing(op.operands[main])
        assert isinstance(place, Place)
        result = op.results[0]
        renaming = renaming_of(rule, main)
        assert renaming is not None
        dims = tuple(place.dims[d] if d >= 0 else -1 for d in renaming)
        self.place(result, place.decision, dims, path, runs)
        self.followers[path] = place.decision
        self._keep_linear(op, rule, main, path)
        self.read_operands(graph, op, path, place.decision, dims, runs)

    def _keep_linear(self, op: Op, rule: Rule, main: int, path: OpPath) -> None:
        operand = op.operands[main]
        if (main,) in rule.linear:
            self.partial_operands[path] = (main,)
            if operand in self._linear:
                self._linear.add(op.results[0].name)
        else:
            place = self.standing(operand)
            assert isinstance(place, Place)
            self.decisions[place.decision].may_be_partial = False

    def _start_group(self, graph: Graph, op: Op, path: OpPath, runs: int) -> None:
        """A fresh group computed element-wise in its own sharding: joins, and demands' heirs."""
        rule = op.rule
        assert rule is not None
        result = op.results[0]
        index = self.add_group(
            DecisionKind.GROUP, result, label(op), runs, op.origin.region, op.origin.line
        )
        decision = self.decisions[index]
        decision.members[0] = decision.members[0]._replace(path=path)
        decision.depth = self.depth(op)
        self._narrow_to_rule(index, rule)
        self.followers[path] = index
        joint = [g for g in rule.linear if len(g) > 1 and self._all_placed(op, g)]
        if joint and result.is_floating:
            self.partial_operands[path] = joint[0]
            decision.may_be_partial = True
            self._linear.add(result.name)
            decision.joined = op.origin.region == "backward"
        self.read_operands(graph, op, path, index, tuple(range(len(result.shape))), runs)

    def _all_placed(self, op: Op, group: Sequence[int]) -> bool:
        return all(isinstance(self.standing(op.operands[i]), Place) for i in group)

    def _narrow_to_rule(self, index: int, rule: Rule) -> None:
        shardable = set(rule.shardable)
        for d, dim in enumerate(rule.results[0]):
            major = rule.major(dim)
            if major is None or major not in shardable:
                self.decisions[index].sizes[d] = 1
            else:
                self.decisions[index].narrow((d,), (rule.factors[major].size,))

    def _decide_op(self, graph: Graph, op: Op, path: OpPath, runs: int) -> None:
        rule = op.rule
        assert rule is not None
        index = len(self.decisions)
        decision = Decision(
            DecisionKind.OP, label(op), None, [], runs, op.origin.region, op.origin.line,
            depth=self.depth(op) + 1, op=op, path=path, count=self.count,
        )  # fmt: skip
        self.decisions.append(decision)
        self.op_decisions[path] = index
        self.read_operands(graph, op, path, index, (), runs)
        leaves_sums = any(f.kind is Kind.REDUCE and f.combiner == "sum" for f in rule.factors)
        for position, result in enumerate(op.results):
            group = self.add_group(
                DecisionKind.GROUP, result, label(op), runs, op.origin.region, op.origin.line
            )
            home = self.decisions[group]
            home.depth = decision.depth
            if leaves_sums and result.is_floating:
                home.may_be_partial = True
                self._linear.add(result.name)
            self.reads.append(
                Read(result, self.standings[result.name], index, ReadKind.OP, -1 - position, op,
                     (), home.may_be_partial, runs, op.origin.region, op.origin.line, self.count)
            )  # fmt: skip

    def read_operands(
        self, graph: Graph, op: Op, path: OpPath, reader: int, dims: tuple[int, ...], runs: int
    ) -> None:
        """The reads of an op, by the decision that it computes in."""
        kind = ReadKind.GROUP if path in self.followers else ReadKind.OP
        shared = self.partial_operands.get(path, ())
        for i, operand in enumerate(op.operands):
            if isinstance(operand, str):
                self.reads.append(
                    Read(graph.value(operand), self.standing(operand), reader, kind, i, op, dims,
                         i in shared, runs, op.origin.region, op.origin.line, self.count)
                )  # fmt: skip

    def depth(self, op: Op) -> int:
        """The most decisions on a path from the inputs to an op."""
        places = [self.standing(o) for o in op.operands]
        return max(
            (self.decisions[p.decision].depth for p in places if isinstance(p, Place)), default=0
        )


# -- the user's own with_sharding_constraint -------------------------------------------------------


def is_constraint(op: Op) -> bool:
    """True if an op constrains its value's sharding."""
    return op.kind == "sharding_constraint" and any(k == "spec" for k, _ in op.params)


def read_constraint(reader: Reader, graph: Graph, op: Op, path: OpPath, runs: int) -> None:
    """A group of the constrained value, which follows nothing."""
    result = op.results[0]
    index = reader.add_group(
        DecisionKind.GROUP, result, "with_sharding_constraint", runs, op.origin.region,
        op.origin.line,
    )  # fmt: skip
    decision = reader.decisions[index]
    decision.members[0] = decision.members[0]._replace(path=path)
    decision.depth = reader.depth(op)
    decision.fixed = spec(op)
    reader.followers[path] = index
    reader.read_operands(graph, op, path, index, tuple(range(len(result.shape))), runs)


# -- sums over microbatches and trips --------------------------------------------------------------


class Sums:
    """Values that are summed up or joined, and the ops that read the whole sum.

    If microbatches are not told `apart`, ops that run once find their sums as they are, so that
    they lie no other way than they are read.
    """

    def __init__(self, apart: bool = True) -> None:
        self._apart = apart
        self._looped: set[str] = set()
        self._late: dict[str, Place] = {}
        self._after: dict[str, Place] = {}  # loops
        self._runs_once = True  # whether the op being read does

    def enter(self, reader: Reader, graph: Graph, op: Op) -> None:
        """Begin with an op of the step; one that runs once gets groups for the sums it reads."""
        self._runs_once = op.runs == 1 or not self._apart
        if not self._apart:
            return
        if not self._runs_once:
            self._looped.update(r.name for r in op.results)
            return
        for name in op.value_operands:
            home = reader.standings.get(name)
            if name in self._late or not isinstance(home, Place):
                continue
            value, root = graph.values[name], reader.decisions[home.decision]
            joined = root.joined and root.value == value and op.origin.region == "update"
            if joined or name in self._looped:
                self._late[name] = _group(reader, value, home, 1, op.origin)

    def leave(self, reader: Reader, value: Value, home: Place, runs: int, origin: Origin) -> None:
        """A loop that runs so often hands on a sum, which lies at home."""
        late = self._after[value.name] = _group(reader, value, home, runs, origin)
        reader.mark_partial(late.decision, value)
        reader.decisions[late.decision].depth = reader.decisions[home.decision].depth

    def late(self, name: str) -> Place | None:
        """The group of a sum, as the op being read finds it."""
        late = self._late.get(name) if self._runs_once else None
        return late or self._after.get(name)


def _group(reader: Reader, value: Value, home: Place, runs: int, origin: Origin) -> Place:
    """A new group that reads a value at home, where the value stays."""
    kind, region, line = DecisionKind.GROUP, origin.region, origin.line
    group = reader.add_group(kind, value, value.name, runs, region, line)
    reader.decisions[group].may_be_partial = value.is_floating
    late = Place(group, tuple(range(len(value.shape))))
    reader.standings[value.name] = home
    reader.reads.append(
        Read(value, home, group, ReadKind.EXACT, 0, None, late.dims, True, runs, region, line,
             reader.count)
    )  # fmt: skip
    return late


# -- loops -----------------------------------------------------------------------------------------


def read_loop(
    reader: Reader, graph: Graph, op: Op, flow: ControlFlow, path: OpPath, runs: int
) -> None:
    """A scan, while or cond with its bodies."""
    _LoopReader(reader, graph, op, flow, path, runs).read()


class _LoopReader:
    """A loop op that is being read."""

    def __init__(
        self, reader: Reader, graph: Graph, op: Op, flow: ControlFlow, path: OpPath, runs: int
    ) -> None:
        self._reader, self._graph, self._op, self._flow, self._path = reader, graph, op, flow, path
        self._runs, self._inner_runs = runs, runs * flow.trips

    def read(self) -> None:
        """Reads what enters, what only leaves, then the bodies, each with what leaves it."""
        op, flow = self._op, self._flow
        decisions: dict[Port, int] = {}
        for port in flow.ports:
            if port.operand is not None:
                decisions[port] = self._enter(port, op.operands[port.operand])
            elif port.result is not None:
                decisions[port] = self._make(port, op.results[port.result])
            else:
                answer = op.graphs[0].value(op.graphs[0].outputs[0])
                decisions[port] = self._scalar("test", answer)
        for b, body in enumerate(op.graphs):
            self._reader.read_ops(body, (*self._path, b), self._inner_runs)
            for operand, port in zip(body.outputs, flow.outputs[b], strict=True):
                self._exit(body, operand, decisions[port])
        for port, result in zip(flow.results, op.results, strict=True):
            if not port.by_row:
                self._leave(result, decisions[port])

    # -- into the loop ---------------------------------------------------------------------

    def _enter(self, port: Port, operand: Operand) -> int:
        """Makes one decision for an operand and for what each body has of it.

        A carry, or what a branch is given, may hold a partial sum where its start is one, or zero.
        """
        if port.kind is PortKind.CHOICE:
            index = self._scalar("which", self._graph.value(operand))
            self._exit(self._graph, operand, index)
            return index
        first, *others = (self._op.graphs[b].inputs[i].value for b, i in port.inputs)
        index = self._decide(first)
        decision = self._reader.decisions[index]
        decision.carried = port.is_carry
        if port.kind is PortKind.CONSTANT:  # what is the same in every trip is made once
            decision.members[0] = decision.members[0]._replace(runs=self._runs)
        if port.is_carry or self._flow.chooses:
            if first.is_floating and self._may_be_partial(operand):
                self._reader.mark_partial(index, first)
        self._read_operand(operand, index, port)
        for value in others:
            self._reader.place(value, index, tuple(range(len(value.shape))))
            if decision.may_be_partial:
                self._reader.mark_partial(index, value)
        return index

    def _read_operand(self, operand: Operand, decision: int, port: Port) -> None:
        if isinstance(operand, Literal):
            return
        value = self._graph.values[operand]
        dims = tuple(range(len(value.shape)))
        origin = self._op.origin
        self._reader.need_exact(
            operand, value, decision, self._runs, origin.region, origin.line,
            (-1, *dims[:-1]) if port.by_row else dims,
            enters=not port.is_carry,
        )  # fmt: skip

    # -- out of it -------------------------------------------------------------------------

    def _make(self, port: Port, result: Value) -> int:
        """The decision of what branches give, or of a row of what a scan stacks."""
        if port.by_row:
            row = Value(f"{result.name}.slice", result.shape[1:], result.dtype)
            decision = self._decide(row)
            self._reader.place(result, decision, (-1, *range(len(result.shape) - 1)))
        else:
            decision = self._decide(result)
        if result.is_floating:  # gradients of stacked weights may be summed after the loop
            self._reader.mark_partial(decision, result)
        return decision

    def _exit(self, graph: Graph, operand: Operand, decision: int) -> None:
        if not self._may_be_partial(operand):
            self._reader.decisions[decision].may_be_partial = False
        if isinstance(operand, Literal):
            return
        origin = self._op.origin
        self._reader.need_exact(
            operand, graph.values[operand], decision, self._inner_runs, origin.region, origin.line
        )

    def _leave(self, result: Value, decision: int) -> None:
        """A result lies as its port does; ops after the loop read a sum apart from its trips."""
        home = Place(decision, tuple(range(len(result.shape))))
        if self._reader.decisions[decision].may_be_partial:
            self._reader.add_sum(result, home, self._runs, self._op.origin)
        elif self._reader.standings.get(result.name) != home:
            self._reader.place(result, decision, home.dims, runs=self._runs)

    # -- decisions -------------------------------------------------------------------------

    def _decide(self, value: Value) -> int:
        origin = self._op.origin
        label = f"{origin.module}/{self._op.kind}".lstrip("/")
        decision = self._reader.add_group(
            DecisionKind.PORT, value, label, self._inner_runs, origin.region, origin.line
        )
        self._reader.decisions[decision].depth = self._depth()
        return decision

    def _scalar(self, name: str, value: Value) -> int:
        """Reads the value that selects a branch, or that ends a loop."""
        return self._decide(Value(f"{self._op.results[0].name}.{name}", (), value.dtype))

    def _depth(self) -> int:
        places = [self._reader.standing(o) for o in self._op.operands]
        decisions = self._reader.decisions
        return 1 + max(
            (decisions[p.decision].depth for p in places if isinstance(p, Place)), default=0
        )

    def _may_be_partial(self, operand: Operand) -> bool:
        """False for literals but zero: each device has the whole of one, and would add it."""
        if isinstance(operand, Literal):
            return operand.is_zero
        return self._reader.standing(operand) is not None
