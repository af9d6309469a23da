"""Shardings in hand: as trees, for any tree, lowered, and beside a mesh of the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import InputError, PlanError, PlanMismatchError
from autopar.runtime.pieces import StackedPieces
from autopar.runtime.shardings import StackedSharding
from tests.api.calls import assert_equal, batch_of, parallel, state_of, train_step


@dataclass(frozen=True)
class Ran:
    """A step that has run once, with what it gave."""

    step: Any
    state: Any
    loss: Any


@pytest.fixture(scope="module", name="ran")
def _ran() -> Ran:
    step = parallel("one program", mesh=(2, 4), method="fsdp")
    return Ran(step, *step(state_of(), batch_of()))


# -- of the step -------------------------------------------------------------------------------


def test_results_lie_as_the_shardings_say(ran: Ran) -> None:
    shardings = ran.step.shardings
    state, loss = shardings.results
    assert state == jax.tree.map(lambda leaf: leaf.sharding, ran.state)
    assert loss == ran.loss.sharding
    assert shardings.args[0] == state
    assert shardings.kwargs == {}
    assert {s.mesh for s in jax.tree.leaves(shardings.args)} == {ran.step.mesh}


def test_arguments_may_be_put_in_place_before_the_call(ran: Ran) -> None:
    state, batch = jax.device_put((state_of(), batch_of()), ran.step.shardings.args)
    assert_equal(ran.step(state, batch), (ran.state, ran.loss))


def test_other_code_may_be_jitted_with_them(ran: Ran) -> None:
    state, batch = ran.step.shardings.args
    loss = jax.jit(lambda s, x: train_step(s, x)[1], in_shardings=(state, batch))
    assert_equal(loss(state_of(), batch_of()), ran.loss)


def test_static_and_named_arguments() -> None:
    def scaled(w: Any, mode: str, *, x: Any, by: float = 1.0) -> Any:
        return w + x.sum() * by if mode == "sum" else w

    step = parallel("one program", scaled, static_argnames=("mode", "by"))
    step.plan_for(np.ones((8, 8)), "sum", x=np.ones((16, 8)), by=2.0)
    (w,), named = step.shardings.args, step.shardings.kwargs
    assert w == step.shardings.results
    assert list(named) == ["x"]


def test_objects_have_the_shardings_of_their_states() -> None:
    net = nnx.Linear(8, 64, rngs=nnx.Rngs(0))

    @autopar.parallelize(cluster="8xcpu", mesh=(8,), method="fsdp")
    def train(net: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
        nnx.update(net, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(net), grads))
        return loss

    train.plan_for(net, batch_of())
    wanted = train.shardings.args[0]
    nnx.update(net, jax.device_put(nnx.state(net), wanted))
    assert net.kernel[...].sharding == wanted["kernel"].get_value()
    assert train.shardings.results == NamedSharding(train.mesh, P())
    assert autopar.shardings(train.plan, nnx.state(net)) == wanted


@pytest.fixture(scope="module", name="staged")
def _staged() -> Any:
    """Two layers in a scan, each a stage, planned and not compiled."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jax.lax.scan(lambda h, a: (h + jnp.tanh(h @ a), None), x, w)[0] ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    made = parallel("stages", step)
    made.plan_for(np.ones((2, 8, 8), np.float32), batch_of())
    return made


def test_a_leaf_that_stages_share_has_one_for_each_of_its_pieces(staged: Any) -> None:
    born = staged.init(lambda: jnp.ones((2, 8, 8)))
    made = staged.shardings.results
    assert isinstance(made, StackedSharding)
    assert isinstance(born, StackedPieces)
    assert made.shardings == tuple(piece.sharding for piece in born.pieces)
    assert made.rows == tuple(len(piece) for piece in born.pieces)
    assert staged.shardings.args[0] == made
    assert len(staged.meshes) == 2
    with pytest.raises(PlanError, match=r"runs on 2 meshes.* step\.meshes has them all"):
        _ = staged.mesh


def test_before_there_is_a_plan_it_says_so() -> None:
    step = parallel("one program")
    assert repr(step) == (
        "<ParallelStep train_step on 8xcpu (data=8), dp: no plan yet; call it, or its plan_for>"
    )
    with pytest.raises(PlanError, match="has met no arguments yet"):
        _ = step.shardings
    with pytest.raises(PlanError, match="no plan yet"):
        _ = step.mesh


def test_a_step_prints_its_plan(ran: Ran) -> None:
    assert re.fullmatch(
        r"<ParallelStep train_step on 8xcpu \(data=2, model=4\), fsdp: "
        r"predicted [\d.]+ \w+ a step, [\d.]+ \w+ a device>",
        repr(ran.step),
    )


