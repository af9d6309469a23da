"""A request for a plan: the cluster, the mesh, the passes, the limits and the pins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import Cluster, mesh_shapes
from autopar.cluster.placement import apart
from autopar.ir.compiler_options import CompilerOptions
from autopar.ir.graph import Graph
from autopar.ir.paths import meant
from autopar.ir.plan import Origin, Plan
from autopar.ir.sharding import MeshShape
from autopar.passes.base import Pins, Setting, Watcher
from autopar.passes.pipeline import PassPipeline
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.recipes import AbstractRecipe, recipe_named
from autopar.rules import RuleBook

_SMALL = 1500  # ops


def pins_on(graph: Graph, pins: Pins) -> Pins:
    """The pins of what a graph is given."""
    paths = [i.path for i in graph.inputs]
    return tuple((pattern, dims) for pattern, dims in pins if meant(pattern, paths))


def is_small(graph: Graph) -> bool:
    """True if a graph has so few ops that it can be planned many times."""
    return graph.op_count <= _SMALL


@dataclass(frozen=True)
class Request:
    """The cluster, the mesh (None: searched), the passes, limits and pins to plan for.

    `batch_axes` name arguments whose rows are not on axis 0. `order` has the numbers of the devices
    in the order of a mesh that came with devices of its own. `beside` is the plan of another
    step, whose state is taken as it lies. `compiler_options` are put over those that are chosen.
    """

    cluster: Cluster
    mesh: MeshShape | None = None
    passes: PassPipeline = field(default_factory=PassPipeline)
    memory_bytes: int | None = None
    pins: Pins = ()
    mesh_axes: int = 2
    rules: RuleBook = field(default_factory=RuleBook)
    remat: bool = True
    batch_axes: tuple[tuple[str, int | None], ...] = ()
    order: tuple[int, ...] | None = None
    beside: Plan | None = None
    compiler_options: CompilerOptions = ()

    def origin(self, step: str, graph_key: str, jax: str) -> Origin:
        """The origin of a plan for this request."""
        return Origin(
            step=step,
            graph_key=graph_key,
            cluster=self.cluster.to_toml(),
            cluster_name=self.cluster.name,
            cluster_fingerprint=self.cluster.fingerprint(),
            jax_minor=jax,
            method=self.method,
            memory_bytes=self.budget_bytes,
            pins=self.pins,
        )

    @classmethod
    def of_plan(cls, plan: Plan, cluster: Cluster, rules: RuleBook) -> Request:
        """The request that a saved plan answers: its mesh, or its stages, are given."""
        origin, one = plan.origin, plan.is_one_program
        schedule = None if one else plan.schedule
        passes = PassPipeline.of_options(
            origin.method, len(plan.stages), plan.microbatches, schedule
        )
        mesh = plan.mesh if one else None
        return cls(
            cluster, mesh, passes, origin.memory_bytes, origin.pins, rules=rules,
            compiler_options=plan.compiler_options,
        )  # fmt: skip

    @property
    def shard(self) -> Optimal:
        """The pass in the shard slot."""
        shard = self.passes.shard
        assert isinstance(shard, Optimal)
        return shard

    @property
    def method(self) -> str:
        """The name of the recipe that restricts how anything is sharded."""
        return self.shard.recipe.name

    @property
    def stages(self) -> int | None:
        """The number of stages; None where it is searched."""
        return self.passes.stage.stages

    @property
    def microbatches(self) -> int | None:
        """The number of microbatches; None where it is searched."""
        return self.passes.stage.microbatches

    @property
    def schedule(self) -> str | None:
        """The name of the schedule; None where it is searched."""
        return self.passes.stage.schedule

    def with_method(self, method: str) -> Request:
        """The same by another method."""
        return self.with_recipe(recipe_named(method))

    def with_recipe(self, recipe: AbstractRecipe) -> Request:
        """The same restricted by another recipe."""
        shard = replace(self.shard, recipe=recipe)
        return replace(self, passes=replace(self.passes, shard=shard))

    def of_parts(self) -> Request:
        """The same for parts of the step, of which the recipe may suit only some."""
        return self.with_recipe(self.shard.recipe.of_parts)

    def with_microbatches(self, microbatches: int) -> Request:
        """The same with a single stage in so many microbatches."""
        passes = PassPipeline.of_options(microbatches=microbatches)
        return replace(self, passes=replace(passes, shard=self.shard))

    def meshes_on(self, cluster: Cluster) -> tuple[MeshShape, ...]:
        """The meshes to search on all devices of a cluster: with the pinned axes, where some have.

        Recipes and pins tell axes by their names. To `auto` alone, meshes that differ in the order
        of their axes are one where the links are alike.
        """
        found = mesh_shapes(cluster.device_count, self.mesh_axes)
        if self.method == "auto" and not self.pins:
            return apart(cluster, found)
        named = {a for _, dims in self.pins for axes in dims for a in axes}
        return tuple(mesh for mesh in found if named <= set(mesh.names)) or found

    @property
    def is_one_program(self) -> bool:
        """True if nothing but one program on one mesh is asked for."""
        return self.stages == 1 and self.microbatches == 1

    @property
    def may_be_one_program(self) -> bool:
        """True if one program on one mesh would do."""
        return self.stages in (None, 1) and self.microbatches in (None, 1)

    def setting(
        self, watchers: Sequence[Watcher] = (), mesh: MeshShape = MeshShape((), ())
    ) -> Setting:
        """The setting of passes within the limit, of which no mesh is known yet or this one."""
        return Setting(
            self.cluster, mesh, self.budget_bytes, clock=time.perf_counter, watchers=tuple(watchers)
        )

    @property
    def budget_bytes(self) -> int:
        """Bytes that one device may hold."""
        return self.memory_bytes if self.memory_bytes is not None else self.cluster.memory_bytes
