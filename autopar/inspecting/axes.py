"""The use of each mesh axis, and what in the plan shows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.inspecting.flow import Flow
from autopar.ir.graph import Graph, Op
from autopar.ir.inspection import AxisRole, AxisUse
from autopar.ir.listing import LocalOp, Move
from autopar.ir.rule import Rule
from autopar.ir.sharding import Sharding
from autopar.ir.values import Role
from autopar.rules import HEAVY
from autopar.rules.propagation import Part, Parts, factors_of, propagate, tag_batch

# Of the bytes that could show a role: what shows it here and there only is told of no axis that has
# another.
_FEW = 0.1
_ORDER = (
    AxisRole.TENSOR, AxisRole.EXPERT, AxisRole.SEQUENCE, AxisRole.FSDP, AxisRole.DATA,
    AxisRole.REPLICA,
)  # fmt: skip


def axis_uses(graph: Graph, flows: Sequence[Flow]) -> tuple[AxisUse, ...]:
    """The roles of every axis of every submesh; `graph` is the step, or its microbatch.

    Roles that most of what could show them does show come first, of these the ones that change the
    plain program most.
    """
    tags = Tags.of(graph, flows)
    uses: list[AxisUse] = []
    for submesh in sorted({f.listed.submesh for f in flows}):
        own = [f for f in flows if f.listed.submesh == submesh]
        mesh, facts = own[0].listed.sharding.mesh, Facts.of(own, tags)
        for axis, size in zip(mesh.names, mesh.sizes, strict=True):
            seen = [*_roles(axis, facts)] if size > 1 else []
            # An axis that nothing but a look-up in a split table uses.
            tables = facts.tables.over(axis)
            if tables and not seen and size > 1:
                what = (
                    "embedding tables",
                    "are sharded and used without an all-gather",
                )
                seen.append(_Seen.of(AxisRole.TENSOR, tables, facts.tables, *what))
            # Roles that most show before others, each in order; but for those that few show.
            seen.sort(key=lambda s: (s.share < 0.5, _ORDER.index(s.role)))
            seen = [s for s in seen if s.share >= _FEW] or seen[:1]
            seen = seen or [_Seen(AxisRole.REPLICA, 0.0, _unused(axis, size, facts))]
            roles = tuple(s.role for s in seen)
            uses.append(AxisUse(submesh, axis, size, roles, tuple(s.sentence for s in seen)))
    return tuple(uses)


@dataclass(frozen=True)
class _Seen:
    """A role, the share of the bytes of what could show it that does, and that as a sentence."""

    role: AxisRole
    share: float
    sentence: str

    @classmethod
    def of(cls, role: AxisRole, names: Sequence[str], held: Spread, things: str, how: str) -> _Seen:
        """`names` of what is held show the role, the first of them is named."""
        share = held.share(names)
        text = f"{len(names)} of {len(held.axes)} {things} ({share:.0%} of their bytes)"
        return cls(role, share, f"{_SAID[role]}: {text} {how}, such as {names[0]}.")


_SAID = {
    AxisRole.DATA: "Data parallel",
    AxisRole.FSDP: "FSDP",
    AxisRole.TENSOR: "Tensor parallel",
    AxisRole.SEQUENCE: "Sequence parallel",
    AxisRole.EXPERT: "Expert parallel",
}


def _roles(axis: str, facts: Facts) -> Iterator[_Seen]:
    """The roles that something shows, each with the sentence that tells what."""
    experts = facts.experts.over(axis)
    tensor = [name for name in facts.products.over(axis) if name not in experts]
    if tensor:
        what = "weights of products", "are sharded and used without an all-gather"
        yield _Seen.of(AxisRole.TENSOR, tensor, facts.products, *what)
    if experts:
        what = "weights of experts", "are sharded and used without an all-gather"
        yield _Seen.of(AxisRole.EXPERT, experts, facts.experts, *what)
    yield from _gathered(axis, facts)
    given, rows = facts.batch.over(axis), facts.rows.over(axis)
    if given:
        what = "batch arguments", "are sharded by rows"
        yield _Seen.of(AxisRole.DATA, given, facts.batch, *what)
    elif rows:
        what = "activations with batch rows", "are sharded by rows"
        yield _Seen.of(AxisRole.DATA, rows, facts.rows, *what)
    positions = facts.positions.over(axis)
    if positions:
        what = "activations with positions", "are sharded along the sequence"
        yield _Seen.of(AxisRole.SEQUENCE, positions, facts.positions, *what)


def _gathered(axis: str, facts: Facts) -> Iterator[_Seen]:
    whole = facts.gathered.over(axis)
    if whole:
        what = "parameters", "are sharded over this axis and all-gathered before use"
        yield _Seen.of(AxisRole.FSDP, whole, facts.parameters, *what)
        return
    shapes = {facts.shapes[name] for name in facts.parameters.over(axis)}
    alone = [name for name in facts.optimizer.over(axis) if facts.shapes[name] not in shapes]
    if alone:
        zero = "ZeRO-2" if axis in facts.scattered else "ZeRO-1"
        what = "tensors of optimizer state", f"are sharded and their parameters are not ({zero})"
        yield _Seen.of(AxisRole.FSDP, alone, facts.optimizer, *what)


def _unused(axis: str, size: int, facts: Facts) -> str:
    if size == 1:
        return "It has one device."
    held = (facts.parameters, facts.optimizer, facts.rows)
    count, total = sum(len(h.over(axis)) for h in held), sum(len(h.axes) for h in held)
    if count:
        return f"Hardly used: {count} of {total} values are sharded over this axis."
    return "Unused: nothing is sharded over this axis, so its devices do the same work."


# -- tensors over the axes of a submesh: arguments, weights as they are read, activations ---------

_LOOK_UP = "gather"


@dataclass(frozen=True)
class Tags:
    """Dims of values of the step that are rows of the batch, or positions."""

    rows: Mapping[str, Parts]
    positions: Mapping[str, Parts]

    @classmethod
    def of(cls, graph: Graph, flows: Sequence[Flow]) -> Tags:
        """Both followed from the batch; positions are the dim after its rows, but for features."""
        rows = tag_batch(graph).parts
        positions: dict[str, Parts] = {}
        for given in graph.inputs:
            value = given.value
            if given.role is Role.BATCH and value.name in rows and len(value.shape) > 1:
                found = propagate(graph, {value.name: (Part(1, value.shape[1]),)})
                if not any(_meets_weight(flow, found) for flow in flows):
                    positions.update(found)
        return cls(rows, positions)


@dataclass
class Spread:
    """Things spread over axes, the largest first to be named: name -> axes, and bytes."""

    axes: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    nbytes: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, name: str, nbytes: int, axes: Iterable[str]) -> None:
        """Add a tensor, or more axes of one."""
        self.axes[name] = self.axes.get(name, frozenset()) | frozenset(axes)
        self.nbytes[name] = nbytes

    def over(self, axis: str) -> list[str]:
        """Those that lie over an axis, the largest first."""
        found = [name for name, axes in self.axes.items() if axis in axes]
        return sorted(found, key=lambda name: -self.nbytes[name])

    def share(self, names: Iterable[str]) -> float:
        """The share of all bytes that some have."""
        return sum(self.nbytes[name] for name in names) / max(1, sum(self.nbytes.values()))


@dataclass
class Facts:
    """Tensors that lie over the axes of one submesh.

    `gathered` are parameters by the axes over which they are made whole before the update;
    `products` weights by the axes over which matrix products read them as they lie, `experts` by
    those on a dim that chooses among weights. `shapes` are of parameters and optimizer state;
    sums over devices are `scattered` over some axes.
    """

    batch: Spread = field(default_factory=Spread)
    parameters: Spread = field(default_factory=Spread)
    optimizer: Spread = field(default_factory=Spread)
    gathered: Spread = field(default_factory=Spread)
    products: Spread = field(default_factory=Spread)
    experts: Spread = field(default_factory=Spread)
    tables: Spread = field(default_factory=Spread)
    rows: Spread = field(default_factory=Spread)
    positions: Spread = field(default_factory=Spread)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    scattered: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, flows: Sequence[Flow], tags: Tags) -> Facts:
        """Read off the listings of a submesh."""
        facts = cls()
        trained = {path for flow in flows for path in flow.read_before_update}
        for flow in flows:
            facts._note_arguments(flow, trained)
            facts._note_moves(flow)
            facts._note_products(flow)
            facts._note_activations(flow, tags)
        return facts

    def _note_arguments(self, flow: Flow, trained: set[str]) -> None:
        graph, shardings = flow.listed.graph, flow.listed.listing.input_shardings
        for given, sharding in zip(graph.inputs, shardings, strict=True):
            value, path = given.value, given.path
            if not path or not value.shape:
                continue
            if given.role is Role.BATCH:
                self.batch.add(path, value.nbytes, sharding.dims[0])
            elif path in trained:
                self.parameters.add(path, value.nbytes, _axes(sharding))
                self.shapes[path] = value.shape
            else:
                self.optimizer.add(path, value.nbytes, _axes(sharding))
                self.shapes[path] = value.shape

    def _note_moves(self, flow: Flow) -> None:
        for move, _ in flow.steps:
            if not isinstance(move, Move):
                continue
            reduced = (c.axes for c in move.collectives if c.kind == "reduce-scatter")
            self.scattered.update(a for axes in reduced for a in axes)
            path = flow.paths.get(move.source, "")
            if path in self.parameters.axes and move.region != "update":
                whole = _axes(move.before) - _axes(move.after)
                self.gathered.add(path, self.parameters.nbytes[path], sorted(whole))

    def _note_products(self, flow: Flow) -> None:
        for run, op, rule in _products(flow):
            for i, path in _weights(flow, run):
                choosing, nbytes = _choosing(rule, i), self.parameters.nbytes.get(path, 0)
                dims = zip(run.operand_shardings[i].dims, rule.operands[i], strict=True)
                for axes, dim in dims:
                    held = self.experts if choosing.intersection(dim) else self.products
                    held = self.tables if op.kind == _LOOK_UP else held
                    held.add(path, nbytes, axes)

    def _note_activations(self, flow: Flow, tags: Tags) -> None:
        for run, _ in flow.steps:
            if not isinstance(run, LocalOp) or flow.op(run).origin.region != "forward":
                continue
            op = flow.op(run)
            for name, value, sharding in zip(
                run.results, op.results, run.result_shardings, strict=True
            ):
                for held, parts in ((self.rows, tags.rows), (self.positions, tags.positions)):
                    if value.name in parts and value.is_floating:
                        text = f"{flow.subject(name)} {value.type_text} ({name})"
                        over = [a for d, _ in parts[value.name] for a in sharding.dims[d]]
                        held.add(text, value.nbytes, over)


def _axes(sharding: Sharding) -> frozenset[str]:
    return frozenset(a for dim in sharding.dims for a in dim)


def _products(flow: Flow) -> Iterator[tuple[LocalOp, Op, Rule]]:
    """Matrix products, and look-ups in tables."""
    for step, _ in flow.steps:
        if isinstance(step, LocalOp):
            op = flow.op(step)
            is_product = op.kind in HEAVY or op.kind == _LOOK_UP
            if is_product and op.origin.region != "update" and op.rule is not None:
                yield step, op, op.rule


def _weights(flow: Flow, run: LocalOp) -> Iterator[tuple[int, str]]:
    """The operands of an op that are pieces of arguments which are no batch, and their paths."""
    for i, name in enumerate(run.operands):
        path = flow.paths.get(name or "", "")
        if path and path not in flow.batch_paths:
            yield i, path


def _choosing(rule: Rule, weight: int) -> set[int]:
    """The factors of a product's weight that choose among weights: they are neither summed nor new.

    They are dims of the whole product, or of the weight alone where rows come in groups.
    """
    mine = {f for dim in rule.operands[weight] for f in dim if rule.factors[f].size > 1}
    others = [dims for i, dims in enumerate(rule.operands) if i != weight]
    read, made = ({f for dims in ts for dim in dims for f in dim} for ts in (others, rule.results))
    return {f for f in mine if (f in read) == (f in made)}


def _meets_weight(flow: Flow, parts: Mapping[str, Parts]) -> bool:
    """True if a product sums a tagged dim with a dim of a weight: then it is one of features."""
    for run, op, rule in _products(flow):
        made = {f for dim in rule.results[0] for f in dim}
        summed = {f for f, _ in factors_of(rule, op, parts)} - made
        if any(
            summed.intersection(dim) for i, _ in _weights(flow, run) for dim in rule.operands[i]
        ):
            return True
    return False
