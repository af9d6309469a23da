"""Stages that are searched against stages laid out by hand, at the scale that they are for.

`python -m benchmarks.stage_quality [--only 39b] [--compile]` prints a JSON line a model: what
the search over stages finds, in how many seconds of this process's own work, and what plans by hand
come to by the same costs: equal stages, all sharded alike, as Megatron and Alpa have them. The
`margin` is the best by hand over what was found. With `--compile` the parts of the found plan are
compiled for the cluster's chip, which takes the packages of `autopar[aot-gpu]`: the row then has
what each submesh holds, and the seconds of the schedule simulated, by the compiler's figures of
the parts in place of the planned ones.

Alpa's shapes are those of its OSDI 2022 paper and its benchmark suites; its search took 2,393 s for
GPT-39B.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

import autopar
from autopar.cost.stage import StageCost, peak_bytes
from autopar.cost.timeline import Seconds
from autopar.errors import AutoparError
from autopar.ir.program import PartKind
from autopar.ir.sharding import MeshShape
from autopar.ir.verification import CompiledPart
from autopar.passes.pipeline import PassPipeline
from autopar.planner.plan import plan_step
from autopar.planner.planned import Planned
from autopar.planner.stage_programs import PartCost, add_parts
from benchmarks import models
from benchmarks.deepseek import deepseek
from benchmarks.zoo.wide_resnet import wide_resnet


@dataclass(frozen=True)
class ByHand:
    """Equal stages under 1f1b on meshes of one shape: data, then model where there are two."""

    stages: int
    mesh: tuple[int, ...]
    microbatches: int
    method: str = "megatron"

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.mesh))
        return f"{self.stages} stages, {self.method} {sizes}, {self.microbatches} microbatches"

    def planned_like(self, found: Planned) -> Planned:
        """The same step laid out so; raises AutoparError where that is not possible."""
        names = ("data", "model") if len(self.mesh) == 2 else ("model",)
        passes = PassPipeline.of_options(self.method, self.stages, self.microbatches, "1f1b")
        mesh = MeshShape(names, self.mesh)
        return plan_step(found.source, replace(found.request, mesh=mesh, passes=passes))


@dataclass(frozen=True)
class Case:
    """A model, the cluster that it is for, and the layouts by hand."""

    name: str
    model: Callable[[], models.Model]
    cluster: str
    by_hand: tuple[ByHand, ...]
    memory_gb: float | None = None  # where the chip is sold with more than the catalog's


def _gpt(layers: int, width: int, heads: int) -> Callable[[], models.Model]:
    return partial(models.gpt, layers, width, heads, 51200, 1024, 1024, dtype="float16")


def _moe(layers: int, experts: int) -> Callable[[], models.Model]:
    return partial(
        models.moe, layers, 2048, 16, experts, 16384, 32000, 2,
        sequence=1024, batch=1024, dtype="float16",
    )  # fmt: skip


def _wide_resnet(blocks: Sequence[int], batch: int) -> Callable[[], models.Model]:
    return partial(wide_resnet, blocks, 320, 16, batch=batch, dtype="float16")


def _llama_70b() -> models.Model:
    return models.llama(80, 8192, 64, 8, 28672, 128256, sequence=4096, batch=512)


def _llama_405b() -> models.Model:
    return models.llama(126, 16384, 128, 8, 53248, 128256, sequence=8192, batch=512, scan=True)


_MOE_70B_BY_HAND = (
    ByHand(8, (8,), 64, "expert"), ByHand(16, (4,), 128, "expert"), ByHand(8, (8,), 256),
)  # fmt: skip
CASES = (
    Case(
        "gpt-2.6b", _gpt(32, 2560, 32), "8xv100",
        (ByHand(2, (2, 2), 128), ByHand(4, (2,), 256), ByHand(1, (8,), 128)),
    ),
    Case(
        "gpt-15b", _gpt(48, 5120, 40), "4x8xv100",
        (ByHand(4, (2, 4), 128), ByHand(4, (8,), 256), ByHand(8, (4,), 512)),
    ),
    Case(
        "gpt-39b", _gpt(48, 8192, 64), "8x8xv100",
        (ByHand(8, (8,), 1024), ByHand(8, (8,), 512), ByHand(16, (4,), 1024)),
    ),
    Case(
        "moe-27b", _moe(16, 48), "4x8xv100",
        (ByHand(8, (4,), 128, "expert"), ByHand(4, (8,), 128, "expert"), ByHand(8, (4,), 256)),
    ),
    Case(
        "moe-70b", _moe(32, 64), "8x8xv100",
        _MOE_70B_BY_HAND,
    ),
    # In f32, weights, two moments and summed gradients of 70e9 weights take 16.3 GiB a device.
    Case(
        "moe-70b-on-32gb", _moe(32, 64), "8x8xv100",
        _MOE_70B_BY_HAND,
        memory_gb=29.0,
    ),
    Case(
        "wide-resnet-6.8b", _wide_resnet((3, 4, 6, 3), 1536), "4x8xv100",
        (ByHand(4, (8,), 32, "fsdp"), ByHand(2, (16,), 32, "fsdp"), ByHand(1, (32,), 32, "fsdp")),
    ),
    Case(
        "wide-resnet-13b", _wide_resnet((3, 4, 23, 3), 1520), "8x8xv100",
        (ByHand(8, (8,), 38, "fsdp"), ByHand(4, (16,), 19, "fsdp")),
    ),
    Case(
        "llama-70b", _llama_70b, "8x8xh100",
        (ByHand(8, (8,), 512), ByHand(4, (2, 8), 256)),
    ),
    Case(
        "llama-405b", _llama_405b, "64x8xh100",
        (ByHand(16, (4, 8), 128), ByHand(8, (8, 8), 64), ByHand(32, (2, 8), 256)),
    ),
    Case(
        "deepseek-671b", deepseek, "v5p:8x8x8",
        (ByHand(8, (64,), 4, "expert"), ByHand(16, (32,), 8, "expert")),
    ),
)  # fmt: skip


def measured(case: Case, compiles: bool) -> dict[str, Any]:
    """What is found for a case, and what plans by hand come to."""
    create, step, batch = case.model()
    state = jax.eval_shape(create, jax.random.key(0))
    parallel = autopar.parallelize(
        step,
        cluster=case.cluster,
        stages="auto",
        microbatches="auto",
        memory_gb=case.memory_gb,
        cache=False,
    )
    start = time.process_time()
    try:
        found = parallel.planned(state, batch)
    except AutoparError as error:
        return {"case": case.name, "cluster": case.cluster, "refused": str(error)}
    seconds = time.process_time() - start
    plan = found.plan
    hand = dict(_by_hand(case.by_hand, found))
    best = min((s for s in hand.values() if isinstance(s, float)), default=None)
    row = {
        "case": case.name,
        "cluster": case.cluster,
        "search_cpu_seconds": round(seconds, 1),
        "predicted_seconds": plan.prediction.seconds,
        "stages": [f"{s.layers} layers, {s.remat}" for s in plan.stages],
        "meshes": [str(s.mesh) for s in plan.submeshes],
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "planned_gib": _gib(plan.prediction.peak_bytes),
        "limit_gib": _gib(plan.origin.memory_bytes),
        "floor": {m.name: m.seconds or m.note for m in plan.outcome.recipes},
        "by_hand": hand,
        "margin": best / plan.prediction.seconds if best else None,
    }
    if compiles:
        told = {n: p for p in parallel.verify(state, batch).parts for n in (p.name, *p.alike)}
        row |= _as_compiled(found, told)
    return row


def _as_compiled(found: Planned, told: Mapping[str, CompiledPart]) -> dict[str, Any]:
    """Seconds and bytes of a plan of stages by the compiler's figures of its parts."""
    placed = found.programs.placed
    if placed.stages.is_one_program:
        (only,) = told.values()
        return {"compiled_gib": _gib(only.compiled.peak_bytes), "compiled_fits": only.fits}
    costs = [_compiled_cost(found, s, told) for s in range(len(placed.stages.stages))]
    held = [
        peak_bytes([costs[s] for s in placed.stages_on(k)], flight)
        for k, flight in enumerate(placed.in_flight)
    ]
    timed = all(p.compiled.seconds is not None for p in told.values())
    return {
        "planned_gib_by_submesh": [_gib(n) for n in found.programs.peak_bytes],
        "compiled_gib_by_submesh": [_gib(n) for n in held],
        "compiled_seconds": found.programs.timed(costs).seconds if timed else None,
        "compiled_fits": max(held) <= found.plan.origin.memory_bytes,
    }


