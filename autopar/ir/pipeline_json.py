"""The pipeline of a plan as JSON: submeshes, stages, schedule, every submesh's sharding."""

from __future__ import annotations

from autopar.ir.json_reader import Json, Reader, ints, numbers, texts
from autopar.ir.pipeline import PipelinePlan, PlannedStage
from autopar.ir.sharding import Sharding
from autopar.ir.sharding_json import (
    ShardingTable,
    mesh_json,
    outcome_json,
    read_mesh,
    read_outcome,
    read_sharding,
    sharding_json,
)
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import Submesh


def pipeline_json(plan: PipelinePlan, table: ShardingTable) -> Json:
    """A pipeline; the plan itself holds the sharding of the first submesh."""
    return {
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "batch": plan.batch,
        "submeshes": [
            {"mesh": mesh_json(s.mesh), "devices": list(s.devices)} for s in plan.submeshes
        ],
        "stages": [_stage(s) for s in plan.stages],
        "outcome": outcome_json(plan.outcome),
        "send_seconds": list(plan.send_seconds),
        "launch_seconds": plan.launch_seconds,
        "bubble_seconds": plan.bubble_seconds,
        "peak_in_flight": list(plan.peak_in_flight),
        "notes": list(plan.notes),
        "other_shardings": [sharding_json(s, table) for s in plan.shardings[1:]],
    }


def read_pipeline(data: Reader, first: ShardingPlan, table: list[Sharding]) -> PipelinePlan:
    """A pipeline from what `pipeline_json` gave, and the sharding of its first submesh."""
    submeshes = map(Reader, data.items("submeshes"))
    others = (read_sharding(Reader(s), table) for s in data.items("other_shardings"))
    return PipelinePlan(
        schedule=data.text("schedule"),
        microbatches=data.whole("microbatches"),
        batch=data.whole("batch"),
        submeshes=tuple(
            Submesh(read_mesh(s.items("mesh")), ints(s.items("devices"))) for s in submeshes
        ),
        stages=tuple(_read_stage(Reader(s)) for s in data.items("stages")),
        shardings=(first, *others),
        outcome=read_outcome(data.inner("outcome")),
        send_seconds=numbers(data.items("send_seconds")),
        launch_seconds=data.number("launch_seconds"),
        bubble_seconds=data.number("bubble_seconds"),
        peak_in_flight=ints(data.items("peak_in_flight")),
        notes=texts(data.items("notes")),
    )


def _stage(stage: PlannedStage) -> Json:
    return {
        "name": stage.name,
        "layers": stage.layers,
        "stop": stage.stop,
        "submesh": stage.submesh,
        "recompute": stage.recompute,
        "cuts": list(stage.cuts),
        "forward_seconds": stage.forward_seconds,
        "input_gradient_seconds": stage.input_gradient_seconds,
        "weight_gradient_seconds": stage.weight_gradient_seconds,
        "once_seconds": stage.once_seconds,
        "activation_bytes": stage.activation_bytes,
        "kept_bytes": stage.kept_bytes,
        "peak_bytes": stage.peak_bytes,
    }


def _read_stage(data: Reader) -> PlannedStage:
    return PlannedStage(
        name=data.text("name"),
        layers=data.whole("layers"),
        stop=data.whole("stop"),
        submesh=data.whole("submesh"),
        recompute=data.flag("recompute"),
        cuts=ints(data.items("cuts")),
        forward_seconds=data.number("forward_seconds"),
        input_gradient_seconds=data.number("input_gradient_seconds"),
        weight_gradient_seconds=data.number("weight_gradient_seconds"),
        once_seconds=data.number("once_seconds"),
        activation_bytes=data.whole("activation_bytes"),
        kept_bytes=data.whole("kept_bytes"),
        peak_bytes=data.whole("peak_bytes"),
    )
