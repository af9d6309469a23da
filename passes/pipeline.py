"""Five typed slots in a row: batch, layer, stage, shard, lower; each is checked and watched."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder
from autopar.ir.batching import BatchGraphs
from autopar.ir.graph import Graph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.soundness import check_listing
from autopar.ir.spmd import SpmdProgram
from autopar.ir.stages import StagePlan
from autopar.passes.base import Setting
from autopar.passes.batch.base import AbstractBatching
from autopar.passes.batch.identity import Whole
from autopar.passes.layer.base import AbstractLayering
from autopar.passes.layer.single import Single
from autopar.passes.lower.spmd import lower_spmd
from autopar.passes.shard.base import AbstractSharding
from autopar.passes.shard.optimal import Optimal
from autopar.passes.stage.base import AbstractStaging
from autopar.passes.stage.one_stage import One


@dataclass(frozen=True)
class Decided:
    """What the slots decided, and the listing it lowers to."""

    graph: Graph
    stages: StagePlan
    sharding: ShardingPlan
    program: SpmdProgram


@dataclass(frozen=True)
class Pipeline:
    """The slots of a step that is one program on one mesh: no microbatches, one stage.

    A variant of a pass is another final class in the slot's folder. Steps of several programs go
    through the same slots in `autopar.planner`, where the stages' prices come from sharding.
    """

    batch: AbstractBatching = field(default_factory=Whole)
    layer: AbstractLayering = field(default_factory=Single)
    stage: AbstractStaging = field(default_factory=One)
    shard: AbstractSharding = field(default_factory=Optimal)

    def run(self, graph: Graph, setting: Setting) -> Decided:
        """Every slot in turn; raises what its pass raises."""
        graph.verify()
        watch = setting.watched
        graphs = BatchGraphs(graph, graph, 1)
        batching = watch("batch", graph, lambda: self.batch.run(graphs, setting))
        batching.verify()
        layers = watch("layer", batching, lambda: self.layer.run(batching, setting))
        layers.verify()
        stages = watch("stage", layers, lambda: self.stage.run(layers, setting))
        stages.verify()
        sharding = watch("shard", stages, lambda: self.shard.run(graph, setting))
        sharding.verify(graph)
        program = watch("lower", sharding, lambda: lower(graph, sharding, setting))
        return Decided(graph, stages, sharding, program)


def lower(graph: Graph, sharding: ShardingPlan, setting: Setting) -> SpmdProgram:
    """The listing of a sharded graph, its moves routed by the setting's prices.

    It is checked: raises GraphError where it would compute something else than the graph.
    """
    resharder = setting.resharder or Resharder(Prices(setting.cluster, sharding.mesh))
    program = lower_spmd(graph, sharding, resharder)
    check_listing(graph, program, sharding.mesh)
    return program
