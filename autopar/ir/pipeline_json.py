"""The pipeline of a plan as JSON: submeshes, stages, schedule, every submesh's sharding."""

from __future__ import annotations

from autopar.ir.json_reader import Fields, Json
from autopar.ir.pipeline import PipelinePlan, PlannedStage
from autopar.ir.sharding_json import (
    ReadTable,
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


def read_pipeline(data: Fields, first: ShardingPlan, table: ReadTable) -> PipelinePlan:
    """A pipeline from what `pipeline_json` gave, and the sharding of its first submesh."""
    found = PipelinePlan(
        schedule=data["schedule"].text(),
        microbatches=data["microbatches"].whole(),
        batch=data["batch"].whole(),
        submeshes=tuple(_read_submesh(item.fields()) for item in data["submeshes"].items()),
        stages=tuple(_read_stage(item.fields()) for item in data["stages"].items()),
        shardings=(
            first,
            *(_read_other(item.fields(), table) for item in data["other_shardings"].items()),
        ),
        outcome=read_outcome(data["outcome"].fields()),
        send_seconds=data["send_seconds"].numbers(),
        launch_seconds=data["launch_seconds"].number(),
        bubble_seconds=data["bubble_seconds"].number(),
        peak_in_flight=data["peak_in_flight"].wholes(),
        notes=data["notes"].texts(),
    )
    data.end()
    return found


def _read_submesh(data: Fields) -> Submesh:
    found = Submesh(read_mesh(data["mesh"]), data["devices"].wholes())
    data.end()
    return found


def _read_other(data: Fields, table: ReadTable) -> ShardingPlan:
    found = read_sharding(data, table)
    data.end()
    return found


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


def _read_stage(data: Fields) -> PlannedStage:
    found = PlannedStage(
        name=data["name"].text(),
        layers=data["layers"].whole(),
        stop=data["stop"].whole(),
        submesh=data["submesh"].whole(),
        recompute=data["recompute"].flag(),
        cuts=data["cuts"].wholes(),
        forward_seconds=data["forward_seconds"].number(),
        input_gradient_seconds=data["input_gradient_seconds"].number(),
        weight_gradient_seconds=data["weight_gradient_seconds"].number(),
        once_seconds=data["once_seconds"].number(),
        activation_bytes=data["activation_bytes"].whole(),
        kept_bytes=data["kept_bytes"].whole(),
        peak_bytes=data["peak_bytes"].whole(),
    )
    data.end()
    return found
