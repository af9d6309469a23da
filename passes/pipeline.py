"""Five typed slots in a row: batch, layer, stage, shard, lower; each is checked and watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder
from autopar.ir.graph import Graph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.spmd import SpmdProgram
from autopar.ir.stages import StagePlan
from autopar.passes.base import Setting, Watcher
from autopar.passes.batch.base import AbstractBatching
from autopar.passes.batch.whole import Whole
from autopar.passes.layer.base import AbstractLayering
from autopar.passes.layer.single import Single
from autopar.passes.lower.spmd import lower_spmd
from autopar.passes.shard.base import AbstractSharding
from autopar.passes.shard.optimal import Optimal
from autopar.passes.stage.base import AbstractStaging
from autopar.passes.stage.one import One

T = TypeVar("T")


@dataclass(frozen=True)
class Decided:
    """What the slots decided, and the listing it lowers to."""

    graph: Graph
    stages: StagePlan
    sharding: ShardingPlan
    program: SpmdProgram


@dataclass(frozen=True)
class Pipeline:
    """One pass for each slot; a variant is another final class in the slot's folder."""

    batch: AbstractBatching = field(default_factory=Whole)
    layer: AbstractLayering = field(default_factory=Single)
    stage: AbstractStaging = field(default_factory=One)
    shard: AbstractSharding = field(default_factory=Optimal)

    def run(self, graph: Graph, setting: Setting, watchers: tuple[Watcher, ...] = ()) -> Decided:
        """Every slot in turn; raises what its pass raises."""
        graph.verify()
        watch = _Watch(setting, watchers)
        batched = watch.slot("batch", graph, lambda: self.batch.run(graph, setting))
        batched.verify()
        layers = watch.slot("layer", batched, lambda: self.layer.run(batched, setting))
        layers.verify()
        stages = watch.slot("stage", layers, lambda: self.stage.run(layers, setting))
        stages.verify()
        sharding = watch.slot("shard", stages, lambda: self.shard.run(batched, setting))
        sharding.verify(batched)
        program = watch.slot("lower", sharding, lambda: lower(batched, sharding, setting))
        return Decided(batched, stages, sharding, program)


@dataclass(frozen=True)
class _Watch:
    """Times each slot by the clock that the door handed in, and tells the watchers."""

    setting: Setting
    watchers: tuple[Watcher, ...]

    def slot(self, name: str, given: object, run: Callable[[], T]) -> T:
        start = self.setting.clock()
        out = run()
        for watcher in self.watchers:
            watcher.after(name, given, out, self.setting.clock() - start)
        return out


def lower(graph: Graph, sharding: ShardingPlan, setting: Setting) -> SpmdProgram:
    """The listing of a sharded graph, its moves routed by the setting's prices."""
    return lower_spmd(graph, sharding, Resharder(Prices(setting.cluster, sharding.mesh)))
