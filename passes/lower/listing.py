"""Lower a graph and its sharding to the listing that every device of one mesh runs.

Ops are lowered in order. For each op the plan tells the sharding that it wants of each operand and
the one in which it leaves its results:

    %2 = dot(%1, %w)         %1 [data, model], wanted [data, -]
    -> %1@1 = move %1: all-gather(model)          a move, once for each wanted sharding and phase
       %2.raw = run dot(%1@1, %w)                 each device on its own pieces
       %2 = move %2.raw: reduce-scatter(model)    combines partial sums, if there are any

A rematerializable value has no sharding in the plan: it is made anew wherever it is read. At last
the straight lines are rewritten so that they send less and change no value. XLA makes the
same of it by itself, so without this a plan would count what no device sends, computes or holds:

    `combine_once`      all-reduce(a) + all-reduce(b)        ->  all-reduce(a + b)
    `move_once`         a -> b -> c, b read by nothing else  ->  a -> c
    `merge_scatters`    all-reduce, then a slice of it       ->  reduce-scatter
    `merge_equals`      b = f(a), and later c = f(a)         ->  c is b

And some keep compilers for GPUs from what they had better not do:

    `filters_apart`        an update that waits for a sum shares no kernel with a filter's cast
    `gradients_in_rows`    no update runs in the order in which cuDNN makes a filter's gradient
    `sums_before_joins`    no kernel that puts pieces together computes a long sum, item by item
    `products_swapped`     no scores lie in columns, of which a softmax sums up rows
    `gathers_as_they_lie`  no stack is written once more for a loop, in the order of its dims
    `sums_in_parts`        no sum of rows is left to a few blocks
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from autopar.cost.few_blocks import in_parts
from autopar.cost.ops import is_better_swapped, is_fused_into_readers, is_reduction
from autopar.cost.reshard import CollectivePrices, Resharder, Route
from autopar.cost.sizes import Sizes
from autopar.errors import GraphError
from autopar.ir.control_flow import ControlFlow, Port, merely_cast, with_casts
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.host_calls import HOST_CALLS, handed_on_by
from autopar.ir.listing import (
    COLLECTIVES,
    IN_ROWS,
    Block,
    Collective,
    Fence,
    Listing,
    ListingStep,
    LocalOp,
    Loop,
    Move,
    MoveStep,
    names_made,
    names_read,
)
from autopar.ir.rule import Rule
from autopar.ir.sharding import (
    Assignment,
    MeshShape,
    Sharding,
    operand_of_result,
    replicated,
)
from autopar.ir.sharding_plan import OpPath, ShardingPlan
from autopar.ir.values import Literal, Role, Value
from autopar.rules import primitive, primitive_names

_BARRIER = "optimization_barrier"
_CAST, _CONVOLUTION = "convert_element_type", "conv_general_dilated"
_AS_FILTER = (_CAST, "rev", "transpose")  # as which a convolution may read one
_SUMS = ("add", "add_any")
_EXTREMES = ("reduce_max", "reduce_min")
# Graphs tell all that these do; they leave out the code that others have in a parameter.
_TOLD = frozenset(name for name in primitive_names() if not primitive(name).draws) - {
    "pallas_call", "reduce", "reduce_window"
}  # fmt: skip
_LONG_SUM = 256  # terms that one thread should not sum up on its own
_SHOWING = ("reshape", "broadcast_in_dim", "squeeze", "transpose", "stop_gradient", "copy")


def lower_graph(
    graph: Graph,
    plan: ShardingPlan,
    resharder: Resharder,
    left_partial: Collection[str] = (),
    op_shardings: OpShardings | None = None,
) -> Listing:
    """Lower a step. Outputs that are partial sums are combined, but for those `left_partial`.

    Several graphs may be given the same `op_shardings`.
    """
    scope = _Scope(graph, plan, resharder, op_shardings or OpShardings())
    names = tuple(i.value.name for i in graph.inputs)
    scope.lower_ops(graph, ())
    returns = dict(graph.donated)
    wanted = [
        plan.sharding_of[names[returns[i]]]
        if i in returns
        else scope.final_sharding(o, o in left_partial)
        for i, o in enumerate(graph.outputs)
    ]
    outputs = tuple(
        scope.fetch(o, w, "update", "") for o, w in zip(graph.outputs, wanted, strict=True)
    )
    block = scope.block(names, outputs)
    if resharder.prices.platform == "gpu":
        block = filters_apart(graph, block)
        block = gradients_in_rows(graph, block)
        block = sums_before_joins(graph, block)
    block = merge_equals(graph, block)  # which may leave a product with but one reader
    if resharder.prices.platform == "gpu":
        block = gathers_as_they_lie(graph, products_swapped(graph, block))
        prices = resharder.prices
        block = sums_in_parts(block, Sizes(graph, prices.mesh, prices.platform), prices)
    return Listing(block, tuple(plan.sharding_of[n] for n in names), tuple(wanted))


@dataclass(frozen=True)
class _Made:
    """A rematerializable value: its op and path."""

    op: Op
    path: OpPath


@dataclass(frozen=True)
class _OpSharding:
    """The shardings wanted of an op's operands, those in which it makes its results (`raw`), and
    those in which it leaves them (`homes`); `moved` tells which results are not made there.

    An op that is `through_use` reads through the sharding of all uses of the phase.
    """

    wanted: tuple[Sharding, ...]
    raw: tuple[Sharding, ...]
    homes: tuple[Sharding, ...]
    moved: tuple[bool, ...]
    combiner: str
    through_use: bool

    @classmethod
    def of(
        cls, op: Op, rule: Rule, given: Assignment | None, homes: tuple[Sharding, ...],
        shared: tuple[int, ...], mesh: MeshShape,
    ) -> _OpSharding:  # fmt: skip
        """As an assignment has it, or without one as the result lies."""
        count = range(len(op.operands))
        if given is None:
            wanted = tuple(operand_of_result(rule, i, homes[0], i in shared) for i in count)
            raw, combiner = homes, "sum"
        else:
            wanted = tuple(given.operand_sharding(rule, i, mesh) for i in count)
            raw = tuple(given.result_sharding(rule, i, mesh) for i in range(len(op.results)))
            combiner = given.combiner(rule)
        # Only the first device along the idle axes calls Python: its results are partial there.
        if op.kind in HOST_CALLS and op.results:
            used = {a for s in (*wanted, *raw) for dim in s.dims for a in dim}
            idle = tuple(a for a in mesh.splitting if a not in used)
            raw = tuple(Sharding(s.dims, idle) for s in raw)
        moved = tuple(a != b for a, b in zip(raw, homes, strict=True))
        return cls(wanted, raw, homes, moved, combiner, given is not None)


class OpShardings:
    """The shardings of ops; those that look alike on a mesh, in whichever plan, are asked once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[_OpSharding, Rule]] = {}

    def of(
        self, op: Op, rule: Rule, given: Assignment | None, homes: tuple[Sharding, ...],
        shared: tuple[int, ...], mesh: MeshShape,
    ) -> _OpSharding:  # fmt: skip
        """The shardings of an op."""
        # The rule's id stands for the rule, which is kept with the answer.
        factors = given.factors if given is not None else None
        key = (op.kind, mesh.names, mesh.sizes, id(rule), factors, shared, homes)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _OpSharding.of(op, rule, given, homes, shared, mesh), rule
        return found[0]