def test_it_can_be_lowered_without_compiling(ran: Ran, staged: Any) -> None:
    lowered = ran.step.lower(state_of(), batch_of())
    assert "all_reduce" in lowered.as_text()
    assert lowered.compile().memory_analysis() is not None
    given = np.ones((2, 8, 8), np.float32), batch_of()
    parts = staged.lower(*given)
    assert set(parts) == {p.part.name for p in staged.planned(*given).program.parts}
    assert all("main" in part.as_text() for part in parts.values())


# -- of a plan ---------------------------------------------------------------------------------


def test_a_plan_has_them_for_any_tree_of_its_arguments(ran: Ran) -> None:
    plan = ran.step.plan
    assert autopar.shardings(plan, state_of()) == ran.step.shardings.args[0]
    assert autopar.shardings(plan, jax.eval_shape(state_of)) == ran.step.shardings.args[0]
    assert autopar.shardings(plan, {"a": state_of()["a"]}) == {"a": ran.step.shardings.args[0]["a"]}
    assert autopar.shardings(plan, batch_of()) == ran.step.shardings.args[1]
    assert [autopar.partition_spec(a) for a in plan.arguments] == [
        s.spec for s in jax.tree.leaves(ran.step.shardings.args)
    ]


def test_a_tree_that_it_has_not_is_refused(ran: Ran) -> None:
    with pytest.raises(PlanMismatchError, match=r"no tree with c \[8, 8\] among .* it has state/a"):
        autopar.shardings(ran.step.plan, {"a": np.ones((8, 8)), "c": np.ones((8, 8))})
    with pytest.raises(PlanMismatchError, match=r"no tree below 'batch' with a \[8, 8\]"):
        autopar.shardings(ran.step.plan, state_of(), at="batch")


def test_one_of_several_trees_must_be_named() -> None:
    def step(state: Any, x: Any) -> Any:
        return jax.tree.map(lambda w: w + x.sum(), state)

    trees = {n: {"w": np.ones((8, 8), np.float32)} for n in ("params", "ema")}
    pins = {"state/params/w": P("data"), "state/ema/w": P(None, "data")}
    plan = autopar.plan(step, trees, batch_of(), cluster="8xcpu", mesh=(8,), pins=pins)
    with pytest.raises(InputError, match=r"2 such trees.*tree, at='state/ema'"):
        autopar.shardings(plan, trees["params"])
    assert autopar.shardings(plan, trees["params"], at="state/params")["w"].spec == P("data")


# -- beside a mesh of the user's own -----------------------------------------------------------


def reads_the_mesh(state: Any, batch: Any) -> Any:
    """A step of one who writes with explicit axes."""
    return train_step(state, jax.sharding.reshard(batch, P("data")))


@pytest.fixture(scope="module", name="meshes")
def _meshes() -> dict[str, jax.sharding.Mesh]:
    return {
        kind.name: jax.make_mesh((8,), ("data",), axis_types=(kind,))
        for kind in (AxisType.Auto, AxisType.Explicit)
    }


@pytest.fixture(autouse=True)
def _no_mesh_is_left() -> Iterator[None]:
    yield
    assert jax.sharding.get_abstract_mesh().empty


@pytest.mark.parametrize("form", ["one program", pytest.param("stages", marks=pytest.mark.slow)])
def test_a_mesh_that_is_set_changes_nothing(
    form: str, meshes: dict[str, jax.sharding.Mesh], ran: Ran
) -> None:
    with jax.set_mesh(meshes["Explicit"]):
        step = parallel(form, reads_the_mesh, donate=False)
        state = step.init(state_of)
        assert_equal(step(state, batch_of()), (ran.state, ran.loss))
        assert jax.sharding.get_abstract_mesh().axis_names == ("data",)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_of_any_axis_types_may_be_given(
    kind: str, meshes: dict[str, jax.sharding.Mesh], ran: Ran
) -> None:
    mesh = meshes[kind]
    step = autopar.parallelize(train_step, cluster="8xcpu", mesh=mesh, method="fsdp")
    with jax.set_mesh(mesh):
        given = jax.tree.map(lambda w: jax.device_put(w, P("data")), state_of())
        state, loss = step(given, jax.device_put(batch_of(), P("data")))
    assert_equal((state, loss), (ran.state, ran.loss))
    assert state["a"].sharding.spec == P("data")
    assert state["a"].sharding.mesh.devices.tolist() == mesh.devices.tolist()
