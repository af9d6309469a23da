"""What a plan says when read closely: roles of axes, figures that add up, the curve of its peak."""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.inspecting.flow import flows_of
from autopar.inspecting.inspect import inspect, kernel_spans
from autopar.inspecting.loaded_plan import reopen
from autopar.ir.inspection import INSPECTED, AxisRole, InspectedPart, Inspection
from autopar.ir.peak import HeldKind
from autopar.ir.plan import Plan
from tests.zoo import cases

CASES = cases("adam")
DATA, FSDP, TENSOR = AxisRole.DATA, AxisRole.FSDP, AxisRole.TENSOR
SEQUENCE, EXPERT, REPLICA = AxisRole.SEQUENCE, AxisRole.EXPERT, AxisRole.REPLICA


def plan_of(name: str, **options: Any) -> Plan:
    case = CASES[name]
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    return autopar.plan(case.step, state, case.batch(0), cluster="8xh100", **options)


@functools.cache
def planned(name: str, method: str, mesh: str) -> Plan:
    return plan_of(name, method=method, mesh=mesh)


@functools.cache
def inspected(name: str, method: str, mesh: str) -> Inspection:
    return inspect(reopen(planned(name, method, mesh)))


ROLES = [
    ("mlp", "dp", "2,4", [(DATA,), (DATA,)]),
    ("mlp", "zero1", "8", [(FSDP, DATA)]),
    ("mlp", "zero2", "8", [(FSDP, DATA)]),
    ("mlp", "fsdp", "8", [(FSDP, DATA)]),
    ("gpt_scan", "fsdp", "8", [(FSDP, DATA)]),
    ("gpt", "megatron", "2,4", [(DATA,), (TENSOR,)]),
    ("gpt_scan", "sequence", "2,4", [(DATA,), (TENSOR, SEQUENCE)]),
    ("moe", "expert", "2,4", [(DATA,), (EXPERT, DATA)]),
    ("mlp", "hsdp", "2,4", [(DATA,), (FSDP, DATA)]),
    ("gpt_scan", "fsdp+tp", "2,4", [(FSDP, DATA), (TENSOR,)]),
    ("mlp", "auto", "8", [(REPLICA,)]),  # too small to be worth splitting
    ("mlp", "auto", "8,1", [(REPLICA,), (REPLICA,)]),
]


@pytest.mark.parametrize(("name", "method", "mesh", "roles"), ROLES)
def test_a_recipe_gives_its_axes_their_roles(
    name: str, method: str, mesh: str, roles: list[tuple[AxisRole, ...]]
) -> None:
    uses = inspected(name, method, mesh).axes
    assert [use.roles for use in uses] == roles, uses
    assert all(len(use.evidence) == len(use.roles) for use in uses)


@pytest.mark.parametrize("part", INSPECTED)
def test_a_part_that_is_asked_for_alone_is_that_of_the_whole(part: InspectedPart) -> None:
    which = "gpt_scan", "fsdp", "8"
    alone, whole = inspect(reopen(planned(*which)), (part,)), inspected(*which)
    assert getattr(alone, part) == getattr(whole, part)
    assert getattr(whole, part)
    # Roles are told of collectives by their axes; nothing else is read for another part.
    others = {*INSPECTED} - {part, "axes"}
    assert not any(getattr(alone, other) for other in others)


def test_evidence_counts_and_names_the_largest() -> None:
    def evidence(name: str, method: str, mesh: str) -> list[str]:
        return [text for use in inspected(name, method, mesh).axes for text in use.evidence]

    assert evidence("gpt_scan", "fsdp", "8") == [
        "FSDP: 16 of 16 parameters (100% of their bytes) are sharded over this axis and "
        "all-gathered before use, such as state/params/layers/down/kernel.",
        "Data parallel: 2 of 2 batch arguments (100% of their bytes) are sharded by rows, such as "
        "batch/targets.",
    ]
    zeros = [evidence("mlp", method, "8")[0] for method in ("zero1", "zero2")]
    told = "FSDP: 10 of 12 tensors of optimizer state (100% of their bytes) are sharded and their"
    assert zeros[0].startswith(f"{told} parameters are not (ZeRO-1)")
    assert zeros[1].startswith(f"{told} parameters are not (ZeRO-2)")
    assert evidence("gpt", "megatron", "2,4")[1].startswith("Tensor parallel: 9 of 9")
    nothing = "Unused: nothing is sharded over this axis, so its devices do the same work."
    assert evidence("mlp", "auto", "8") == [nothing]
    assert evidence("mlp", "auto", "8,1")[1] == "It has one device."