class _Scope:
    """A straight line of instructions: the step, or the body of a loop."""

    def __init__(
        self, graph: Graph, plan: ShardingPlan, resharder: Resharder, op_shardings: OpShardings
    ) -> None:
        self._plan, self._resharder, self._op_shardings = plan, resharder, op_shardings
        self._graph = graph
        self.instructions: list[ListingStep] = []
        self._values: dict[str, Value] = dict(graph.values)
        self._aliases: dict[str, Operand] = {}
        self._rematerializable: dict[str, _Made] = {}
        self._inputs = {i.value.name for i in graph.inputs}
        self._stored: dict[str, Sharding] = {}
        self._fenced: dict[str, Sharding] = {}
        self._pieces: dict[tuple[str, Sharding, str], str] = {}
        self._moved: dict[tuple[str, Sharding], int] = {}
        self._count = 0
        self._sums: set[OpPath] = set()

    @cached_property
    def _weights(self) -> frozenset[str]:
        """The arguments that are no batch, and what is cast of them."""
        weights = [i.value.name for i in self._graph.inputs if i.role is not Role.BATCH]
        return with_casts(map(_ran, self._graph.ops), weights)

    def block(self, inputs: tuple[str, ...], outputs: tuple[str | None, ...]) -> Block:
        """Close the block: join the moves that need not be apart."""
        steps = combine_once(self.instructions, outputs, self._sums)
        moved = move_once(steps, outputs, self._plan.mesh, self._resharder)
        return Block(inputs, tuple(moved), outputs)

    # -- ops -------------------------------------------------------------------------------

    def lower_ops(self, graph: Graph, path: OpPath) -> None:
        """Lower the ops of a graph, in order."""
        compared = set(_compared_with_extremes(graph))
        for i, op in enumerate(graph.ops):
            here = (*path, i)
            if op.kind in _EXTREMES and op.operands[0] in compared:
                self._store(op.operands[0])
            flow = op.control_flow
            if flow is not None and flow.is_remat:
                self._lower_remat(op, flow, here)
            elif op.kind == _BARRIER:
                self._fence(op, op.operands, [r.name for r in op.results])
            elif flow is not None:
                self._lower_loop(op, flow, here)
            elif op.results and op.results[0].name not in self._plan.sharding_of:
                self._rematerializable.update((r.name, _Made(op, here)) for r in op.results)
            else:
                self._lower_op(op, here)

    def _lower_op(self, op: Op, path: OpPath) -> None:
        # 1. How the op's operands and results lie; ops that look alike are asked about once. An op
        #    without an assignment of its own follows its result.
        plan, rule = self._plan, op.rule
        assert rule is not None
        given = plan.assignment_of.get(path)
        homes = tuple([plan.sharding_of[r.name] for r in op.results])
        shared = plan.partials_of.get(path, ()) if given is None else ()
        sharded = self._op_shardings.of(op, rule, given, homes, shared, plan.mesh)
        # 2. Operands are moved there. Ops with an assignment of their own read through the sharding
        #    of all uses of the phase.
        region, line = op.origin.region, op.origin.line
        if op.kind in _SUMS:
            self._sums.add(path)
        operands = tuple(
            [
                self.fetch(o, w, region, line, sharded.through_use)
                for o, w in zip(op.operands, sharded.wanted, strict=True)
            ]
        )
        # 3. The op runs, and results are moved to where they are left.
        names = tuple(
            [
                f"{r.name}.raw" if moved else r.name
                for r, moved in zip(op.results, sharded.moved, strict=True)
            ]
        )
        self.instructions.append(LocalOp(path, operands, names, sharded.wanted, sharded.raw))
        if any(sharded.moved):
            rows = zip(op.results, names, sharded.raw, sharded.homes, sharded.moved, strict=True)
            for value, name, before, after, moved in rows:
                if moved:
                    by = handed_on_by(value) if op.kind in HOST_CALLS else sharded.combiner
                    self._move(value, name, value.name, before, after, region, line, by)

    # -- reading ---------------------------------------------------------------------------

    def fetch(
        self, operand: Operand, wanted: Sharding, region: str, line: str, through_use: bool = False
    ) -> str | None:
        """The name of an operand's piece in a sharding, moved there if need be; None: a literal."""
        asked = operand
        operand = self._resolve(operand)
        if isinstance(operand, Literal):
            return None
        if operand in self._rematerializable:
            return self._make(operand, wanted, region, line, through_use)
        home = self._home(operand)
        if wanted == home:
            return operand
        # A piece is shared within a phase only: the backward pass gathers a weight again.
        phase = self._plan.phase_of(region)
        held = self._pieces.get((operand, wanted, phase))
        if held is not None:
            return held
        # The plan may have one sharding for all uses of a phase: home -> use -> wanted.
        use = self._plan.use_of.get((str(asked), phase), home) if through_use else home
        source, before = operand, home
        if use not in (home, wanted):
            source, before = self.fetch(operand, use, region, line) or operand, use
        value = self._values[operand]
        name = self._piece(operand, wanted, region)
        self._move(value, source, name, before, wanted, region, line)
        return name

    def _piece(self, name: str, wanted: Sharding, region: str) -> str:
        self._count += 1
        piece = f"{name}@{self._count}"
        self._pieces[name, wanted, self._plan.phase_of(region)] = piece
        return piece

    def _home(self, name: str) -> Sharding:
        """The sharding of a value of the plan; one behind a fence needs a sharding of its own."""
        lies = self._plan.sharding_of
        home = self._stored.get(name) or lies.get(name) or self._fenced.get(name)
        if home is None:
            raise GraphError(f"the sharding says nothing of {self._values[name]}")
        return home

    def _resolve(self, operand: Operand) -> Operand:
        while isinstance(operand, str) and operand in self._aliases:
            operand = self._aliases[operand]
        return operand

    def _make(self, name: str, wanted: Sharding, region: str, line: str, through_use: bool) -> str:
        """Make a rematerializable value in a sharding; a partial sum of it by masking."""
        made = self._rematerializable[name]
        held = self._pieces.get((name, wanted, self._plan.phase_of(made.op.origin.region)))
        if held is not None:
            return held
        # Its operands are made or fetched in the sharding that gives the wanted one, as iota over
        # [data] is each device's own part of it: nothing is sent.
        rule = made.op.rule
        assert rule is not None
        position = [r.name for r in made.op.results].index(name)
        whole = Sharding(wanted.dims)
        # A made value can be masked to one device, so it may stand for a term of a partial sum.
        if wanted.partial:
            source = self._make(name, whole, region, line, through_use)
            piece = self._piece(name, wanted, made.op.origin.region)
            self._move(self._values[name], source, piece, whole, wanted, region, line)
            return piece
        asked = tuple(
            operand_of_result(rule, i, whole, False, position) for i in range(len(made.op.operands))
        )
        operands = tuple(
            self.fetch(o, a, region, line, through_use)
            for o, a in zip(made.op.operands, asked, strict=True)
        )
        piece = self._piece(name, wanted, made.op.origin.region)
        results = tuple(piece if r.name == name else f"{piece}.{r.name}" for r in made.op.results)
        shardings = tuple(
            whole if r.name == name else replicated(len(r.shape)) for r in made.op.results
        )
        self.instructions.append(LocalOp(made.path, operands, results, asked, shardings))
        return piece

    def final_sharding(self, operand: Operand, left_partial: bool) -> Sharding:
        """The sharding of an output that is no state: its own, partial only if it is left so."""
        operand = self._resolve(operand)
        if isinstance(operand, Literal):
            return replicated(len(operand.shape))
        if operand in self._rematerializable:
            return replicated(len(self._values[operand].shape))
        sharding = self._home(operand)
        return sharding if left_partial else Sharding(sharding.dims)

    # -- moving ----------------------------------------------------------------------------

    def _move(
        self,
        value: Value,
        source: str,
        result: str,
        before: Sharding,
        after: Sharding,
        region: str,
        line: str,
        combiner: str = "sum",
    ) -> None:
        route = merge_scatters(self._route(value, before, after, combiner))
        repeat = self._moved.get((value.name, after), 0)
        self._moved[value.name, after] = repeat + 1
        self.instructions.append(
            Move(value, source, result, before, after, route.steps, combiner, route.collectives,
                 region, line, repeat)
        )  # fmt: skip

    def _route(self, value: Value, before: Sharding, after: Sharding, combiner: str) -> Route:
        # A maximum is combined at once: only sums may wait, or be scattered.
        if combiner == "sum" or not before.partial:
            return self._resharder.route(value, before, after)
        mesh, prices = self._plan.mesh, self._resharder.prices
        local = before.local_bytes(value, mesh)
        seconds = prices.joined("all-reduce", local, before.partial)
        rest = self._resharder.route(value, Sharding(before.dims), after)
        first = Collective("all-reduce", before.partial, local, seconds)
        return Route(
            (MoveStep("all-reduce", before.partial), *rest.steps),
            (first, *rest.collectives),
            seconds + rest.seconds,
        )

    # -- bodies ----------------------------------------------------------------------------

    def _lower_remat(self, op: Op, flow: ControlFlow, path: OpPath) -> None:
        """Lower a body inline, its inputs fenced so that XLA recomputes instead of reusing.

        An empty body is only a fence, and its last input tells when.
        """
        body = op.graphs[0]
        self._values.update(body.values)
        inputs = [i.value.name for i in body.inputs]
        if flow.fences:
            self._fence(op, op.operands, inputs, tied=not body.ops)
        else:
            self._aliases.update(zip(inputs, map(self._resolve, op.operands), strict=True))
        self.lower_ops(body, (*path, 0))
        for result, output in zip(op.results, body.outputs, strict=True):
            self._aliases[result.name] = output

    def _fence(
        self, op: Op, operands: Sequence[Operand], names: Sequence[str], tied: bool = False
    ) -> None:
        """Give operands other names behind a fence, but for literals and rematerializable values.

        A sum that a loop leaves may have another sharding where it is read: it is moved first.
        Weights have a fence of their own, so that they can be gathered before the rest is there.
        """
        fenced: list[tuple[str, str]] = []
        weights: list[tuple[str, str]] = []
        again = op.graphs[0].ops if op.graphs else ()
        pairs = zip(names, operands, strict=True)
        given = [n for n, o in pairs if self._resolve(o) in self._weights] if again else []
        early = merely_cast(map(_ran, again), given)
        for name, operand in zip(names, operands, strict=True):
            outer = self._resolve(operand)
            # What is made anew behind the fence anyway needs none.
            if isinstance(outer, Literal) or outer in self._rematerializable:
                self._aliases[name] = outer
            else:
                wanted = self._plan.sharding_of.get(name)
                if wanted is None:  # a constant that another part of the step made and handed on
                    wanted = self._fenced[name] = self._home(outer)
                source = self.fetch(outer, wanted, op.origin.region, op.origin.line)
                (weights if name in early else fenced).append((source or outer, name))
        for apart in filter(None, (weights, fenced)):
            sources, results = zip(*apart, strict=True)
            self.instructions.append(Fence(sources, results, tied))

    def _store(self, operand: Operand) -> None:
        """From here on a value is read behind a fence that stores it."""
        name = self._resolve(operand)
        if isinstance(name, Literal) or name in self._rematerializable:
            return
        if name in self._inputs or name in self._stored:  # it lies there already
            return
        kept = f"{name}.stored"
        self._values[kept] = self._values[name]
        self._stored[kept] = self._home(name)
        self._aliases[name] = kept
        self.instructions.append(Fence((name,), (kept,), stored=True))

    def _lower_loop(self, op: Op, flow: ControlFlow, path: OpPath) -> None:
        entries, exits = _loop_shardings(op, flow, self._plan)
        region, line = op.origin.region, op.origin.line
        operands = tuple(
            self.fetch(o, w, region, line) for o, w in zip(op.operands, entries, strict=True)
        )
        bodies = tuple(
            self._block(body, wanted, (*path, b), op)
            for b, (body, wanted) in enumerate(zip(op.graphs, exits, strict=True))
        )
        names = tuple(r.name for r in op.results)
        shardings = tuple(self._plan.sharding_of[n] for n in names)
        self.instructions.append(Loop(path, operands, names, shardings, bodies, flow.trips))

    def _block(self, body: Graph, wanted: Sequence[Sharding], path: OpPath, op: Op) -> Block:
        scope = _Scope(body, self._plan, self._resharder, self._op_shardings)
        scope.lower_ops(body, path)
        outputs = tuple(
            scope.fetch(o, w, op.origin.region, op.origin.line)
            for o, w in zip(body.outputs, wanted, strict=True)
        )
        return scope.block(tuple(i.value.name for i in body.inputs), outputs)


