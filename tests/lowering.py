"""Listings of graphs that are proven to compute what the graph does."""

from collections.abc import Collection

from autopar.cost.reshard import Resharder
from autopar.ir.graph import Graph
from autopar.ir.listing import Listing
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.soundness import ListingChecker
from autopar.passes.lower.listing import lower_graph


def lower_checked(
    graph: Graph, plan: ShardingPlan, resharder: Resharder, left_partial: Collection[str] = ()
) -> Listing:
    """Lowers as `lower_graph`; raises GraphError where that would compute something else."""
    listing = lower_graph(graph, plan, resharder, left_partial)
    ListingChecker(plan.mesh).check(graph, listing)
    return listing
