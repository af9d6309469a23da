"""Objects of equinox and nnx as arguments: the trees of arrays that come of them, and back."""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ArgumentError, TraceError
from autopar.frontend import StepSpec, pure_creation, read_call
from autopar.frontend.trace.objects import Constant, is_array
from autopar.ir.paths import matches, meant

X = jnp.ones((8, 4))


class Model(eqx.Module):
    linear: eqx.nn.Linear
    act: Any
    rate: float = 0.5
    flag: bool = False
    note: str = "a"

    def __call__(self, x: Any) -> Any:
        return self.act(self.linear(x)) * self.rate if not self.flag else x


def _model(act: Any = jnp.tanh, **fields: Any) -> Model:
    return Model(eqx.nn.Linear(4, 4, key=jax.random.key(0)), act, **fields)


def _paths(fun: Any, *args: Any) -> list[str]:
    plan = autopar.plan(fun, *args, cluster="8xcpu", mesh=(8,), method="dp")
    return [a.path for a in plan.arguments if not a.path.startswith("const")]


# -- equinox -----------------------------------------------------------------------------------


def _descend(model: Any, x: Any) -> Any:
    loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -g, grads)), loss


@pytest.mark.parametrize("fun", [_descend, eqx.filter_jit(_descend)])
def test_constants_of_a_model_come_back_as_they_were(fun: Any) -> None:
    parallel = autopar.parallelize(fun, cluster="8xcpu", mesh=(8,))
    model, loss = parallel(_model(), X)
    wanted, plain = eqx.filter_jit(_descend)(_model(), X)
    np.testing.assert_allclose(loss, plain, rtol=1e-6)
    np.testing.assert_allclose(model.linear.weight, wanted.linear.weight, rtol=1e-5)
    assert (model.act, model.rate, model.flag, model.note) == (jnp.tanh, 0.5, False, "a")
    assert [a.path for a in parallel.plan.arguments][:2] == [
        "model/linear/weight",
        "model/linear/bias",
    ]


def test_each_set_of_constants_has_a_plan_of_its_own() -> None:
    signatures = {
        read_call(StepSpec(_descend), (_model(**fields), X), {}).signature
        for fields in ({}, {"rate": 0.25}, {"flag": True}, {"note": "b"}, {"act": jnp.sin})
    }
    assert len(signatures) == 5
    again = read_call(StepSpec(_descend), (_model(), X), {}).signature
    assert again in signatures


def test_constants_that_compare_equal_and_are_not() -> None:
    alike = [0.0, -0.0, 0, False, math.nan, 1, True, 1.0]
    assert len({Constant(value) for value in alike}) == len(alike)
    assert Constant("a" * 3) == Constant("aaa")


def test_filter_jit_takes_constants_anywhere() -> None:
    @eqx.filter_jit
    def step(state: Any, x: Any, mode: str, scale: int) -> Any:
        assert isinstance(scale, int)
        new = state["w"] * scale if mode == "times" else state["w"] + scale
        return {"w": new, "kind": mode}, x.sum(), mode

    parallel = autopar.parallelize(step, cluster="8xcpu", mesh=(8,))
    state, _, mode = parallel({"w": X, "kind": "odd"}, X, "times", 3)
    assert (state["kind"], mode) == ("times", "times")
    np.testing.assert_array_equal(state["w"], 3 * np.ones((8, 4)))
    state, _, _ = parallel(state, X, "plus", scale=2)
    np.testing.assert_array_equal(state["w"], 5 * np.ones((8, 4)))


def test_a_plain_step_refuses_texts_outside_of_models() -> None:
    with pytest.raises(ArgumentError, match="mode of <lambda> is of type str"):
        autopar.plan(lambda m, mode: m, _model(), "times", cluster="8xcpu")


def test_a_constant_that_cannot_be_hashed_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a model holds a set, which is no array and cannot"):
        autopar.plan(_descend, _model(note={1}), X, cluster="8xcpu")


