"""A request for a plan: the cluster, the mesh, the passes, the limits and the pins."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.cluster import Cluster
from autopar.errors import InputError
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.ir.paths import meant
from autopar.ir.plan import Origin, Plan
from autopar.passes.batch.base import AbstractBatching
from autopar.passes.batch.exact import Exact
from autopar.passes.batch.identity import Whole
from autopar.passes.layer.base import AbstractLayering
from autopar.passes.layer.min_cut import MinCut
from autopar.passes.layer.single import Single
from autopar.passes.pipeline import PassPipeline
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.recipes import recipe_named
from autopar.passes.stage.one_stage import One
from autopar.passes.stage.search import Search
from autopar.rules import RuleBook

Pins = tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]


def pins_on(graph: Graph, pins: Pins) -> Pins:
    """The pins of what a graph is given."""
    paths = [i.path for i in graph.inputs]
    return tuple((pattern, dims) for pattern, dims in pins if meant(pattern, paths))


@dataclass(frozen=True)
class Request:
    """The cluster, the mesh (None: searched), the method, limits and pins to plan for.

    `stages`, `microbatches` and `schedule` are None where they are searched; `batch_axes` name
    arguments whose rows are not on axis 0. `order` has the numbers of the devices in the order of
    a mesh that came with devices of its own.
    """

    cluster: Cluster
    mesh: MeshShape | None = None
    method: str = "auto"
    memory_bytes: int | None = None
    pins: Pins = ()
    mesh_axes: int = 2
    rules: RuleBook = field(default_factory=RuleBook)
    remat: bool = True
    stages: int | None = 1
    microbatches: int | None = 1
    schedule: str | None = None
    batch_axes: tuple[tuple[str, int | None], ...] = ()
    order: tuple[int, ...] | None = None
    batch: AbstractBatching = field(default_factory=Exact)
    layer: AbstractLayering = field(default_factory=MinCut)
    shard: Optimal = field(default_factory=Optimal)

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
        return cls(
            cluster, plan.mesh if one else None, origin.method, origin.memory_bytes, origin.pins,
            rules=rules, stages=len(plan.stages), microbatches=plan.microbatches,
            schedule=None if one else plan.schedule,
        )  # fmt: skip

    @property
    def passes(self) -> PassPipeline:
        """The passes that plan for it: of one program, or of stages where these are searched."""
        shard = replace(self.shard, recipe=recipe_named(self.method))
        if self.is_one_program:
            return PassPipeline(shard=shard)
        search = Search(self.stages, self.microbatches, self.schedule)
        return PassPipeline(self.batch, self.layer, search, shard)

    def with_passes(self, passes: PassPipeline) -> Request:
        """The request that these passes plan for.

        Raises InputError where the stages are searched of a step that has no microbatches or
        layers, or the reverse.
        """
        stage, shard = passes.stage, passes.shard
        assert isinstance(shard, Optimal)
        method = shard.recipe.name
        whole = (isinstance(passes.batch, Whole), isinstance(passes.layer, Single))
        if isinstance(stage, One):
            if not all(whole):
                raise InputError(
                    f"passes {passes}: stage=one is for batch=whole and layer=single; add "
                    "stage=search to plan stages or microbatches"
                )
            return replace(self, method=method, shard=shard, stages=1, microbatches=1)
        if any(whole):
            raise InputError(
                f"passes {passes}: stage=search needs batch=exact, and layer=min-cut or layer=fixed"
            )
        return replace(
            self, method=method, shard=shard, batch=passes.batch, layer=passes.layer,
            stages=stage.stages, microbatches=stage.microbatches, schedule=stage.schedule,
        )  # fmt: skip

    @property
    def is_one_program(self) -> bool:
        """True if nothing but one program on one mesh is asked for."""
        return self.stages == 1 and self.microbatches == 1

    @property
    def may_be_one_program(self) -> bool:
        """True if one program on one mesh would do."""
        return self.stages in (None, 1) and self.microbatches in (None, 1)

    @property
    def budget_bytes(self) -> int:
        """Bytes that one device may hold."""
        return self.memory_bytes if self.memory_bytes is not None else self.cluster.memory_bytes
