"""Two plans side by side: every kind of difference is told, and nothing else."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.inspecting.compare import compare
from autopar.ir.plan import Plan
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.sharding_plan import Recomputation

State = dict[str, Any]


def train_step(state: State, batch: jax.Array) -> State:
    def loss(state: State) -> jax.Array:
        h = batch
        for layer in state["layers"]:
            h = jnp.tanh(h @ layer["up"]) @ layer["down"]
        return jnp.mean((h @ state["head"]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))


def planned(classes: int = 16, **options: Any) -> Plan:
    shape: Any = jax.ShapeDtypeStruct
    layer = {"up": shape((64, 128), jnp.float32), "down": shape((128, 64), jnp.float32)}
    state = {"layers": [layer, layer], "head": shape((64, classes), jnp.float32)}
    chosen = {"cluster": "8xcpu", "mesh": "8", "method": "dp"} | options
    return autopar.plan(train_step, state, shape((256, 64), jnp.float32), **chosen)


@pytest.fixture(scope="module")
def dp() -> Plan:
    return planned()


@pytest.fixture(scope="module")
def fsdp() -> Plan:
    return planned(method="fsdp")


def renamed(plan: Plan, names: dict[str, str]) -> Plan:
    """The plan with other names of axes, wherever a comparison looks."""

    def other(sharding: Sharding) -> Sharding:
        dims = tuple(tuple(names[x] for x in dim) for dim in sharding.dims)
        return Sharding(dims, tuple(names[x] for x in sharding.partial))

    mesh = MeshShape(tuple(names[n] for n in plan.mesh.names), plan.mesh.sizes)
    sharding = replace(
        plan.sharding,
        mesh=mesh,
        values=tuple((n, other(s)) for n, s in plan.sharding.values),
        uses=tuple((n, r, other(s)) for n, r, s in plan.sharding.uses),
    )
    traffic = tuple(
        replace(t, axes=tuple(names[x] for x in t.axes)) for t in plan.prediction.traffic
    )
    return replace(
        plan.with_sharding(0, sharding),
        arguments=tuple(replace(a, sharding=other(a.sharding)) for a in plan.arguments),
        prediction=replace(plan.prediction, traffic=traffic),
    )


def test_a_plan_equals_itself_and_its_saved_copy(dp: Plan, tmp_path: Any) -> None:
    autopar.save(dp, tmp_path / "plan.json")
    found = compare(dp, autopar.load(tmp_path / "plan.json"))
    assert found.is_equal
    assert found.decides_alike


def test_another_method_moves_arguments_and_collectives(dp: Plan, fsdp: Plan) -> None:
    found = compare(dp, fsdp)
    assert not found.decides_alike
    assert [(c.name, c.before, c.after) for c in found.asked] == [("method", "dp", "fsdp")]
    moves = {m.path: m for m in found.moves}
    assert set(moves) == {"state/layers/*/up", "state/layers/*/down", "state/head"}
    up = moves["state/layers/*/up"]
    assert up.count == 2
    assert up.before is not None
    assert up.after is not None
    assert up.before.local_bytes == 64 * 128 * 4 == 8 * up.after.local_bytes
    kinds = {t.kind: t.count for t in found.traffic}
    assert kinds["all-gather"][0] == 0 < kinds["all-gather"][1]
    names = [f.name for f in found.figures]
    assert "step" in names
    assert "memory peak" in names
    figure = next(f for f in found.figures if f.name == "arguments")
    assert figure.after < figure.before
    assert figure.share == pytest.approx(figure.after / figure.before - 1)


def test_a_comparison_turned_round_has_its_pairs_turned(dp: Plan, fsdp: Plan) -> None:
    there, back = compare(dp, fsdp), compare(fsdp, dp)
    assert [(m.path, m.before, m.after) for m in there.moves] == [
        (m.path, m.after, m.before) for m in back.moves
    ]
    assert there.inner_count == back.inner_count
    assert {(t.kind, t.count) for t in there.traffic} == {
        (t.kind, t.count[::-1]) for t in back.traffic
    }


def test_other_options_of_the_compiler_are_another_decision(dp: Plan) -> None:
    found = compare(dp, replace(dp, compiler_options=(("xla_a", True), ("xla_b", 1))))
    assert not found.decides_alike
    assert [(c.name, c.before, c.after) for c in found.decisions] == [
        ("compiler options", "none", "a, b=1")
    ]


def test_axes_that_only_have_other_names_are_the_same(fsdp: Plan) -> None:
    found = compare(fsdp, renamed(fsdp, {"data": "batch"}))
    assert found.renamed == (("data", "batch"),)
    assert not found.moves
    assert not found.traffic
    assert not found.inner_count
    assert [c.name for c in found.decisions] == ["mesh"]


def test_axes_are_matched_by_name_before_size() -> None:
    a = planned(mesh="data=2,model=4", method="auto")
    found = compare(a, renamed(a, {"data": "model", "model": "data"}))
    assert not found.renamed  # both names are there: they mean themselves
    assert [c.name for c in found.decisions] == ["mesh"]


def test_a_value_within_the_step_is_told_with_its_line(dp: Plan) -> None:
    inner = [n for n, s in dp.sharding.values if any(s.dims)]
    name = inner[-1]
    values = tuple((n, Sharding(((),) * len(s.dims)) if n == name else s)
                   for n, s in dp.sharding.values)  # fmt: skip
    found = compare(dp, dp.with_sharding(0, replace(dp.sharding, values=values)))
    assert not found.decides_alike
    assert found.inner_count == 1
    (change,) = found.inner
    assert name in change.name
    assert "test_compare.py:" in change.name
    assert (change.before, change.after) == ("P('data')", "P()")


def test_what_is_recomputed_is_a_decision(dp: Plan) -> None:
    name = dp.sharding.values[-1][0]
    again = replace(dp, recomputation=Recomputation((name,), 1e-3, 8))
    found = compare(dp, again)
    assert [(c.before, c.after) for c in found.decisions] == [("0 values", "1 values")]
    assert [(c.before, c.after) for c in found.inner] == [("kept", "recomputed")]


def test_other_steps_are_compared_by_path(dp: Plan) -> None:
    found = compare(dp, planned(classes=24))
    assert not found.same_graph
    assert not found.inner_count
    (move,) = found.moves
    assert move.path == "state/head"
    assert move.before is not None
    assert move.after is not None
    assert (move.before.shape, move.after.shape) == ((64, 16), (64, 24))


def test_an_argument_of_one_plan_only_has_no_place_in_the_other(dp: Plan) -> None:
    fewer = replace(dp, arguments=tuple(a for a in dp.arguments if a.path != "state/head"))
    (move,) = compare(dp, fewer).moves
    assert move.before is not None
    assert move.after is None


def test_stages_are_decisions_and_submeshes_are_places(dp: Plan) -> None:
    stages = planned(mesh=None, stages=2, microbatches=4)
    found = compare(dp, stages)
    names = [c.name for c in found.decisions]
    assert {"mesh", "stages", "microbatches", "schedule", "stage S0"} <= set(names)
    assert found.same_graph
    assert any(m.after is not None and m.after.submeshes == (1,) for m in found.moves)


def test_beyond_leaves_out_what_differs_between_machines(dp: Plan) -> None:
    p = dp.prediction
    other = replace(
        dp,
        origin=replace(dp.origin, jax_minor="0.99", cluster_fingerprint="0", graph_key="1"),
        prediction=replace(p, seconds=p.seconds * 1.005),
        record=None,
    )
    found = compare(dp, other)
    assert not found.is_equal
    assert found.decides_alike
    assert {c.name for c in found.made_with} == {"graph", "cluster figures", "JAX"}
    assert found.beyond(0.01).is_equal
    assert not found.beyond(0.001).is_equal


def test_beyond_keeps_decisions(dp: Plan, fsdp: Plan) -> None:
    assert not compare(dp, fsdp).beyond(1e9).is_equal


def test_a_comparison_prints_what_matters_first(dp: Plan, fsdp: Plan) -> None:
    lines = str(compare(dp, fsdp)).splitlines()
    assert lines[0] == "train_step: first plan -> second plan"
    assert re.fullmatch(r"  step: \S+ us -> \S+ us  \([+-]\S+ us, [+-]\d+\.\d%\)", lines[1])
    assert any(line.startswith("  of the memory peak: ") and " iB" not in line for line in lines)
    assert "  method: dp -> fsdp" in lines
    assert lines.index("  method: dp -> fsdp") < next(
        i for i, line in enumerate(lines) if "P() -> P('data')" in line
    )
    assert any(line.startswith("  all-gather over data: 0 s -> ") for line in lines)


def test_kinds_at_the_peak_are_those_of_both_plans(dp: Plan, fsdp: Plan) -> None:
    kinds = {k.name: k for k in compare(dp, fsdp).peak_kinds}
    assert kinds["parameter"].after < kinds["parameter"].before
    sizes = [abs(k.after - k.before) for k in compare(dp, fsdp).peak_kinds]
    assert sizes == sorted(sizes, reverse=True)
    assert compare(dp, dp).peak_kinds == ()