def test_shapes_of_a_model_are_planned_for() -> None:
    shapes = eqx.filter_eval_shape(_model)
    assert _paths(_descend, shapes, X) == ["model/linear/weight", "model/linear/bias", "x"]


def test_a_model_is_born_with_its_constants() -> None:
    parallel = autopar.parallelize(_descend, cluster="8xcpu", mesh=(8,))
    model = parallel.init(_model)
    assert (model.act, model.note) == (jnp.tanh, "a")
    assert parallel(model, X)[0].act is jnp.tanh


def _deep(model: Any, x: Any) -> Any:
    """A scan over two layers, which stages cut up: each keeps its own."""
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_of(p: Any) -> Any:
        def layer(h: Any, own: Any) -> Any:
            return jax.vmap(eqx.combine(own, static))(h), None

        return jnp.mean(jax.lax.scan(layer, x, p)[0] ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -g, grads)), loss


def test_pieces_that_stages_keep_are_arrays_too() -> None:
    def made() -> Any:
        return eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 4, 8, 1, key=key))(
            jax.random.split(jax.random.key(0), 2)
        )

    parallel = autopar.parallelize(_deep, cluster="8xcpu", stages=2, microbatches=2)
    plain = eqx.filter_jit(_deep)
    model, other, x = made(), made(), jax.random.normal(jax.random.key(1), (8, 4))
    for _ in range(3):
        (model, loss), (other, wanted) = parallel(model, x), plain(other, x)
        np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    weights = [jax.tree.leaves(eqx.filter(m, is_array))[0] for m in (model, other)]
    assert not isinstance(weights[0], jax.Array)
    np.testing.assert_allclose(np.asarray(weights[0]), weights[1], rtol=1e-4, atol=1e-6)


# -- nnx ---------------------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.last = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(jax.nn.relu(self.first(x)))