def _compiled_cost(found: Planned, stage: int, told: Mapping[str, CompiledPart]) -> StageCost:
    """The cost of a stage by what its parts take, and hold beside their arguments, as compiled."""
    programs = found.programs
    placed, submesh = programs.placed, programs.placed.stages.stages[stage].submesh
    made = {name: part.compiled for name, part in told.items()}
    costs = [
        (
            part,
            PartCost(
                Seconds(made[part.name].seconds or 0.0),
                made[part.name].peak_bytes - made[part.name].argument_bytes,
            )
            if part.name in made
            else PartCost(),
        )
        for part in placed.parts_of(stage)
    ]
    others = [p for p in placed.parts if p.submesh == submesh and p.stage != stage]
    plan, runs = programs.shardings[submesh], placed.stages.microbatches
    cost = add_parts(costs, placed.graphs[submesh], plan, runs, others)
    # What an update writes over sums is not counted by the compiler.
    update = max((c.working_bytes for p, c in costs if p.kind is PartKind.UPDATE), default=0)
    return replace(cost, once_bytes=max(update, cost.once_bytes))


def _by_hand(layouts: Sequence[ByHand], found: Planned) -> Iterator[tuple[str, float | str]]:
    for layout in layouts:
        try:
            planned = layout.planned_like(found)
        except AutoparError as error:
            yield str(layout), str(error).splitlines()[0]
        else:
            yield str(layout), planned.plan.prediction.seconds


def _gib(nbytes: int) -> float:
    return round(nbytes / 2**30, 2)


def main() -> None:
    """Every case in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--compile", action="store_true", help="compile the parts as well")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    for case in CASES:
        if options.only in case.name:
            print(json.dumps(measured(case, options.compile)), flush=True)


if __name__ == "__main__":
    main()