def _compared_with_extremes(graph: Graph) -> Iterator[str]:
    """Values that a graph compares with their own maximum or minimum.

    The gradient of a maximum shares out by where its operand equals it:

        m = reduce_max(h);  where = (h == m);  dh = dm * where / sum(where)

    Were h computed again for the comparison, and its last bit rounded otherwise, nothing would
    equal m, and dh be 0 / 0. So XLA may compute h but once.
    """
    shown: dict[Operand, Operand] = {}  # what only shows another value -> that value
    extremes: dict[Operand, Operand] = {}  # a maximum -> what it is of
    for op in graph.ops:
        if op.kind in _SHOWING:
            shown[op.results[0].name] = shown.get(op.operands[0], op.operands[0])
        elif op.kind in _EXTREMES and op.results[0].is_floating:
            extremes[op.results[0].name] = op.operands[0]
        elif op.kind == "eq":
            one, other = (shown.get(o, o) for o in op.operands)
            for name, extreme in ((one, other), (other, one)):
                of = extremes.get(extreme)
                if of is not None and shown.get(of, of) == name:
                    assert isinstance(of, str)
                    yield of


def _loop_shardings(
    op: Op, flow: ControlFlow, plan: ShardingPlan
) -> tuple[tuple[Sharding, ...], tuple[tuple[Sharding, ...], ...]]:
    """Shardings of a loop's operands on entry, and of the outputs of each of its bodies."""
    sharding_of = plan.sharding_of
    inside: dict[Port, Sharding] = {}  # as a body is given a value or leaves it
    for port in flow.ports:
        if port.inputs:
            body, at = port.inputs[0]
            inside[port] = sharding_of[op.graphs[body].inputs[at].value.name]
        elif port.result is not None:
            outer = sharding_of[op.results[port.result].name]
            inside[port] = Sharding(outer.dims[port.by_row :], outer.partial)
        else:  # which branch runs, and whether to go on
            inside[port] = Sharding(())
    entries = tuple(
        Sharding(((), *s.dims), s.partial) if port.by_row else s
        for port in flow.operands
        for s in (inside[port],)
    )
    return entries, tuple(tuple(inside[port] for port in row) for row in flow.outputs)


