"""Arrays whose memory is gone are refused by name, and none is consumed that is needed yet."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autopar.errors import ArgumentError
from autopar.runtime.pieces import StackedPieces
from tests.api.calls import FORMS, assert_equal, batch_of, parallel, state_of, train_step


@pytest.mark.smoke
@pytest.mark.parametrize("form", FORMS)
def test_state_that_a_step_consumed_is_refused(form: str) -> None:
    step = parallel(form)
    first, _ = step(state_of(), batch_of())
    second, _ = step(first, batch_of())
    with pytest.raises(ArgumentError) as refused:
        step(first, batch_of())
    assert str(refused.value).splitlines()[:3] == [
        "train_step was given arrays that are deleted:",
        "* state/a f32[8,8]",
        "* state/b f32[8,8]",
    ]
    assert "donate=False" in str(refused.value)
    third, _ = step(second, batch_of())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(third))


@pytest.mark.parametrize("form", ["one program", "microbatches"])
def test_a_batch_that_was_deleted_is_refused(form: str) -> None:
    step, batch = parallel(form), jnp.asarray(batch_of())
    step(state_of(), batch)
    batch.delete()
    with pytest.raises(ArgumentError, match=r"\* batch f32\[16,8\]\ntrain_step does not consume"):
        step(state_of(), batch)


def test_deleted_arrays_are_refused_before_anything_is_planned() -> None:
    step, batch = parallel("one program"), jnp.asarray(batch_of())
    batch.delete()
    with pytest.raises(ArgumentError, match=r"batch f32\[16,8\]"):
        step(state_of(), batch)
    with pytest.raises(Exception, match="has no plan yet"):
        _ = step.plan


def test_keys_and_pieces_are_looked_at_too() -> None:
    def draw(state: Any, batch: Any) -> Any:
        key, used = jax.random.split(state["key"])
        return {"key": key, "w": state["w"] + jax.random.normal(used)}, batch.sum()

    step = parallel("one program", draw)
    state: Any = {"key": jax.random.key(0), "w": np.ones((4, 8), np.float32)}
    state, _ = step(state, batch_of())
    step(state, batch_of())
    kept = {**state, "w": np.ones((4, 8), np.float32)}
    with pytest.raises(ArgumentError, match=r"state/key key<fry>\[\]\nA step consumes"):
        step(kept, batch_of())
    pieces = StackedPieces((jnp.ones((2, 8)), jnp.ones((2, 8))))
    pieces.pieces[1].delete()
    with pytest.raises(ArgumentError, match=r"state/w f32\[4,8\]"):
        step({"key": jax.random.key(0), "w": pieces}, batch_of())


def test_only_some_of_many_are_named() -> None:
    step = parallel("one program", lambda state, batch: ([w + 1 for w in state], batch.sum()))
    state, _ = step([np.ones(8, np.float32)] * 7, batch_of())
    step(state, batch_of())
    with pytest.raises(ArgumentError, match=r"state/3 f32\[8\]\n\* and 3 more\n"):
        step(state, batch_of())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_deleted_closed_over_array_is_refused_with_its_line(
    when: str, devices: list[jax.Device]
) -> None:
    fixed = jax.device_put(np.ones((8, 8), np.float32), devices[0])
    step = parallel("one program", lambda w, x: (w + x.sum() * fixed, x.sum()), mesh=(8,))
    if when == "after":
        step(np.ones((8, 8), np.float32), batch_of())
    fixed.delete()
    wanted = r"const/0 f32\[8,8\], read at test_deleted\.py:\d+\nAnother function consumed"
    with pytest.raises(ArgumentError, match=wanted):
        step(np.ones((8, 8), np.float32), batch_of())


# -- arrays that share memory ------------------------------------------------------------------


def averaged(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    """A step with an average of its weights, drawn towards a reference."""

    def loss_fn(w: Any) -> jax.Array:
        error = jnp.mean((jnp.tanh(batch["x"] @ w["a"]) @ w["b"] - batch["x"]) ** 2)
        return error + jnp.mean((w["a"] - batch["reference"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["w"])
    new = jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], grads)
    mean = jax.tree.map(lambda m, w: 0.9 * m + 0.1 * w, state["mean"], new)
    return {"w": new, "mean": mean, "key": jax.random.split(state["key"])[0],
            "words": state["words"] + 1}, loss  # fmt: skip


def renamed(array: jax.Array) -> jax.Array:
    """A second array in the same memory."""
    old: Any = array.sharding
    names = {n: f"{n}_too" for n in old.mesh.axis_names}
    mesh = jax.sharding.Mesh(old.mesh.devices, tuple(names.values()))
    spec = PartitionSpec(*(names.get(str(axis)) for axis in old.spec))
    return jax.device_put(array, NamedSharding(mesh, spec))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("second", ["the same array", "the same memory"])
def test_leaves_may_share_memory(form: str, second: str) -> None:
    """An average starts as the weights, and the reference is the weights: all three are right."""
    step = parallel(form, averaged, batch_axes={"batch/reference": None})
    key = jax.random.key(3)
    mine: Any = {"w": state_of(), "mean": state_of(), "key": key, "words": np.zeros(2, np.uint32)}
    plain = mine
    for number in range(3):
        reference = mine["w"]["a"]
        if number:
            again = renamed if second == "the same memory" else lambda array: array
            words = jax.random.key_data(mine["key"])
            mine = {**mine, "mean": jax.tree.map(again, mine["w"]), "words": words}
            plain = {**plain, "mean": plain["w"], "words": jax.random.key_data(plain["key"])}
            reference = again(reference)
        got = step(mine, {"x": batch_of(number), "reference": reference})
        wanted = jax.jit(averaged)(plain, {"x": batch_of(number), "reference": plain["w"]["a"]})
        assert_equal(got, wanted)
        if number:
            assert second == "the same memory" or not reference.is_deleted()
            assert mine["w"]["b"].is_deleted()
        mine, plain = got[0], wanted[0]


@pytest.mark.parametrize("form", ["one program", "microbatches"])
def test_what_a_step_closes_over_may_be_its_first_state(form: str) -> None:
    """The weights that a penalty draws to are those that training starts from."""
    plan = parallel(form).plan_for(state_of(), batch_of())
    mesh = jax.sharding.Mesh(np.array(jax.devices()), plan.mesh.names)
    there = NamedSharding(mesh, PartitionSpec())
    start = jax.device_put(state_of(), there)

    def drawn(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        new, loss = train_step(state, batch)
        return jax.tree.map(lambda w, s: 0.9 * w + 0.1 * s, new, start), loss

    step = parallel(form, drawn)
    mine, plain = start, state_of()
    for number in range(3):
        mine, loss = step(mine, batch_of(number))
        plain, wanted = jax.jit(drawn)(plain, batch_of(number))
        assert_equal((mine, loss), (plain, wanted))
    assert not any(leaf.is_deleted() for leaf in start.values())


def test_the_message_is_short() -> None:
    step = parallel("one program", donate=False)
    batch = jnp.asarray(batch_of())
    batch.delete()
    with pytest.raises(ArgumentError) as refused:
        step(state_of(), batch)
    assert len(str(refused.value).splitlines()) == 3
    assert not re.search(r"donate=False", str(refused.value))