def test_features_are_no_positions() -> None:
    plan = plan_of("mlp", mesh="8", pins={"batch/x": jax.P(None, "data")})
    assert SEQUENCE not in inspect(reopen(plan)).axes[0].roles


SUMS = [(name, method, mesh) for name, method, mesh, _ in ROLES]


@pytest.mark.parametrize(("name", "method", "mesh"), SUMS)
def test_parts_add_up_to_what_the_plan_predicts(name: str, method: str, mesh: str) -> None:
    plan, found = planned(name, method, mesh), inspected(name, method, mesh)
    predicted = plan.prediction
    exposed = sum(row.exposed_seconds for row in found.collectives)
    assert exposed == pytest.approx(predicted.exposed_seconds, rel=1e-9)
    together = sum(row.seconds for row in found.collectives)
    assert together == pytest.approx(predicted.communication_seconds, rel=1e-9)
    assert sum(row.seconds for row in found.ops) == pytest.approx(predicted.compute_seconds)
    assert found.modules[0].seconds == pytest.approx(predicted.compute_seconds)
    assert all(row.exposed_seconds <= row.seconds * (1 + 1e-9) for row in found.collectives)
    assert added_up(found) == sent_in(plan)


Sums = dict[tuple[str, tuple[str, ...]], tuple[int, int]]


def sent_in(plan: Plan) -> Sums:
    return {(t.kind, t.axes): (t.count, t.nbytes) for t in plan.prediction.traffic}


def added_up(found: Inspection) -> Sums:
    """Runs and bytes of a device's collectives by kind and axes."""
    rows: Sums = {}
    for row in found.device_collectives:
        count, nbytes = rows.get((row.kind, row.axes), (0, 0))
        rows[row.kind, row.axes] = count + row.runs, nbytes + row.total_bytes
    return rows


@pytest.mark.parametrize("options", [{"stages": 2, "microbatches": 4}, {"microbatches": 2}])
def test_collectives_of_stages_are_those_of_a_device_of_the_busiest(options: Any) -> None:
    plan = plan_of("gpt_scan", method="fsdp", **options)
    found = inspect(reopen(plan), ("collectives",))
    assert added_up(found) == sent_in(plan)
    assert sum(row.seconds for row in found.device_collectives) == pytest.approx(
        plan.prediction.communication_seconds, rel=1e-9
    )
    assert {row.submesh for row in found.collectives} == set(range(len(plan.submeshes)))


@pytest.mark.parametrize(("name", "method", "mesh"), SUMS)
def test_the_curve_peaks_where_the_plan_does(name: str, method: str, mesh: str) -> None:
    plan, (curve,) = planned(name, method, mesh), inspected(name, method, mesh).memory
    predicted, top = plan.prediction, curve.levels[curve.peak]
    assert top.nbytes == predicted.peak_bytes
    assert predicted.peak is not None
    assert top.by_kind == predicted.peak.totals
    assert len(curve.levels) <= 200
    assert curve.limit_bytes == plan.origin.memory_bytes
    times = [level.seconds for level in curve.levels]
    assert times == sorted(times)
    assert 0.0 <= times[0] <= times[-1] <= predicted.seconds * (1 + 1e-9)
    held = dict(curve.levels[0].by_kind)
    state = sum(a.local_bytes(plan.mesh) for a in plan.arguments if a.role == "state")
    assert held[HeldKind.PARAMETER] + held[HeldKind.OPTIMIZER] == state