# -- the straight lines rewritten ------------------------------------------------------------------


def combine_once(
    steps: Sequence[ListingStep], outputs: Sequence[str | None], sums: Collection[OpPath]
) -> list[ListingStep]:
    """Two partial sums that are only added to each other are added first, and combined then.

    `sums` are the ops that add. Equal moves must take both operands from partial sums; the result
    may itself be an operand of the next.
    """
    uses = _uses(steps, outputs)
    moves: dict[str, Move] = {}
    dropped: set[str] = set()
    kept: list[ListingStep] = []
    for step in steps:
        made: Sequence[ListingStep] = (step,)
        # The sum is made of what the two moves start from; they are dropped, and one follows it.
        if isinstance(step, LocalOp) and step.equation in sums and _alike(step, moves, uses):
            operands, (result,) = [name for name in step.operands if name], step.results
            one, other = (moves[name] for name in operands)
            dropped.update(operands)
            summed, partial = f"{result}.partial", one.before
            value = replace(one.value, name=result)
            made = (
                LocalOp(
                    step.equation, (one.source, other.source), (summed,), (partial,) * 2, (partial,)
                ),
                replace(other, value=value, source=summed, result=result, repeat=0),
            )
        kept += made
        moves.update((m.result, m) for m in made if isinstance(m, Move))
    return [s for s in kept if not (isinstance(s, Move) and s.result in dropped)]


