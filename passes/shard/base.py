"""The contract of a sharding pass: a graph with rules in, a sharding of everything out."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Graph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.passes.base import AbstractPass


@dataclass(frozen=True)
class AbstractSharding(AbstractPass[Graph, ShardingPlan]):
    """Chooses a sharding for every value and op of a graph on one mesh."""
