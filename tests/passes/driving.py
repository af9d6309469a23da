"""Takes a step all the way: trace, plan with any choices, lower, run on virtual devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.cluster import Cluster, device_order
from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder
from autopar.frontend import StepSpec, TracedStep, build, trace
from autopar.ir.graph import Graph
from autopar.ir.listing import Listing
from autopar.ir.sharding import MeshShape
from autopar.ir.sharding_plan import ShardingPlan
from autopar.passes.base import Setting
from autopar.passes.lower.listing import lower_graph
from autopar.passes.shard.model.assemble import Assembled, assemble
from autopar.passes.shard.model.choices import MeshChoices
from autopar.passes.shard.model.costs import ReshardCosts
from autopar.passes.shard.model.decisions import Reading
from autopar.passes.shard.model.merge_isomorphic import merge_isomorphic, unmerged
from autopar.passes.shard.model.pins import Pins, apply_pins, resolve_pins
from autopar.passes.shard.model.read import read_graph
from autopar.passes.shard.optimal import plan_of
from autopar.passes.shard.solver.solve import Solution, solve
from autopar.rules import attach_rules
from autopar.runtime.bind import bind_mesh, partition_spec
from autopar.runtime.parts import local_function

ROOMY = int(1e12)


@dataclass(frozen=True)
class Traced:
    """A step with its arguments, sealed program and graph."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    step: TracedStep
    graph: Graph

    @property
    def flat(self) -> list[Any]:
        """Arguments and closed-over arrays, flat."""
        return [*jax.tree.leaves(self.args), *self.step.constants]


def traced(fun: Callable[..., Any], *args: Any) -> Traced:
    """A step traced on its arguments, its graph with rules."""
    step = trace(StepSpec(fun), args, {})
    return Traced(fun, args, step, attach_rules(build(step)))


def setting(mesh: Sequence[int] | str, cluster: str = "", memory: int = ROOMY) -> Setting:
    """A mesh on a cluster of as many virtual CPU devices, if no other is named."""
    shape = MeshShape.of(mesh)
    return Setting(Cluster.parse(cluster or f"{shape.device_count}xcpu"), shape, memory)


def assembled(
    graph: Graph, given: Setting, pins: Pins = (), hops: int | None = None
) -> tuple[Reading, Assembled]:
    """The problem of a graph with every choice that there is; look-alikes within hops share."""
    fixed = resolve_pins(graph, pins, given.mesh)
    merged = unmerged(graph) if hops is None else merge_isomorphic(graph, hops, fixed)
    reading = apply_pins(read_graph(merged), fixed, given.mesh)
    prices = Prices(given.cluster, given.mesh)
    choices = MeshChoices(given.mesh).of(reading)
    return reading, assemble(reading, choices, ReshardCosts(prices), given.memory_bytes)


def random_plan(graph: Graph, given: Setting, seed: int, scale: float = 1.0) -> ShardingPlan:
    """A legal plan that nobody would want: `scale` random seconds are added to every choice.

    Every other seed lets ops that look alike at first sight share their decisions.
    """
    reading, whole = assembled(graph, given, hops=1 if seed % 2 else None)
    rng = np.random.default_rng(seed)
    costs = tuple(c + scale * rng.random(len(c)) for c in whole.problem.costs)
    odd = replace(whole.problem, costs=costs)
    solution: Solution = solve(odd)
    return plan_of(reading, whole, solution, given.mesh)


def lowered(graph: Graph, plan: ShardingPlan, given: Setting) -> Listing:
    """The listing of a plan."""
    plan.verify(graph)
    return lower_graph(graph, plan, Resharder(Prices(given.cluster, given.mesh)))


def run_listing(step: Traced, listing: Listing, given: Setting) -> Any:
    """What the listing gives on the step's arguments, as the step's own tree."""
    mesh = given.mesh
    bound = bind_mesh(mesh, device_order(given.cluster, mesh))
    ins = tuple(partition_spec(s) for s in listing.input_shardings)
    outs = tuple(partition_spec(s) for s in listing.output_shardings)
    local = local_function(step.step.program, listing, mesh)
    whole = jax.shard_map(local, mesh=bound, in_specs=ins, out_specs=outs, check_vma=False)
    put = [jax.device_put(x, NamedSharding(bound, p)) for x, p in zip(step.flat, ins, strict=True)]
    out = jax.jit(whole)(*put)
    return jax.tree.unflatten(step.step.out_tree, out)


def largest_error(got: Any, expected: Any) -> float:
    """The largest difference of any leaf, as a share of the leaf's largest entry."""
    worst = 0.0
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        left, right = _numbers(g), _numbers(e)
        if left.shape != right.shape or g.dtype != e.dtype:
            return float("inf")
        if left.size and not np.array_equal(left, right, equal_nan=True):
            size = max(float(np.nanmax(np.abs(right))), 1e-30)
            gap = float(np.max(np.abs(left - right))) / size
            worst = max(worst, gap if np.isfinite(gap) else float("inf"))
    return worst


def _numbers(leaf: Any) -> np.ndarray[Any, Any]:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    wide = np.complex128 if np.iscomplexobj(leaf) else np.float64
    return np.asarray(leaf).astype(wide)