def move_once(
    steps: Sequence[ListingStep],
    outputs: Sequence[str | None],
    mesh: MeshShape,
    resharder: Resharder,
) -> list[ListingStep]:
    """Join two moves of one value into one, if the second makes no larger a piece."""
    uses = _uses(steps, outputs)
    first = {s.result: at for at, s in enumerate(steps) if isinstance(s, Move)}
    kept: list[ListingStep | None] = list(steps)
    for at, step in enumerate(steps):
        if not isinstance(step, Move) or uses[step.source] != 1 or step.source not in first:
            continue
        earlier = kept[first[step.source]]
        if not isinstance(earlier, Move) or not earlier.combiner == step.combiner == "sum":
            continue
        # If c were larger than b, the detour over b would send less.
        shape = earlier.value.shape
        items, later = (math.prod(m.after.shard_shape(shape, mesh)) for m in (earlier, step))
        if later <= items:
            route = merge_scatters(resharder.route(earlier.value, earlier.before, step.after))
            kept[at] = None
            kept[first[step.source]] = replace(
                step, value=earlier.value, source=earlier.source, before=earlier.before,
                steps=route.steps, collectives=route.collectives,
            )  # fmt: skip
            first[step.result] = first[step.source]
    return [s for s in kept if s is not None]


def filters_apart(graph: Graph, block: Block) -> Block:
    """A step whose filters are updated behind a fence.

    The forward and the backward pass of a convolution want its filter in different orders, so that
    XLA for GPUs casts it twice, and makes kernels that read the same arrays one kernel. The second
    cast then waits for the all-reduce of the filter's own gradient, the layers before it wait for
    the cast, and no all-reduce is hidden or combined with another:

        dw = all-reduce(...)                          w' = fence w
        w16, new = kernel(w, dw)  # cast and update   dw = all-reduce(...)
        dx = convolution(dy, w16)                     dx = convolution(dy, kernel(w))
                                                      new = kernel(w', dw)

    So it is where a backward pass reads a filter turned around and not cast. Filters that are
    gathered first are cast before that, by kernels of their own.
    """
    if all(op.kind != _CONVOLUTION for op in graph.walk()):
        return block
    ops = [graph.op_at(s.equation) if isinstance(s, LocalOp) else None for s in block.instructions]
    readers: dict[str | None, list[int]] = {}
    for at, step in enumerate(block.instructions):
        for name in dict.fromkeys(names_read(step)):
            readers.setdefault(name, []).append(at)
    # 1. From the end, what the backward pass or the update runs, or alone reads; and what a
    #    convolution reads as its filter, as it lies or as it is cast.
    late: set[int] = set()
    filters: set[str | None] = set()
    for at, (step, op) in reversed(list(enumerate(zip(block.instructions, ops, strict=True)))):
        if op is None:
            continue
        if op.kind == _CONVOLUTION:
            filters.add(names_read(step)[1])
        elif op.kind in _AS_FILTER:
            filters.update(names_read(step) if filters.intersection(names_made(step)) else ())
        else:
            reading = [other for name in names_made(step) for other in readers.get(name, ())]
            if op.origin.region != "forward" or (reading and late.issuperset(reading)):
                late.add(at)
    # 2. Such work reads filters that are state behind the fence.
    state = (i.value.name for i in graph.inputs if i.role is Role.STATE)
    fenced = {n: f"{n}.late" for n in state if n in filters and late.intersection(readers[n])}
    if not fenced:
        return block
    steps: list[ListingStep] = [Fence(tuple(fenced), tuple(fenced.values()))]
    for at, step in enumerate(block.instructions):
        reads_late = at in late and not fenced.keys().isdisjoint(names_read(step))
        steps.append(_reading(step, fenced) if reads_late else step)
    return replace(block, instructions=tuple(steps))


