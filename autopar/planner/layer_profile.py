"""Costs every class of layers on one mesh, in the ways that lie on its front of time and memory.

    seconds |
            |                x    under a tight limit: state and gradients cut up by all axes
            |           x         under the limit of an even share of the memory
            |   x                 without a limit: the fastest; gradients combined once a step
            +------------------ bytes

Each way is costed as it is, with a selective remat and with a full one. A way is found for some
sizes of microbatch, and its costs at others lie on the line through two of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cluster import Cluster
from autopar.cost.prices import Prices
from autopar.cost.stage import StageCost
from autopar.errors import InfeasibleError
from autopar.ir.batching import Batching
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import Remat
from autopar.passes.base import NO_LIMIT_BYTES, Setting
from autopar.passes.shard.model.reshard_costs import ReshardCosts
from autopar.passes.shard.solver.effort import QUICK
from autopar.passes.stage.prices import Option
from autopar.planner.layer_programs import LayerPrograms
from autopar.planner.request import Request
from autopar.planner.stage_costs import cost_parts

_SHARES = (1.0, 0.75)  # of an even share of the memory: the limits of the tight ways

Plans = Mapping[int, ShardingPlan]  # by class of layers
Costs = Mapping[int, tuple[StageCost, StageCost]]  # by class, at two sizes of microbatch


@dataclass(frozen=True)
class ShardingVariant:
    """A sharding of every layer class, with costs at two microbatch sizes to interpolate between.

    Microbatches must be a multiple of `unit` rows. Ops on a single row have other factors than
    those on many, so what is sharded for one row is for no other number.
    """

    partial_sums: bool
    unit: int
    rows: tuple[int, int]
    costs: Mapping[Remat, Costs]
    homes: tuple[int, ...]  # the class of each layer

    def divides(self, rows: int) -> bool:
        """True if microbatches of so many rows may be sharded so."""
        return rows % self.unit == 0 and (rows == 1) == (self.rows == (1, 1))

    def options(self, mesh: MeshShape, rows: int, binds: bool) -> Iterator[Option]:
        """The options for the search at some number of rows, one for each remat that is asked for.

        Where memory does not bind none is: a remat is no way to be faster here.
        """
        for remat in self.costs:
            if remat is Remat.NONE or binds:
                yield Option(mesh, remat, self.layers(rows, remat), self.partial_sums)

    def layers(self, rows: int, remat: Remat) -> tuple[StageCost, ...]:
        """The cost of each layer at some number of rows, on the line through the two sizes."""
        low, high = self.rows
        share = (rows - low) / (high - low) if high > low else 0.0
        costs = {c: pair[0].towards(pair[1], share) for c, pair in self.costs[remat].items()}
        return tuple(costs[c] for c in self.homes)

    def work_seconds(self, rows: int) -> float:
        """Seconds of all layers for one row of such microbatches, one after the other."""
        return sum(layer.each.total for layer in self.layers(rows, Remat.NONE)) / rows

    def most_bytes(self, remat: Remat, in_flight: int = 1) -> int:
        """Bytes that the largest class holds of so many small microbatches."""
        costs = (low for low, _ in self.costs[remat].values())
        return max(c.fixed_bytes + in_flight * c.activation_bytes for c in costs)


class LayerProfiler:
    """Costs every layer class on one mesh; the request's method restricts how it is sharded."""

    def __init__(
        self,
        programs: LayerPrograms,
        cluster: Cluster,
        mesh: MeshShape,
        request: Request,
        setting: Setting,
    ) -> None:
        self._programs = programs
        self._tables = ReshardCosts(Prices(cluster, mesh))
        self._shard = replace(
            request.shard, effort=QUICK, explain=False, reshard_costs=self._tables
        )
        self._remats = tuple(Remat) if request.remat else (Remat.NONE,)
        self._setting = replace(setting, cluster=cluster, mesh=mesh, memory_bytes=NO_LIMIT_BYTES)
        layers = programs.layers
        self._homes = tuple(i if y.same_as < 0 else y.same_as for i, y in enumerate(layers))
        self._classes = tuple(dict.fromkeys(self._homes))

    def roomy(self, rows: int, sizes: Sequence[int]) -> ShardingVariant | None:
        """The fastest way for microbatches of so many rows; None where there is none."""
        return self._found(rows, sizes, replace(self._setting, partial_sums=True))

    def tight(
        self, rows: int, sizes: Sequence[int], budget_bytes: float
    ) -> Iterator[ShardingVariant]:
        """The fastest ways within shares of a layer's budget, as far as there are any."""
        for share in _SHARES:
            limit = int(share * budget_bytes)
            setting = replace(self._setting, memory_bytes=limit, partial_sums=False)
            variant = self._found(rows, sizes, setting)
            if variant is None:
                return
            yield variant

    def _found(self, rows: int, sizes: Sequence[int], setting: Setting) -> ShardingVariant | None:
        """Shards each class; None where one has no plan on this mesh, or within the limit."""
        try:
            plans = {
                c: self._shard.run(self._programs.at(c, rows).joint.graph, setting)
                for c in self._classes
            }
        except InfeasibleError:
            return None
        batching = self._programs.batching
        unit = math.lcm(*(_unit(plan, batching) for plan in plans.values()))
        fewest = -(-max(sizes[0], 2) // unit) * unit
        most = max(sizes[-1], min(2 * fewest, batching.batch))
        priced = (fewest, most) if rows > 1 else (1, 1)
        costs = {remat: self._costs(plans, priced, remat) for remat in self._remats}
        return ShardingVariant(setting.partial_sums, unit, priced, costs, self._homes)

    def _costs(self, plans: Plans, rows: tuple[int, int], remat: Remat) -> Costs:
        return {c: self._both(c, plan, rows, remat) for c, plan in plans.items()}

    def _both(
        self, layer: int, plan: ShardingPlan, rows: tuple[int, int], remat: Remat
    ) -> tuple[StageCost, StageCost]:
        low = self._cost(layer, plan, rows[0], remat)
        if rows[0] == rows[1]:
            return low, low
        # What runs once a step has no rows in it.
        return low, replace(self._cost(layer, plan, rows[1], remat, once=False), once=low.once)

    def _cost(
        self, layer: int, plan: ShardingPlan, rows: int, remat: Remat, once: bool = True
    ) -> StageCost:
        program = self._programs.at(layer, rows, remat)
        parts = program.parts if once else tuple(p for p in program.parts if p.is_looped)
        runs = max(1, self._programs.batching.batch // rows)
        return cost_parts(program.parts, parts, program.joint, plan, self._tables, runs)


def _unit(plan: ShardingPlan, batching: Batching) -> int:
    """Of how many rows a microbatch must be a multiple for a plan to divide them."""
    lies = plan.sharding_of
    sizes = (
        plan.mesh.size(lies[name].dims[rows.dim])
        for name, rows in batching.rows
        if name in lies and lies[name].dims
    )
    return math.lcm(*sizes)
