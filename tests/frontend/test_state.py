"""State is found without being named: what comes back, made from what went in."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from autopar.errors import ArgumentError
from autopar.frontend import StepSpec, trace
from autopar.ir.values import Role
from tests.frontend.tracing import X, checked, graph_of, paths, returned, shape

W = {"w": shape(8, 8), "b": shape(8)}


def _loss(params: Any, x: Any) -> Any:
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def _descend(params: Any, x: Any) -> tuple[Any, Any]:
    loss, grads = jax.value_and_grad(_loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def test_the_first_argument_comes_back() -> None:
    graph = graph_of(_descend, W, X)
    assert returned(graph) == {"0/b": "params/b", "0/w": "params/w"}
    assert paths(graph, Role.BATCH) == ["x"]


def test_parameters_and_optimizer_state_come_back_apart() -> None:
    tx = optax.adam(1e-3)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    graph = graph_of(step, W, jax.eval_shape(tx.init, W), X)
    pairs = returned(graph)
    assert pairs["0/w"] == "params/w"
    assert pairs["1/0/mu/b"] == "opt_state/0/mu/b"
    assert pairs["1/0/count"] == "opt_state/0/count"
    assert paths(graph, Role.BATCH) == ["batch"]


def test_state_with_no_arrays_hides_nothing() -> None:
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        new, loss = _descend(params, batch)
        return new, opt_state, loss

    empty = optax.sgd(0.1).init({})
    graph = graph_of(step, W, empty, X)
    assert paths(graph, Role.STATE) == ["params/b", "params/w"]
    declared = StepSpec(step, state_argnums=(0, 1))
    assert len(trace(declared, (W, empty, X), {}).donated) == 2


def test_targets_that_look_like_a_weight_are_no_state() -> None:
    """The batch has more leaves than the state, and the checkpoint makes w' of y's shape from y."""

    def step(state: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

        return {"w": state["w"] - jax.grad(jax.checkpoint(loss))(state["w"])}, 0.0

    graph = graph_of(step, {"w": shape(8, 8)}, {"x": shape(8, 8), "y": shape(8, 8)})
    assert paths(graph, Role.STATE) == ["state/w"]
    assert paths(graph, Role.BATCH) == ["batch/x", "batch/y"]


def test_what_a_prediction_leaves_of_the_batch_is_no_state() -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            left = x - jnp.tanh(x @ params["w"] + params["b"])
            return jnp.mean(left**2), left

        (value, left), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, left

    graph = graph_of(step, W, shape(8, 8))
    assert paths(graph, Role.STATE) == ["params/b", "params/w"]
    assert paths(graph, Role.BATCH) == ["x"]


def test_returns_made_of_rewards_and_ends_are_no_state() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            value = jnp.sum(batch["seen"] @ params["w"] + params["b"], -1)
            reached = batch["reward"] + 0.9 * value * (1 - batch["done"])
            return jnp.mean((value - jax.lax.stop_gradient(reached)) ** 2), reached

        (value, reached), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (value, reached)

    batch = {"done": shape(6, 4), "reward": shape(6, 4), "seen": shape(6, 4, 8)}
    graph = graph_of(step, W, batch)
    assert paths(graph, Role.STATE) == ["params/b", "params/w"]


def test_what_comes_back_of_the_batch_beside_the_loss_is_no_state() -> None:
    """Labels as they were, losses by a mask, rewards less their mean."""

    def step(params: Any, reward: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = batch["image"] @ params["w"] + params["b"]
            own = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)[:, 0]
            return jnp.mean(own * reward), own * batch["mask"]

        (value, losses), grads = jax.value_and_grad(loss, has_aux=True)(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        told = {"labels": batch["label"], "losses": losses}
        return new, value, reward - jnp.mean(reward), told

    batch = {"image": shape(6, 8), "label": shape(6, dtype="int32"), "mask": shape(6)}
    graph = graph_of(step, W, shape(6), batch)
    assert paths(graph, Role.STATE) == ["params/b", "params/w"]


def test_a_batch_that_comes_back_changed_is_no_state() -> None:
    def step(params: Any, batch: Any) -> Any:
        new, value = _descend(params, batch["image"])
        return new, value, {**batch, "image": 0.5 * batch["image"]}

    graph = graph_of(step, W, {"image": shape(6, 8), "label": shape(6, dtype="int32")})
    assert paths(graph, Role.STATE) == ["params/b", "params/w"]


def test_statistics_and_memories_that_no_gradient_changes_are_state() -> None:
    def step(params: Any, mean: Any, memory: Any, teacher: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = x @ params["w"] + params["b"]
            return jnp.mean((hidden @ memory - x @ teacher["w"] - teacher["b"]) ** 2), hidden

        (value, hidden), grads = jax.value_and_grad(loss, has_aux=True)(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        mean = 0.9 * mean + 0.1 * jnp.mean(hidden, 0)
        memory = jax.lax.dynamic_update_slice(memory, hidden[:2].T @ hidden[:2], (0, 0))
        teacher = jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, teacher, new)
        return new, mean, memory, teacher, value

    for rows in (8, 16):  # also where there are as many rows as features
        graph = graph_of(step, W, shape(8), shape(8, 8), W, shape(rows, 8))
        assert paths(graph, Role.BATCH) == ["x"]


def test_what_steps_on_without_gradients_is_state_however_it_is_read() -> None:
    def step(x: Any, a: Any) -> Any:
        left = x - a @ x
        return left, jnp.sum(left**2)

    assert paths(graph_of(step, shape(8), shape(8, 8)), Role.STATE) == ["x"]


def test_state_may_stand_within_a_dict() -> None:
    def step(state: Any, batch: Any) -> Any:
        new, loss = _descend(state, batch)
        return {"metrics": {"loss": loss}, "new": {"state": new}}

    graph = graph_of(step, W, X)
    assert returned(graph) == {"new/state/b": "state/b", "new/state/w": "state/w"}


def test_a_tuple_of_states_may_come_back_in_parts() -> None:
    def step(carry: Any, batch: Any) -> Any:
        params, count = carry
        new, loss = _descend(params, batch)
        return loss, new, {"steps": count}

    graph = graph_of(step, (W, shape(dtype=jnp.int32)), X)
    assert returned(graph) == {"1/b": "carry/0/b", "1/w": "carry/0/w"}


def test_lone_arrays_are_state_where_they_are_updated_in_place() -> None:
    def step(w: Any, b: Any, x: Any) -> Any:
        new, loss = _descend({"w": w, "b": b}, x)
        return new["w"], new["b"], loss

    graph = graph_of(step, shape(8, 8), shape(8), X)
    assert returned(graph) == {"0": "w", "1": "b"}


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"image": x}])
def test_a_batch_that_looks_like_the_prediction_is_no_state(wrap: Any) -> None:
    def step(params: Any, batch: Any) -> Any:
        x = jax.tree.leaves(batch)[0]
        return _descend(params, x)[0], wrap(jnp.tanh(x @ params["w"]))

    graph = graph_of(step, W, wrap(X))
    assert len(paths(graph, Role.BATCH)) == 1
    assert set(returned(graph).values()) == {"params/b", "params/w"}


def test_a_number_that_looks_like_the_loss_is_no_state() -> None:
    def step(params: Any, temperature: Any, batch: Any) -> Any:
        new, loss = _descend(params, batch)
        return new, loss * temperature

    assert paths(graph_of(step, W, 2.0, X), Role.BATCH) == ["temperature", "batch"]


@pytest.mark.parametrize("typed", [True, False])
def test_random_keys_are_state_where_they_are_split(typed: bool) -> None:
    key = jax.random.key(0) if typed else jax.random.PRNGKey(0)

    def step(params: Any, key: Any, batch: Any) -> Any:
        key, sub = jax.random.split(key)
        noise = jax.random.normal(sub, batch.shape)
        return *_descend(params, batch + noise), key

    graph = graph_of(step, W, key, X)
    assert returned(graph)["2"] == "key"


def test_nothing_comes_back() -> None:
    graph = graph_of(_loss, W, X)
    assert graph.donated == ()
    assert paths(graph, Role.STATE) == []


def test_a_donation_of_the_users_own_tells_the_state() -> None:
    step = jax.jit(lambda table, x: (x.sum(), table @ table), donate_argnums=0)
    graph = graph_of(step, shape(8, 8), X)
    assert returned(graph) == {"1": "table"}


def test_declared_state_counts_static_arguments_too() -> None:
    def step(scale: float, x: Any, params: Any) -> Any:
        return _descend(params, x * scale)

    spec = StepSpec(step, static_argnums=(0,), state_argnums=(-1,))
    graph = checked(trace(spec, (2.0, X, W), {}))
    assert paths(graph, Role.STATE) == ["params/b", "params/w"]


def test_declared_state_that_does_not_come_back_is_an_error() -> None:
    def step(params: Any, x: Any) -> Any:
        return {**params, "w": params["w"][:4]}, _loss(params, x)

    with pytest.raises(ArgumentError) as caught:
        trace(StepSpec(step, state_argnums=(0,)), (W, X), {})
    assert str(caught.value) == (
        "argument params of step was declared state, but no output has its shapes and dtypes.\n"
        "* params/w went in as float32[8, 8] and came back as float32[4, 8]\n"
        "Return the new state, or leave the argument out of state_argnums."
    )
    with pytest.raises(ArgumentError, match="no output has its tree"):
        trace(StepSpec(_loss, state_argnums=(0,)), (W, X), {})


class _Pair(NamedTuple):
    w: Any
    rest: Any


def _flax_state() -> Any:
    def create() -> Any:
        model = nn.Dense(8)
        params = model.init(jax.random.key(0), np.zeros((2, 8)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    return jax.eval_shape(create)


TREES: dict[str, Any] = {
    "dict": {"a": {"b": X}, "none": None, "empty": {}},
    "list": [X, (X, [])],
    "namedtuple": _Pair(X, {"none": None, "x": X}),
    "equinox": jax.eval_shape(lambda: eqx.nn.Linear(8, 8, key=jax.random.key(0))),
    "nnx": jax.eval_shape(lambda: nnx.state(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))),
    "train state": _flax_state(),
}


@pytest.mark.parametrize("name", TREES)
def test_state_may_be_any_tree(name: str) -> None:
    def step(state: Any, x: Any) -> Any:
        return jax.tree.map(lambda v: v + v.dtype.type(1), state), x.sum()

    graph = graph_of(step, TREES[name], X)
    count = len(jax.tree.leaves(TREES[name]))
    assert graph.donated == tuple((i, i) for i in range(count))
    for o, i in graph.donated:
        assert graph.output_paths[o].removeprefix("0/") == graph.inputs[i].path.removeprefix(
            "state/"
        )