def gradients_in_rows(graph: Graph, block: Block) -> Block:
    """A step whose filters' gradients are turned over before anything is computed of them.

    cuDNN makes them with the output features outermost, and filters lie with these innermost. XLA
    for GPUs would run the whole update in the order of the gradient: it would read the filter and
    its moments across, write all of them beside the state, and copy them there.

        dw = convolution(x, dy)                         dw = convolution(x, dy)
        new = turned(update(turned(w), dw))             dw' = in rows dw
        copy new into w                                 new = update(w, dw'), in place

    On an H200 such an update took five times what its bytes take, a copy in rows what they take.
    A gradient that is scattered is turned over once only a piece of it is left.
    """
    readers = _readers(block)
    turned: dict[str, Move] = {}  # the last that only moves a gradient -> its copy
    for step in block.instructions:
        if not isinstance(step, LocalOp):
            continue
        op = graph.op_at(step.equation)
        if op.kind != _CONVOLUTION or op.origin.region == "forward":
            continue
        name, value, lies = step.results[0], op.results[0], step.result_shardings[0]
        while len(readers.get(name, ())) == 1 and isinstance(move := readers[name][0], Move):
            name, value, lies = move.result, move.value, move.after
        if _is_gradient(graph, name, readers, block.outputs):
            turned[name] = Move(
                value, name, f"{name}.rows", lies, lies, (MoveStep(IN_ROWS, ()),),
                region=op.origin.region, line=op.origin.line,
            )  # fmt: skip
    if not turned:
        return block
    names = {name: move.result for name, move in turned.items()}
    steps: list[ListingStep] = []
    for step in block.instructions:
        reads = not names.keys().isdisjoint(names_read(step))
        steps.append(_reading(step, names) if reads else step)
        steps.extend(turned[name] for name in names_made(step) if name in turned)
    outputs = tuple([names.get(o, o) if o is not None else None for o in block.outputs])
    return replace(block, instructions=tuple(steps), outputs=outputs)


def _readers(block: Block) -> dict[str | None, list[ListingStep]]:
    """The instructions that read each value, in their order."""
    found: dict[str | None, list[ListingStep]] = {}
    for step in block.instructions:
        for name in dict.fromkeys(names_read(step)):
            found.setdefault(name, []).append(step)
    return found


def _is_gradient(
    graph: Graph,
    name: str,
    readers: Mapping[str | None, Sequence[ListingStep]],
    outputs: Collection[str | None],
) -> bool:
    """True if the step returns a value, or its update alone reads it, cast, summed or moved too."""
    if name in outputs:
        return True
    reading = readers.get(name, ())
    ops = [graph.op_at(s.equation) if isinstance(s, LocalOp) else None for s in reading]
    if any(op is None or op.origin.region != "update" for op in ops):
        (reader, op), *others = zip(reading, ops, strict=True)
        is_handed_on = op.kind in (_CAST, *_SUMS) if op is not None else isinstance(reader, Move)
        made = names_made(reader)
        return not others and is_handed_on and _is_gradient(graph, made[0], readers, outputs)
    return bool(ops)


def _ran(op: Op) -> tuple[str, Sequence[str], Sequence[str]]:
    return op.kind, op.value_operands, [r.name for r in op.results]


