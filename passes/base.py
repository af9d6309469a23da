"""The contract of a pass, of the batch, layer and shard slots, and what leaves a step whole.

The stage slot holds `One` or the search (`passes/stage`); the contract of lowering is beside its
variants, in `passes/lower/lowering.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from autopar.cluster import Cluster
from autopar.ir.batching import BatchGraphs, Batching
from autopar.ir.graph import Graph
from autopar.ir.sharding import MeshShape
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import Layer, LayerSequence, Stage, StagePlan, Submesh

In = TypeVar("In")
Out = TypeVar("Out")

Clock = Callable[[], float]
Weigh = Callable[[Graph, ShardingPlan], float]


@dataclass(frozen=True)
class Watcher:
    """Called after every slot with its name, what went in, what came out, and the seconds.

    The parts of a long slot are told of too: "build" and "solve" within "shard".
    """

    after: Callable[[str, object, object, float], None]


# The metadata of a field of a pass that no user sets: it is left out of the text form.
NO_OPTION = {"option": False}


Pins = tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]  # (path pattern, dims)
NO_LIMIT_BYTES = 2**60  # a limit that binds nothing


@dataclass(frozen=True)
class Holding:
    """The number of times that a value is held at once, and whether all along.

    Activations are held for every microbatch in flight, from their maker to their last reader;
    sums of gradients are held throughout.
    """

    times: int = 1
    throughout: bool = False


def _none() -> Mapping[str, Holding]:
    return {}


@dataclass(frozen=True)
class Setting:
    """The givens of a pass beside its input: the cluster, the mesh, the limits, the pins.

    `memory_bytes` is the budget of one device. `pins` are (path pattern, dims) pairs, dims
    being tuples of axis names for each tensor dim. The clock is handed in so that no pass
    reads one by itself; so is `weigh`, the bytes that a plan is known to need beside what the
    pass counts. `held` names the values that a loop over microbatches holds longer or more often.
    With `partial_sums` what is summed over microbatches may stay partial over devices until the
    last: that is combined once, but each device holds all of it.
    """

    cluster: Cluster
    mesh: MeshShape
    memory_bytes: int
    pins: Pins = ()
    clock: Clock = field(default=lambda: 0.0, compare=False)
    weigh: Weigh = field(default=lambda graph, plan: 0.0, compare=False)
    watchers: tuple[Watcher, ...] = field(default=(), compare=False)
    held: Mapping[str, Holding] = field(default_factory=_none, compare=False)
    partial_sums: bool = True

    def watched(self, name: str, given: object, run: Callable[[], Out]) -> Out:
        """Runs `run` and tells the watchers how long it took."""
        start = self.clock()
        out = run()
        for watcher in self.watchers:
            watcher.after(name, given, out, self.clock() - start)
        return out


@dataclass(frozen=True)
class AbstractPass(abc.ABC, Generic[In, Out]):
    """A decision: one kind of data in, the next kind out, nothing else touched."""

    name: ClassVar[str]

    @abc.abstractmethod
    def run(self, given: In, setting: Setting) -> Out:
        """The output for one input."""


@dataclass(frozen=True)
class AbstractBatching(AbstractPass[BatchGraphs, Batching]):
    """Decides how the step is cut into microbatches."""


@dataclass(frozen=True)
class AbstractLayering(AbstractPass[Batching, LayerSequence]):
    """Groups ops into layers, the smallest pieces that stages are made of."""


@dataclass(frozen=True)
class AbstractSharding(AbstractPass[Graph, ShardingPlan]):
    """Chooses a sharding for every value and op of a graph on one mesh."""


# -- a step that is not cut: one batch, one layer, one stage ---------------------------------------


@dataclass(frozen=True)
class Whole(AbstractBatching):
    """Leaves the step as the user wrote it: the whole batch as the only microbatch."""

    name: ClassVar[str] = "whole"

    def run(self, given: BatchGraphs, setting: Setting) -> Batching:
        """The whole step, run once."""
        del setting
        return Batching.whole(given.whole)


@dataclass(frozen=True)
class Single(AbstractLayering):
    """Puts all ops in one layer."""

    name: ClassVar[str] = "single"

    def run(self, given: Batching, setting: Setting) -> LayerSequence:
        """A sequence of one layer; of none for a step without ops."""
        del setting
        graph = given.graph
        count = len(graph.ops)
        layers = (Layer(0, count - 1, graph.flops, 0),) if count else ()
        return LayerSequence(graph, layers)


@dataclass(frozen=True)
class One(AbstractPass[LayerSequence, StagePlan]):
    """Puts all layers in one stage on the whole mesh: the answer "do not pipeline"."""

    name: ClassVar[str] = "one"
    stages: ClassVar[int] = 1
    microbatches: ClassVar[int] = 1
    schedule: ClassVar[None] = None

    def run(self, given: LayerSequence, setting: Setting) -> StagePlan:
        """A plan of one stage."""
        whole = Stage(0, len(given.layers) - 1)
        return StagePlan(given, (whole,), (Submesh(setting.mesh),))
