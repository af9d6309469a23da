"""The use of each mesh axis, and what in the plan shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.inspecting.facts import Facts, Held, Tags
from autopar.inspecting.flow import Flow
from autopar.ir.graph import Graph
from autopar.ir.inspection import AxisRole, AxisUse

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
                what = "Split, and looked up where they lie"
                seen.append(_Seen.of(AxisRole.TENSOR, what, tables, facts.tables, "tables"))
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
    def of(cls, role: AxisRole, what: str, names: Sequence[str], held: Held, things: str) -> _Seen:
        """`names` of what is held show the role, the first of them is named."""
        share = held.share(names)
        told = f"{len(names)} of {len(held.axes)} {things}, {share:.0%} of their bytes"
        return cls(role, share, f"{what}: {told}, such as {names[0]}.")


def _roles(axis: str, facts: Facts) -> Iterator[_Seen]:
    """The roles that something shows, each with the sentence that tells what."""
    experts = facts.experts.over(axis)
    tensor = [name for name in facts.products.over(axis) if name not in experts]
    if tensor:
        what = "Split, and read where they lie"
        yield _Seen.of(AxisRole.TENSOR, what, tensor, facts.products, "weights of products")
    if experts:
        yield _Seen.of(AxisRole.EXPERT, "Experts", experts, facts.experts, "weights of experts")
    yield from _gathered(axis, facts)
    given, rows = facts.batch.over(axis), facts.rows.over(axis)
    if given:
        yield _Seen.of(AxisRole.DATA, "Rows", given, facts.batch, "batch arguments")
    elif rows:
        yield _Seen.of(AxisRole.DATA, "Rows", rows, facts.rows, "activations that have them")
    positions = facts.positions.over(axis)
    if positions:
        things = "activations that have them"
        yield _Seen.of(AxisRole.SEQUENCE, "Positions", positions, facts.positions, things)


def _gathered(axis: str, facts: Facts) -> Iterator[_Seen]:
    whole = facts.gathered.over(axis)
    if whole:
        what = "Lying over it, and gathered to be read"
        yield _Seen.of(AxisRole.FSDP, what, whole, facts.parameters, "parameters")
        return
    shapes = {facts.shapes[name] for name in facts.parameters.over(axis)}
    alone = [name for name in facts.optimizer.over(axis) if facts.shapes[name] not in shapes]
    if alone:
        zero = "ZeRO-2" if axis in facts.scattered else "ZeRO-1"
        what = f"{zero}, lying over it without their parameters"
        things = "tensors of optimizer state"
        yield _Seen.of(AxisRole.FSDP, what, alone, facts.optimizer, things)


def _unused(axis: str, size: int, facts: Facts) -> str:
    if size == 1:
        return "It is of one device."
    held = (facts.parameters, facts.optimizer, facts.rows)
    count, total = sum(len(h.over(axis)) for h in held), sum(len(h.axes) for h in held)
    if count:
        return f"Hardly used: {count} of {total} values lie over it."
    return "Nothing lies over it: its devices do the same."
