"""The sharding that holds the least, whatever it costs: what is left where nothing else fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from autopar.ir.graph import Graph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.passes.base import Setting
from autopar.passes.shard.base import AbstractSharding
from autopar.passes.shard.floor import known_solution
from autopar.passes.shard.infeasible import lightest
from autopar.passes.shard.model.reshard_costs import ReshardCosts
from autopar.passes.shard.optimal import Optimal, counted, plan_of, weigher
from autopar.passes.shard.recipes import AbstractRecipe, Free


@dataclass(frozen=True)
class Lightest(AbstractSharding):
    """The least peak that was found within a recipe's restrictions; the limit is not looked at."""

    name: ClassVar[str] = "lightest"
    recipe: AbstractRecipe = field(default_factory=Free)
    tables: ReshardCosts | None = field(default=None, compare=False)

    def run(self, given: Graph, setting: Setting) -> ShardingPlan:
        """The plan; raises PinError or InfeasibleError where there is none at all."""
        optimal = Optimal(recipe=self.recipe, tables=self.tables)
        posed = optimal.pose(given, counted(setting), setting.pins, self.recipe)
        problem = posed.assembled.problem
        choice, _ = lightest(posed, weigher(given, setting))
        if problem.costs and not choice:
            raise optimal.refusal(given, setting)
        solution = known_solution(problem, choice, "What holds the least.")
        return plan_of(posed.reading, posed.assembled, solution, setting.mesh)