def products_swapped(graph: Graph, block: Block) -> Block:
    """A block, and the bodies of its loops, whose batched products lie as they are wanted.

    `jnp.einsum` may write scores as keys times queries and turn them over:

        [batch, heads, keys, queries, groups]  ->  [batch, heads, groups, queries, keys]

    XLA for GPUs then leaves them so through the softmax, which sums up over keys, and turns the
    gradients over, an item at a time where the groups are few. Queries times keys need neither:
    of LLaMA-8B on 8 H100s a step takes 13 % less by XLA's timeline.
    """
    readers = _readers(block)

    def turns(product: Op, name: str) -> Iterator[bool]:
        """True for each reader that turns the product over, behind fences too."""
        if name in block.outputs:
            yield False
        for reader in readers.get(name, []):
            if isinstance(reader, Fence):
                behind = zip(reader.sources, reader.results, strict=False)
                yield from (t for s, r in behind if s == name for t in turns(product, r))
            else:
                op = graph.op_at(reader.equation) if isinstance(reader, LocalOp) else None
                yield op is not None and is_better_swapped(product, op)

    def is_swapped(step: LocalOp) -> bool:
        op = graph.op_at(step.equation)
        if op.kind != "dot_general":
            return False
        found = [*turns(op, step.results[0])]
        return bool(found) and all(found)

    steps: list[ListingStep] = []
    for step in block.instructions:
        if isinstance(step, Loop):
            bodies = tuple([products_swapped(graph, body) for body in step.bodies])
            step = replace(step, bodies=bodies)
        elif isinstance(step, LocalOp) and is_swapped(step):
            step = replace(step, swapped=True)
        steps.append(step)
    return replace(block, instructions=tuple(steps))


def gathers_as_they_lie(graph: Graph, block: Block) -> Block:
    """A block, and the bodies of its loops, whose scans take what is gathered as it lies.

    XLA for GPUs gathers along the dim that lies outermost, and has the operands of a loop in the
    order of their dims. So it writes a gathered stack of weights, or a weight that each trip reads,
    once more, and holds both:

        [a, b/2] [a, b/2]  --all-gather-->  [b, a]  --copy-->  [a, b]  -->  loop

    Handed to the loop with that dim first, and turned back inside, it is not written again: a trip
    cuts a row out of the stack for its product either way. What the body hands to a loop of its own
    would be written for each trip, and is not handed so.
    """
    gathered = {
        step.result: step.steps[-1].dim
        for step in block.instructions
        if isinstance(step, Move) and step.joins_inside("all-gather")
    }

    def turned(loop: Loop) -> Iterator[tuple[int, int]]:
        op = graph.op_at(loop.equation)
        flow = op.control_flow
        if flow is None or flow.kind != "scan" or not flow.trips or op.param("unroll") != 1:
            return
        (body,) = loop.bodies
        inner = {o for step in body.instructions if isinstance(step, Loop) for o in step.operands}
        for k, (name, port) in enumerate(zip(loop.operands, flow.operands, strict=True)):
            handed_on = {body.inputs[place] for _, place in port.inputs} & inner
            if name in gathered and not port.is_carry and not handed_on:
                yield k, gathered[name]

    steps: list[ListingStep] = []
    for step in block.instructions:
        if isinstance(step, Loop):
            bodies = tuple([gathers_as_they_lie(graph, body) for body in step.bodies])
            step = replace(step, bodies=bodies, turned=tuple(turned(step)))
        steps.append(step)
    return replace(block, instructions=tuple(steps))


def sums_in_parts(block: Block, sizes: Sizes, prices: CollectivePrices) -> Block:
    """A block, and the bodies of its loops, whose sums of rows are made by blocks that fill a GPU.

    XLA has one block of a GPU take some columns from the first row to the last, and runs other work
    on the same rows in the same kernel. By its timeline a ResNet of 50 layers takes 7 % less for
    this on 8 H100s, and a narrow GPT in a scan over its layers 20 %.
    """
    found = in_parts(block, sizes, prices)
    steps: list[ListingStep] = []
    for step in block.instructions:
        if isinstance(step, Loop):
            bodies = tuple([sums_in_parts(body, sizes, prices) for body in step.bodies])
            step = replace(step, bodies=bodies)
        elif isinstance(step, LocalOp) and step.results and step.results[0] in found:
            step = replace(step, parts=found[step.results[0]])
        steps.append(step)
    return replace(block, instructions=tuple(steps))


def sums_before_joins(graph: Graph, block: Block) -> Block:
    """A block, and the bodies of its loops, whose long sums are there before they are joined.

    XLA for GPUs computes what is put together in the kernel that does so. There, one thread works
    out all terms of a sum, one after the other. On an H200 such a kernel of a Mamba took 4.8 ms,
    half of what its layer took; to sum in parallel first and then to join takes a tenth of that.
    """
    made: dict[str | None, ListingStep] = {}
    steps: list[ListingStep] = []
    for step in block.instructions:
        made.update((name, step) for name in names_made(step))
        if isinstance(step, Loop):
            bodies = tuple([sums_before_joins(graph, body) for body in step.bodies])
            step = replace(step, bodies=bodies)
        elif isinstance(step, LocalOp) and graph.op_at(step.equation).kind == "concatenate":
            sums = [o for o in step.operands if o is not None and _is_long_sum(graph, o, made)]
            if sums:
                apart = {name: f"{name} summed {step.results[0]}" for name in dict.fromkeys(sums)}
                steps.append(Fence(tuple(apart), tuple(apart.values())))
                step = _reading(step, apart)
        steps.append(step)
    return replace(block, instructions=tuple(steps))


