"""The sharding pass: reads the graph, prices every choice, and takes the cheapest that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.ir.outcome import Outcome
from autopar.ir.sharding import Sharding
from autopar.ir.sharding_plan import ShardingPlan
from autopar.passes.base import Setting
from autopar.passes.shard.assemble import Assembled, assemble
from autopar.passes.shard.base import AbstractSharding
from autopar.passes.shard.choices import group_choices, op_choices
from autopar.passes.shard.decisions import Place, Reading
from autopar.passes.shard.infeasible import memory_error
from autopar.passes.shard.needs import Choice
from autopar.passes.shard.pins import apply_pins
from autopar.passes.shard.read import read_graph
from autopar.passes.shard.recipes import AbstractRecipe, Free
from autopar.passes.shard.solve import Solution, solve


@dataclass(frozen=True)
class Optimal(AbstractSharding):
    """The cheapest sharding within a recipe's restrictions, by integer programming.

    Graphs of more than `share_above` decisions let look-alike ones within `hops` share.
    """

    name: ClassVar[str] = "optimal"
    recipe: AbstractRecipe = field(default_factory=Free)
    share_above: int = 400
    hops: int = 4

    def run(self, given: Graph, setting: Setting) -> ShardingPlan:
        """The plan; raises PinError or MemoryLimitError where there is none."""
        reading = apply_pins(read_graph(given), setting.pins, setting.mesh)
        prices = Prices(setting.cluster, setting.mesh)
        choices = self.recipe.restrict(reading, all_choices(reading, setting.mesh), setting.mesh)
        assembled = assemble(reading, choices, prices, Resharder(prices), setting.memory_bytes)
        solution = solve(assembled.problem, self.share_above, self.hops)
        if not solution.feasible:
            raise memory_error(reading, assembled, setting, self.recipe.name)
        return plan_of(reading, assembled, solution, setting.mesh)


def all_choices(reading: Reading, mesh: MeshShape) -> list[tuple[Choice, ...]]:
    """Every choice of every decision of a reading."""
    found: list[tuple[Choice, ...]] = []
    for decision in reading.decisions:
        rule = decision.op.rule if decision.op is not None else None
        found.append(op_choices(rule, mesh) if rule is not None else group_choices(decision, mesh))
    return found


def plan_of(
    reading: Reading, assembled: Assembled, solution: Solution, mesh: MeshShape
) -> ShardingPlan:
    """What an assignment of a problem means for the values and ops it was assembled from."""
    picked: Sequence[Choice] = [
        options[i] for options, i in zip(assembled.choices, solution.choice, strict=True)
    ]
    values: list[tuple[str, Sharding]] = []
    for name in reading.values:
        standing = reading.standings.get(name)
        if isinstance(standing, Place):
            chosen = picked[standing.decision]
            assert isinstance(chosen, Sharding)
            values.append((name, standing.sharding(chosen)))
    assignments: list[tuple[tuple[int, ...], Assignment]] = []
    for path, node in reading.op_decisions.items():
        chosen = picked[node]
        assert isinstance(chosen, Assignment)
        assignments.append((path, chosen))
    uses: list[tuple[str, str, Sharding]] = []
    for key, node in assembled.uses.items():
        chosen = picked[node]
        assert isinstance(chosen, Sharding)
        uses.append((key.value, key.region, chosen))
    return ShardingPlan(
        mesh,
        tuple(values),
        tuple(assignments),
        tuple(uses),
        tuple(reading.partial_operands.items()),
        Outcome(solution.status, solution.seconds, solution.bound_seconds, solution.sentence),
    )
