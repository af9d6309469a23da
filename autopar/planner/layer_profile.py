"""Shards every class of layers on one mesh, and prices it at two sizes of microbatch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cluster import Cluster
from autopar.cost.prices import Prices
from autopar.errors import InfeasibleError
from autopar.ir.batching import Batching
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding_plan import ShardingPlan
from autopar.passes.base import Setting
from autopar.passes.shard.model.reshard_costs import ReshardCosts
from autopar.passes.shard.recipes import recipe_named
from autopar.passes.shard.solver.effort import QUICK
from autopar.passes.stage.prices import LayerPrice, Option
from autopar.planner.layer_programs import LayerPrograms, Line
from autopar.planner.request import Request
from autopar.planner.stage_costs import StageCosts, stage_costs

_ROOMY = 2**60  # bytes that bind nothing

Plans = Mapping[int, ShardingPlan]  # by class of layers


@dataclass(frozen=True)
class ShardingVariant:
    """A sharding of every layer class, with costs at two microbatch sizes to interpolate between.

    Microbatches must be a multiple of `unit` rows. Ops on a single row have other factors than
    those on many, so what is sharded for one row is for no other number.
    """

    recipe: str
    partial_sums: bool
    unit: int
    rows: tuple[int, int]
    costs: Mapping[int, tuple[StageCosts, StageCosts]]  # by class
    homes: tuple[int, ...]  # the class of each layer

    def divides(self, rows: int) -> bool:
        """True if microbatches of so many rows may be sharded so."""
        return rows % self.unit == 0 and (rows == 1) == (self.rows == (1, 1))

    def options(self, mesh: MeshShape, rows: int, remat: bool) -> Iterator[Option]:
        """The options for the search at some number of rows, with and without recomputation."""
        at = Line.through(*self.rows, rows)
        prices = {c: _price(*costs, at) for c, costs in self.costs.items()}
        yield Option(
            mesh, False, tuple(prices[c] for c in self.homes), self.recipe, self.partial_sums
        )
        if remat:
            again = {c: _recomputed(prices[c], *costs, at) for c, costs in self.costs.items()}
            yield Option(
                mesh, True, tuple(again[c] for c in self.homes), self.recipe, self.partial_sums
            )


class LayerProfiler:
    """Prices every layer class on one mesh; the request's method restricts how it is sharded."""

    def __init__(
        self,
        apart: LayerPrograms,
        cluster: Cluster,
        mesh: MeshShape,
        request: Request,
        setting: Setting,
    ) -> None:
        self._apart = apart
        self._recipe, self._shard = request.method, request.shard
        self._tables = ReshardCosts(Prices(cluster, mesh))
        self._setting = replace(setting, cluster=cluster, mesh=mesh, memory_bytes=_ROOMY)
        layers = apart.layers
        self._homes = tuple(i if y.same_as < 0 else y.same_as for i, y in enumerate(layers))
        self._classes = tuple(dict.fromkeys(self._homes))

    def ways(self, sizes: Sequence[int], budget_bytes: float) -> Iterator[ShardingVariant]:
        """The cheapest ways, and recipes that hold less where those are not within the budget.

        The cheapest for each of some `sizes` of microbatch, in rows, which rise; `budget_bytes` is
        a layer's.
        """
        met: set[int] = set()
        tight = False
        for rows in reversed(sizes):
            way = self._tried(rows, sizes, self._recipe, partial_sums=True)
            if way is not None:
                tight = tight or _most_bytes(way) > budget_bytes
                if way.unit not in met:
                    met.add(way.unit)
                    yield way
            if tight and len(self._setting.mesh.names) > 1:
                break  # recipes for small microbatches follow
        if tight and self._recipe == "auto":
            yield from self._lean(sizes)

    def _lean(self, sizes: Sequence[int]) -> Iterator[ShardingVariant]:
        """Recipes that cut up parameters, optimizer state and the sums of gradients.

        Over tensor dims it takes no more than one row, over rows as many as there are devices.
        """
        mixed = "fsdp" if len(self._setting.mesh.names) < 2 else "fsdp+tp"
        for recipe, rows in (("megatron", sizes[0]), (mixed, sizes[-1])):
            way = self._tried(rows, sizes, recipe, partial_sums=False)
            if way is not None:
                yield way

    def _tried(
        self, rows: int, sizes: Sequence[int], recipe: str, partial_sums: bool
    ) -> ShardingVariant | None:
        """Shards each class by a recipe; None where it has no plan on this mesh."""
        shard = replace(
            self._shard, recipe=recipe_named(recipe), effort=QUICK, explain=False,
            reshard_costs=self._tables,
        )  # fmt: skip
        setting = replace(self._setting, partial_sums=partial_sums)
        try:
            plans = {
                c: shard.run(self._apart.at(c, rows).joint.graph, setting) for c in self._classes
            }
        except InfeasibleError:
            return None
        unit, priced, costs = self._priced(rows, sizes, plans)
        return ShardingVariant(recipe, partial_sums, unit, priced, costs, self._homes)

    def _priced(
        self, solved: int, sizes: Sequence[int], plans: Plans
    ) -> tuple[int, tuple[int, int], Mapping[int, tuple[StageCosts, StageCosts]]]:
        """The unit of rows, the two numbers of rows that are priced, and the costs by class."""
        unit = math.lcm(*(_unit(plan, self._apart.batching) for plan in plans.values()))
        fewest = -(-max(sizes[0], 2) // unit) * unit
        most = max(sizes[-1], min(2 * fewest, self._apart.batching.batch))
        rows = (fewest, most) if solved > 1 else (1, 1)
        return unit, rows, {c: self._both(c, plan, rows) for c, plan in plans.items()}

    def _both(
        self, layer: int, plan: ShardingPlan, rows: tuple[int, int]
    ) -> tuple[StageCosts, StageCosts]:
        low = self._costs(layer, plan, rows[0])
        if rows[0] == rows[1]:
            return low, low
        # What runs once a step has no rows in it.
        return low, replace(self._costs(layer, plan, rows[1], once=False), once=low.once)

    def _costs(self, layer: int, plan: ShardingPlan, rows: int, once: bool = True) -> StageCosts:
        alone = self._apart.at(layer, rows)
        parts = alone.parts if once else tuple(p for p in alone.parts if p.is_looped)
        runs = max(1, self._apart.batching.batch // rows)
        return stage_costs(alone.parts, parts, alone.joint, plan, self._tables, runs)


def _most_bytes(way: ShardingVariant) -> float:
    """Bytes that the largest class holds of one small microbatch."""
    smallest: Sequence[StageCosts] = [low for low, _ in way.costs.values()]
    return max(c.fixed_bytes + c.activation_bytes for c in smallest)


def _unit(plan: ShardingPlan, batching: Batching) -> int:
    """Of how many rows a microbatch must be a multiple for a plan to divide them."""
    lies = plan.sharding_of
    sizes = (
        plan.mesh.size(lies[name].dims[rows.dim])
        for name, rows in batching.rows
        if name in lies and lies[name].dims
    )
    return math.lcm(*sizes)


def _price(low: StageCosts, high: StageCosts, at: Line) -> LayerPrice:
    return LayerPrice(
        forward_seconds=at.value(low.forward.total, high.forward.total),
        input_gradient_seconds=at.value(low.input_gradient.total, high.input_gradient.total),
        weight_gradient_seconds=at.value(low.weight_gradient.total, high.weight_gradient.total),
        once_seconds=at.value(low.once.total, high.once.total),
        fixed_bytes=round(at.value(low.fixed_bytes, high.fixed_bytes)),
        activation_bytes=round(at.value(low.activation_bytes, high.activation_bytes)),
        kept_bytes=round(at.value(low.kept_bytes, high.kept_bytes)),
        working_bytes=round(at.value(low.working_bytes, high.working_bytes)),
    )


def _recomputed(price: LayerPrice, low: StageCosts, high: StageCosts, at: Line) -> LayerPrice:
    """With the forward run again: of each microbatch only what enters the layer is kept."""
    entering = round(at.value(low.entering_bytes, high.entering_bytes))
    return replace(
        price,
        input_gradient_seconds=price.input_gradient_seconds + price.forward_seconds,
        activation_bytes=entering,
        kept_bytes=entering,
        working_bytes=price.working_bytes + price.activation_bytes,
    )