def _is_long_sum(graph: Graph, name: str, made: Mapping[str | None, ListingStep]) -> bool:
    """True of a sum of many terms, or of what is made of such a sum alone, item by item."""
    step = made.get(name)
    if not isinstance(step, LocalOp) or step.operands[:1] == (None,):
        return False
    op = graph.op_at(step.equation)
    terms = [graph.nested_values[o].item_count for o in op.value_operands]
    items = op.results[0].item_count
    if is_reduction(op):
        return max(terms, default=0) >= _LONG_SUM * max(1, items)
    return terms == [items] and _is_long_sum(graph, step.operands[0] or "", made)


def merge_equals(graph: Graph, block: Block) -> Block:
    """A block, and the bodies of its loops, whose equal instructions run once.

    Of a model that a step calls twice the products are planned once; what leads from one to the
    next is equal once it is sharded. Moves of different phases stay apart.
    """
    same: dict[str, str] = {}  # a name -> the first that is equal
    met: dict[Sequence[str | None], ListingStep] = {}  # what is read -> the first that reads it
    first: dict[object, Sequence[str]] = {}  # all that an instruction does -> what it first made
    kept: list[ListingStep] = []
    for step in block.instructions:
        if isinstance(step, Loop):
            bodies = tuple([merge_equals(graph, body) for body in step.bodies])
            step = replace(step, bodies=bodies)
        if not same.keys().isdisjoint(names_read(step)):
            step = _reading(step, same)
        other = met.setdefault(names_read(step), step)
        made = before = names_made(step)
        if other is not step:  # most are told apart by what they read
            first.setdefault(_does(graph, other), names_made(other))
            before = first.setdefault(_does(graph, step), made)
        if before is made:
            kept.append(step)
        else:
            same.update(zip(made, before, strict=True))
    outputs = tuple([same.get(o, o) if o is not None else None for o in block.outputs])
    return Block(block.inputs, tuple(kept), outputs)


def _reading(step: ListingStep, same: Mapping[str, str]) -> ListingStep:
    """An instruction that reads other names."""
    if isinstance(step, Move):
        return replace(step, source=same[step.source])
    if isinstance(step, Fence):
        return replace(step, sources=tuple([same.get(s, s) for s in step.sources]))
    operands = tuple([same.get(o, o) if o is not None else None for o in step.operands])
    return replace(step, operands=operands)


def _does(graph: Graph, step: ListingStep) -> object:
    """A key of all that an instruction does; what it makes for one that stays.

    So do products, which are planned once, and what is made of nothing wherever it is read.
    """
    if isinstance(step, Move):
        return step.source, step.before, step.after, step.steps, step.combiner, step.repeat
    op = graph.op_at(step.equation) if isinstance(step, LocalOp) else None
    if not isinstance(step, LocalOp) or op is None or op.kind not in _TOLD:
        return names_made(step)
    if not (any(step.operands) and (is_fused_into_readers(op) or is_reduction(op))):
        return names_made(step)
    read = list[object]()
    for name, operand in zip(step.operands, op.operands, strict=True):
        if name is None and (isinstance(operand, str) or operand.text == "opaque"):
            return names_made(step)
        read.append(operand if name is None else name)
    types = tuple([(r.shape, r.dtype) for r in op.results])
    return op.kind, op.params, types, tuple(read), step.operand_shardings, step.result_shardings


def merge_scatters(route: Route) -> Route:
    """A route in which an all-reduce that is sliced at once is a reduce-scatter, as to XLA.

    It takes no longer than the pair that was chosen.
    """
    steps: list[MoveStep] = []
    moved: list[Collective] = []
    collectives = iter(route.collectives)
    waiting = list(route.steps)
    while waiting:
        step = waiting.pop(0)
        collective = next(collectives) if step.kind in COLLECTIVES else None
        # One dim must be sliced, by the same axes in the same order.
        slices = waiting[: len(step.axes)]
        slices_dim = all(s.kind == "slice" and s.dim == slices[0].dim for s in slices)
        sliced = tuple(a for s in slices for a in s.axes)
        if step.kind == "all-reduce" and collective and slices_dim and sliced == step.axes:
            del waiting[: len(slices)]
            step = MoveStep("reduce-scatter", step.axes, slices[0].dim)
            collective = replace(collective, kind=step.kind)
        steps.append(step)
        moved += [collective] if collective else []
    return Route(tuple(steps), tuple(moved), route.seconds)


def _alike(run: LocalOp, moves: dict[str, Move], uses: Counter[str | None]) -> bool:
    """True if both operands are combined in the same way, for this sum alone."""
    found = [moves[name] for name in run.operands if name in moves and uses[name] == 1]
    if len(found) != 2:
        return False
    one, other = found
    return (
        bool(one.before.partial)
        and not one.after.partial
        and one.combiner == other.combiner == "sum"
        and (one.before, one.after, one.steps) == (other.before, other.after, other.steps)
        and run.result_shardings == (one.after,)
    )


def _uses(steps: Sequence[ListingStep], outputs: Sequence[str | None]) -> Counter[str | None]:
    """The number of times that each name is read."""
    return Counter(chain(outputs, chain.from_iterable(map(names_read, steps))))