def test_collectives_of_a_loop_are_of_what_the_loop_is_for() -> None:
    found = inspected("gpt_scan", "fsdp", "8")
    gathers = [row for row in found.collectives if row.value == "state/params/layers/up/kernel"]
    told = [(row.kind, row.spot.region, row.spot.module, row.reader) for row in gathers]
    assert told == [
        ("all-gather", region, "Gpt/layers/up", "dot_general") for region in ("forward", "backward")
    ]
    (gradient,) = (
        row
        for row in found.collectives
        if row.value == "Gpt/layers/up dot_general" and row.kind == "reduce-scatter"
    )
    assert gradient.runs == 2  # once for each layer
    assert gradient.spot.region == "backward"
    assert gradient.reader not in ("transpose", "scan", "")
    (layers,) = (m for m in found.modules if m.path == "Gpt/layers")
    stacked = (i for i in planned("gpt_scan", "fsdp", "8").arguments if "params/layers" in i.path)
    assert layers.parameter_bytes == sum(math.prod(i.shape) * 4 for i in stacked)


def test_layers_that_are_alike_are_one_row() -> None:
    found = inspected("gpt", "megatron", "2,4")
    modules = {m.path: m for m in found.modules}
    assert modules["Gpt/h0..1"].count == 2
    state = planned("gpt", "megatron", "2,4").arguments
    sizes = [4 * math.prod(a.shape) for a in state if a.path.startswith("state/params/")]
    assert modules[""].parameter_bytes == modules["Gpt"].parameter_bytes == sum(sizes)
    up = [row for row in found.ops if row.kind == "dot_general" and "Gpt/h*/up" in row.spot.module]
    assert {(row.count, row.runs) for row in up} == {(2, 2)}
    forward = next(row for row in up if row.spot.region == "forward")
    batch, length, hidden = forward.shape
    width = 32
    assert forward.flops == 2 * 2 * batch * length * width * hidden
    assert forward.local_shape == (batch // 2, length, hidden // 4)


@pytest.mark.parametrize("most", [2000, 100, 10])
def test_spans_are_few_and_cover_the_same_time(most: int) -> None:
    (listed,) = reopen(planned("gpt", "megatron", "2,4")).listings
    (flow,) = flows_of([listed])
    spans = kernel_spans(flow, most)
    assert 2 <= len(spans) <= most
    assert {s.stream for s in spans} == {"work", "wires"}
    for stream in ("work", "wires"):
        own = [s for s in spans if s.stream == stream]
        assert all(a.end_seconds <= b.start_seconds + 1e-12 for a, b in pairwise(own))
    exact = flow.timed.streams.spans
    assert max(s.end_seconds for s in spans) == max(end for _, end in exact)
    if most == 2000:
        assert len(spans) == sum(end > start for start, end in exact)
        assert "all-reduce Gpt/h0/down dot_general" in {s.label.split(" and ")[0] for s in spans}


def control(state: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], Any]:
    """A step with a remat, a cond and a while loop in it."""

    def loss(w: jax.Array) -> jax.Array:
        h = jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)(batch)
        h = jax.lax.cond(state["flag"] > 0, lambda x: x * 2.0, lambda x: x @ w, h)
        return (h**2).mean()

    gradient = jax.grad(loss)(state["w"])
    shrunk = jax.lax.fori_loop(0, state["count"], lambda _, g: g * 0.9 + state["w"], gradient)
    return {**state, "w": state["w"] - shrunk}, {"norm": (gradient**2).sum()}


@pytest.mark.parametrize(
    ("cluster", "mesh"), [("8xh100", "2,4"), ("v5e:2x4", "8"), ("8xcpu", "8"), ("1xcpu", "1")]
)
def test_control_flow_adds_up_too(cluster: str, mesh: str) -> None:
    state = {
        "w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32),
        "flag": jax.ShapeDtypeStruct((), jnp.int32),
        "count": jax.ShapeDtypeStruct((), jnp.int32),
    }
    batch = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    plan = autopar.plan(control, state, batch, cluster=cluster, mesh=mesh, method="fsdp")
    found, predicted = inspect(reopen(plan)), plan.prediction
    exposed = sum(row.exposed_seconds for row in found.collectives)
    assert exposed == pytest.approx(predicted.exposed_seconds, rel=1e-9)
    assert sum(row.seconds for row in found.ops) == pytest.approx(predicted.compute_seconds)
    (curve,) = found.memory
    assert curve.levels[curve.peak].nbytes == predicted.peak_bytes
    assert {"cond", "while", "dot_general"} <= {row.kind for row in found.ops}
    assert found == inspect(reopen(plan))