def _created() -> tuple[Net, Any]:
    net = Net(nnx.Rngs(0))
    return net, nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def _train(net: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(net)
    optimizer.update(net, grads)
    return loss


@pytest.mark.parametrize("fun", [_train, nnx.jit(_train)])
def test_a_step_that_changes_its_objects_in_place_learns(fun: Any) -> None:
    net, optimizer = _created()
    other, plain = _created()
    parallel = autopar.parallelize(fun, cluster="8xcpu", mesh=(2, 4), pins={
        "net/**/kernel": P(None, "model"),
    })  # fmt: skip
    step = nnx.jit(_train)
    found = [float(parallel(net, optimizer, X)) for _ in range(3)]
    np.testing.assert_allclose(found, [float(step(other, plain, X)) for _ in range(3)], rtol=1e-5)
    assert found[1] < found[0]
    np.testing.assert_allclose(net.first.kernel[...], other.first.kernel[...], rtol=1e-5)
    assert int(optimizer.step[...]) == 3
    assert {a.role for a in parallel.plan.arguments[:4]} == {"state"}
    assert net.first.kernel[...].sharding.is_equivalent_to(
        jax.sharding.NamedSharding(jax.make_mesh((2, 4), ("data", "model")), P(None, "model")), 2
    )


def test_jit_of_jax_around_a_step_that_changes_objects_is_refused() -> None:
    with pytest.raises(TraceError, match=r"changes net and optimizer in place[\s\S]*@nnx\.jit"):
        autopar.plan(jax.jit(_train), *_created(), X, cluster="8xcpu")


def test_jit_of_jax_around_a_step_that_changes_nothing_runs() -> None:
    def predicted(net: Any, x: Any) -> Any:
        return net(x)

    net, _ = _created()
    parallel = autopar.parallelize(jax.jit(predicted), cluster="8xcpu", mesh=(8,))
    np.testing.assert_allclose(parallel(net, X), net(X), rtol=1e-5)


def test_what_an_argument_shares_with_another_stays_shared() -> None:
    def step(pair: Any, again: Any, x: Any) -> Any:
        pair["net"].first.kernel[...] = pair["net"].first.kernel[...] + 1
        return again.first.kernel[...].sum() + x.sum()

    net, _ = _created()
    before = float(net.first.kernel[...].sum())
    parallel = autopar.parallelize(step, cluster="8xcpu", mesh=(8,))
    found = [float(parallel({"net": net}, net, X)) for _ in range(2)]
    np.testing.assert_allclose(found, [before + 32 + 32, before + 64 + 32], rtol=1e-5)
    assert len({a.path for a in parallel.plan.arguments}) == 5  # four variables and x


def test_objects_that_are_returned_are_the_ones_that_were_given() -> None:
    def step(net: Any, optimizer: Any, x: Any) -> Any:
        loss = _train(net, optimizer, x)
        return optimizer, loss, net

    net, optimizer = _created()
    found = autopar.parallelize(step, cluster="8xcpu", mesh=(8,))(net, optimizer, X)
    assert found[0] is optimizer
    assert found[2] is net


def test_variables_may_be_born_and_replaced_in_a_step() -> None:
    net: Any

    def step(net: Any, x: Any) -> Any:
        net.seen = nnx.BatchStat(x.sum(0))
        net.last = net.first
        return x.mean()

    net, _ = _created()
    first = net.first
    autopar.parallelize(step, cluster="8xcpu", mesh=(8,))(net, X)
    np.testing.assert_array_equal(net.seen[...], 8 * np.ones(4))
    assert net.last is first


def test_random_streams_go_on_as_they_do_without() -> None:
    def step(rngs: Any, x: Any) -> Any:
        return x + jax.random.normal(rngs.params(), x.shape)

    one, two = nnx.Rngs(params=0), nnx.Rngs(params=0)
    parallel, plain = autopar.parallelize(step, cluster="8xcpu", mesh=(8,)), nnx.jit(step)
    for _ in range(2):
        np.testing.assert_allclose(parallel(one, X), plain(two, X), rtol=1e-6)
    assert int(one.params.count[...]) == int(two.params.count[...]) == 2


def test_a_net_is_born_where_it_lives_and_verified() -> None:
    parallel = autopar.parallelize(_train, cluster="8xcpu", mesh=(8,), method="fsdp")
    net, optimizer = parallel.init(_created)
    parallel.plan_for(net, optimizer, X)
    born, _ = parallel.init(_created)
    assert isinstance(born, Net)
    np.testing.assert_allclose(born.first.kernel[...], net.first.kernel[...], rtol=1e-6)
    assert parallel.verify(net, optimizer, X, level="numerics").agrees
    assert autopar.lint(_train, net, optimizer, X, cluster="8xcpu").step == "_train"


def test_pieces_that_stages_keep_are_values_of_variables() -> None:
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(self.linear(x))

    class Deep(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.vmap(Layer)(rngs.split(2))

        def __call__(self, x: Any) -> Any:
            scan: Any = nnx.scan(
                lambda h, layer: layer(h), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )
            return scan(x, self.layers)

    def made() -> Any:
        net = Deep(nnx.Rngs(0))
        return net, nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    x = jax.random.normal(jax.random.key(1), (8, 4))
    parallel: Any = autopar.parallelize(_train, cluster="8xcpu", stages=2, microbatches=2)
    plain: Any = nnx.jit(_train)
    ours, theirs = made(), made()
    for _ in range(3):
        np.testing.assert_allclose(parallel(*ours, x), plain(*theirs, x), rtol=1e-4)
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(left), right, rtol=1e-4, atol=1e-6)


def test_creation_leaves_other_states_as_they_are() -> None:
    created, closed = pure_creation(lambda: {"w": X})
    assert created().keys() == closed(created()).keys() == {"w"}


def test_patterns_need_not_name_the_box_of_a_variable() -> None:
    paths = ["net/first/kernel/value", "net/first/bias/value", "net/kernel/value/value"]
    assert meant("net/first/kernel", paths) == ("net/first/kernel/value",)
    assert meant("**/first/kernel", paths) == ("net/first/kernel/value",)
    assert meant("**/kernel/value", paths) == ("net/first/kernel/value", "net/kernel/value/value")
    assert not matches("net", "value")
    assert matches("value", "value")
