"""Costs of a stage's parts on one device of its submesh: seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.listing import Seconds
from autopar.cost.memory import Held, held_bytes
from autopar.cost.overlap import Timed, moved_seconds, timed_listing
from autopar.ir.batching import Accumulator
from autopar.ir.peak import Peak
from autopar.ir.plan import Traffic, traffic_of
from autopar.ir.program import Part, PartKind, SubmeshGraph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.spmd import SpmdProgram
from autopar.ir.values import Role, Value, item_bytes
from autopar.passes.lower.partition.submesh_graph import left_partial, part_plan
from autopar.passes.lower.spmd import lower_spmd
from autopar.passes.shard.model.reshard_costs import ReshardCosts

_ONCE = (PartKind.WHOLE, PartKind.HOIST, PartKind.SETUP, PartKind.UPDATE)
_INWARD = (PartKind.BACKWARD, PartKind.INPUT_GRADIENT)


@dataclass(frozen=True)
class StageCosts:
    """Seconds of one microbatch by kind of part, and of a step; bytes of one device.

    `fixed_bytes` are held throughout: arguments, what is set up once, accumulators.
    `activation_bytes` are kept from a microbatch's forward to its backward, `kept_bytes` of them
    until its weight gradients, `entering_bytes` of them come from other stages. `working_bytes` are
    the most that a part holds beside all that. A step that is one program runs once a step, and has
    a `peak` that tells what is held then.
    """

    forward: Seconds
    input_gradient: Seconds
    weight_gradient: Seconds
    once: Seconds
    fixed_bytes: int
    activation_bytes: int
    kept_bytes: int
    entering_bytes: int
    working_bytes: int
    traffic: tuple[tuple[Traffic, int], ...]  # with how often a step runs the part it is of
    peak: Peak | None = None

    @classmethod
    def of_whole_step(cls, listing: SpmdProgram, held: Held, timed: Timed) -> StageCosts:
        """The costs of a step that is one program."""
        none = Seconds()
        traffic = traffic_of(listing, moved_seconds(timed))
        working = held.peak_bytes - held.argument_bytes
        return cls(
            none, none, none, timed.seconds, held.argument_bytes, 0, 0, 0, working,
            tuple((t, 1) for t in traffic), held.peak,
        )  # fmt: skip

    def of_step(self, microbatches: int) -> Seconds:
        """Seconds of a step, all work one after the other."""
        each = self.forward + self.input_gradient + self.weight_gradient
        return each.times(microbatches) + self.once


def stage_costs(
    parts: Sequence[Part],
    timed: Sequence[Part],
    joint: SubmeshGraph,
    plan: ShardingPlan,
    tables: ReshardCosts,
    runs: int,
) -> StageCosts:
    """The costs of one stage's parts, of which a step runs the loop's `runs` times.

    Only those that are `timed` are run in thought; the others count as holding nothing more.
    """
    spent = {kind: Seconds() for kind in PartKind}
    platform = tables.prices.cluster.chip.platform
    working, traffic = 0, list[tuple[Traffic, int]]()
    for part in timed:
        if part.kind is PartKind.WHOLE:
            listing = lower_spmd(part.graph, plan, tables.resharder)
            held = held_bytes(part.graph, listing, plan.mesh, platform)
            timing = timed_listing(part.graph, listing, tables.prices)
            return StageCosts.of_whole_step(listing, held, timing)
        own, loose = part_plan(part, joint, plan), left_partial(part, joint)
        listing = lower_spmd(part.graph, own, tables.resharder, loose)
        run = timed_listing(part.graph, listing, tables.prices)
        spent[part.kind] += run.seconds
        held = held_bytes(part.graph, listing, plan.mesh, platform)
        working = max(working, held.peak_bytes - held.argument_bytes)
        often = 1 if part.kind in _ONCE else runs
        traffic += [(t, often) for t in traffic_of(listing, moved_seconds(run))]
    weigh = _Scale(joint, plan)
    stashed = set(joint.stashed)
    kept = {name for p in parts if p.kind is PartKind.WEIGHT_GRADIENT for name in _read(p)}
    entering = {i.value.name for i in joint.graph.inputs} & stashed
    return StageCosts(
        forward=spent[PartKind.FORWARD],
        input_gradient=sum((spent[k] for k in _INWARD), Seconds()),
        weight_gradient=spent[PartKind.WEIGHT_GRADIENT],
        once=sum((spent[k] for k in _ONCE), Seconds()),
        fixed_bytes=weigh.fixed(parts),
        activation_bytes=weigh.of(stashed),
        kept_bytes=weigh.of(stashed & kept),
        entering_bytes=weigh.of(entering),
        working_bytes=working,
        traffic=tuple(traffic),
    )


def peak_bytes(costs: Sequence[StageCosts], flight: int) -> int:
    """The most that a device holds for its stages, so many microbatches in flight."""
    held = sum(c.fixed_bytes + flight * c.activation_bytes for c in costs)
    return held + max((c.working_bytes for c in costs), default=0)


class _Scale:
    """Weighs values of a joint graph on one device."""

    def __init__(self, joint: SubmeshGraph, plan: ShardingPlan) -> None:
        self._joint, self._plan = joint, plan
        self._values = joint.graph.nested_values

    def of(self, names: set[str]) -> int:
        """Bytes of some values' pieces."""
        return sum(self._piece(self._values[n], self._values[n].dtype) for n in sorted(names))

    def fixed(self, parts: Sequence[Part]) -> int:
        """Bytes that are there throughout a step: state, constants, set-up values, accumulators."""
        lasting = {
            i.value.name for i in self._joint.graph.inputs if i.role is not Role.BATCH and i.path
        }
        made = (p for p in parts if p.kind is PartKind.SETUP)
        lasting.update(o for p in made for o in p.graph.outputs if isinstance(o, str))
        sums = {a.value: a for p in parts for a in p.accumulators}
        return self.of(lasting) + sum(self._sum(a) for _, a in sorted(sums.items()))

    def _sum(self, accumulator: Accumulator) -> int:
        value = self._values[accumulator.value]
        return self._piece(value, accumulator.dtype or value.dtype)

    def _piece(self, value: Value, dtype: str) -> int:
        sharding = self._plan.sharding_of.get(value.name)
        count = value.item_count
        if sharding is not None:
            count = count // self._plan.mesh.size([a for dim in sharding.dims for a in dim])
        return count * item_bytes(dtype)


def _read(part: Part) -> list[str]:
    return [i.value.name for i in part.graph.inputs]
