"""Steps on stages that are laid out by hand, so that no search decides what a test is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest

from autopar.cluster.placement import Block, submesh_shapes
from autopar.frontend import StepSpec, read_call, trace
from autopar.ir.sharding import MeshShape
from autopar.ir.stages import Remat
from autopar.passes.base import Setting
from autopar.passes.lower import program as lowering
from autopar.passes.lower.partition.step_analysis import grid_of
from autopar.passes.pipeline import PassPipeline
from autopar.passes.stage.prices import Choice, ChosenStage
from autopar.planner.placed_stages import SubmeshContexts
from autopar.planner.request import Request
from autopar.planner.sliced_step import SlicedStep, Source, slice_step
from autopar.planner.stage_programs import StagePrograms
from autopar.planner.stage_search import build_stages
from autopar.runtime.bind import bind_mesh
from autopar.runtime.executor import Executor
from autopar.schedule.table import SCHEDULES, stage_devices
from tests.end_to_end.running import EAGER, STEPS, Leaf, numbers
from tests.schedule.laws import plain_loop
from tests.zoo import Case, Optimizer, cases
from tests.zoo.staged import staged_cases

SETTING = Setting(EAGER, MeshShape((), ()), EAGER.memory_bytes)
_SHAPES = {shape.device_count: shape for shape in submesh_shapes(EAGER)}


@dataclass(frozen=True)
class Layout:
    """Submeshes of so many devices one after the other, each with its share of the layers."""

    sizes: tuple[int, ...]
    microbatches: int
    schedule: str
    remat: Remat = Remat.NONE
    method: str = "auto"

    @property
    def chunks(self) -> int:
        """Stages on each submesh."""
        return SCHEDULES[self.schedule].usual_chunks

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Where the submeshes are."""
        starts = np.cumsum([0, *self.sizes]).tolist()
        return tuple(Block(int(a), _SHAPES[n]) for a, n in zip(starts, self.sizes, strict=False))

    def __str__(self) -> str:
        again = f"-{self.remat}" if self.remat is not Remat.NONE else ""
        sizes = "+".join(map(str, self.sizes))
        return f"{self.schedule}-{sizes}-m{self.microbatches}{again}"


def _own(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


@dataclass(frozen=True)
class Subject:
    """A step with the state that it starts from and its batches."""

    step: Callable[[Any, Any], Any]
    state: Any
    batch: Callable[[int], Any]
    _sliced: dict[tuple[int, int], SlicedStep] = field(
        default_factory=dict[tuple[int, int], SlicedStep]
    )

    @property
    def spec(self) -> StepSpec:
        """How the step is called."""
        return StepSpec(self.step)

    def request(self, layout: Layout) -> Request:
        """What would be asked for to come to a layout."""
        stages = len(layout.sizes) * layout.chunks
        passes = PassPipeline.of_options(
            layout.method, stages, layout.microbatches, layout.schedule
        )
        return Request(EAGER, None, passes)

    def sliced(self, layout: Layout) -> SlicedStep:
        """The step cut into microbatches and layers; raises BatchError where it cannot be."""
        request = self.request(layout)
        key = layout.microbatches, request.stages or 1
        if key not in self._sliced:
            args = (self.state, self.batch(0))
            source = Source.of(self.spec, args, {}, trace(self.spec, args, {}), request)
            cut = source.trace_at(layout.microbatches, cut=request.stages != 1)
            self._sliced[key] = slice_step(cut, request.rules, SETTING, request.stages or 1)
        return self._sliced[key]

    def plain(self) -> tuple[Leaf, ...]:
        """The last state and all results of three steps of plain `jax.jit`."""
        step = jax.jit(self.step)
        return self._stepped(lambda state, batch: step(state, batch))

    def run(self, executor: Executor) -> tuple[Leaf, ...]:
        """The same of stage programs."""
        spec = self.spec
        return self._stepped(
            lambda state, batch: executor(read_call(spec, (state, batch), {}).leaves)
        )

    def _stepped(self, step: Callable[[Any, Any], Any]) -> tuple[Leaf, ...]:
        # Where it lies as the first stage wants it, the first step consumes it.
        state, told = jax.tree.map(_own, self.state), []
        for seed in range(STEPS):
            state, result = step(state, self.batch(seed))
            told.append(result)
        return numbers((state, told))


@cache
def zoo_subject(model: str, optimizer: Optimizer) -> Subject:
    """A case of the zoo, or one that is hard to cut into stages."""
    case: Case = (cases(optimizer) | staged_cases(optimizer))[model]
    return Subject(case.step, case.create_state(jax.random.key(0)), case.batch)


@cache
def plain_zoo(model: str, optimizer: Optimizer) -> tuple[Leaf, ...]:
    """Three plain steps of it."""
    return zoo_subject(model, optimizer).plain()


def on_stages(subject: Subject, layout: Layout) -> StagePrograms:
    """The programs of a step's stages; raises GraphError where the schedule would not be exact."""
    sliced = subject.sliced(layout)
    choice = _choice(len(sliced.layers.layers), layout)
    request = subject.request(layout)
    return build_stages(sliced, choice, request, SETTING, SubmeshContexts(request.cluster))


def _choice(layers: int, layout: Layout) -> Choice:
    """Layers dealt out as evenly as they can be."""
    placed = stage_devices(layout.schedule, len(layout.sizes), layout.chunks)
    bounds = pairwise(round(layers * i / len(placed)) for i in range(len(placed) + 1))
    stages = tuple(
        ChosenStage(
            first, stop - 1, layout.blocks[device], _mesh(layout.sizes[device]),
            layout.remat,
        )
        for (first, stop), device in zip(bounds, placed, strict=True)
    )  # fmt: skip
    return Choice(stages, layout.microbatches, layout.schedule, layout.chunks, 0.0, 0.0, ())


def _mesh(count: int) -> MeshShape:
    return MeshShape.of((count,)) if count > 1 else MeshShape((), ())


def executor_of(subject: Subject, layout: Layout, made: StagePrograms) -> Executor:
    """The programs on the devices of their submeshes."""
    meshes = [bind_mesh(s.mesh, s.devices) for s in made.program.submeshes]
    return Executor(subject.sliced(layout).trace, made.program, meshes)


def in_plain_order(subject: Subject, layout: Layout) -> StagePrograms:
    """The same parts on the same submeshes, one microbatch after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "grid_of", lambda plan, m: plain_loop(grid_of(plan, m)))
        return on_stages(subject, layout)


def differing_bits(one: tuple[Leaf, ...], other: tuple[Leaf, ...]) -> list[str]:
    """Paths of what is not the same to the last bit."""
    pairs = zip(one, other, strict=True)
    return [path for (path, a), (_, b) in pairs if a.tobytes() != b.tobytes()]
