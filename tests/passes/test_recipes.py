"""Each textbook strategy does what its name says, and free choice is never dearer."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.errors import InfeasibleError, InputError
from autopar.ir.graph import Op
from autopar.ir.listing import Listing, LocalOp
from autopar.ir.sharding import Sharding
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.values import Role
from autopar.passes.base import Setting
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.recipes import RECIPES, recipe_named
from tests.passes.corners import floats
from tests.passes.driving import Traced, lowered, setting, traced
from tests.zoo import cases

MESHES = ("8", "2,4")
NAMES = ("mlp", "gpt")
RESTRICTED = tuple(r for r in RECIPES if r != "auto")


@functools.cache
def zoo(name: str) -> Traced:
    case = cases("adam")[name]
    return traced(case.step, case.create_state(jax.random.key(0)), case.batch(0))


@functools.cache
def planned(name: str, method: str, mesh: str, cluster: str = "8xh100") -> ShardingPlan:
    given = setting(mesh, cluster)
    return Optimal(recipe=recipe_named(method)).run(zoo(name).graph, given)


def listing(name: str, method: str, mesh: str) -> Listing:
    given: Setting = setting(mesh, "8xh100")
    return lowered(zoo(name).graph, planned(name, method, mesh), given)


def state(name: str, method: str, mesh: str, under: str) -> Iterator[tuple[str, Sharding, int]]:
    """State below a path: its path, how it lies, and its largest dim that divides by 8, or 0."""
    plan = planned(name, method, mesh)
    for given in zoo(name).graph.inputs:
        if given.role is Role.STATE and f"/{under}" in given.path:
            able = [n for n in given.value.shape if n % 8 == 0]
            yield given.path, plan.sharding_of[given.value.name], max(able, default=0)


def over_all(sharding: Sharding, mesh: str) -> bool:
    return set(sharding.axes()) == set(setting(mesh).mesh.names)


def batch_is_split(name: str, method: str, mesh: str, axes: tuple[str, ...]) -> bool:
    plan = planned(name, method, mesh)
    batch = [i for i in zoo(name).graph.inputs if i.role is Role.BATCH and i.value.shape]
    assert batch
    return all(plan.sharding_of[i.value.name].dims[0] == axes for i in batch)


def kinds(name: str, method: str, mesh: str, region: str) -> set[str]:
    """Collectives of more than a few bytes that a region starts."""
    moves = listing(name, method, mesh).collectives()
    return {c.kind for m, c in moves if m.region == region and c.nbytes > 256}


# -- definitions -----------------------------------------------------------------------------------

EVERYWHERE = [(n, m) for n in NAMES for m in MESHES]


@pytest.mark.parametrize("name", ["gpt", "tied"])
def test_data_parallel_reduces_each_gradient_once(name: str) -> None:
    """The gradients of a tied embedding, of its lookup and of the head, are added before."""
    given = (i.value for i in zoo(name).graph.inputs if "/params/" in f"/{i.path}")
    moves = listing(name, "dp", "8").collectives()
    loss = 4
    assert sum(c.nbytes for _, c in moves) == sum(v.nbytes for v in given) + loss


@pytest.mark.parametrize("method", ["dp", "zero1"])
def test_the_batch_is_followed_through_rows_that_are_joined(method: str) -> None:
    """Preferences: good and bad answers behind each other, and parted behind the model."""

    def step(params: jax.Array, good: jax.Array, bad: jax.Array) -> jax.Array:
        def loss(params: jax.Array) -> jax.Array:
            scores = jnp.tanh(jnp.concatenate([good, bad]) @ params).sum(1)
            better, worse = jnp.split(scores, 2)
            return -jax.nn.log_sigmoid(better - worse).mean()

        return params - jax.grad(loss)(params)

    own = traced(step, jnp.zeros((16, 16)), jnp.zeros((32, 16)), jnp.zeros((32, 16)))
    given = setting("8", "8xh100")
    plan = Optimal(recipe=recipe_named(method)).run(own.graph, given)
    products = [op for op in own.graph.ops if op.kind == "dot_general"]
    assert len(products) == 2
    steps = lowered(own.graph, plan, given).block.instructions
    shares = [
        s for s in steps if isinstance(s, LocalOp) and own.graph.op_at(s.equation) in products
    ]
    assert len(shares) == 2
    for share in shares:
        assert ("data",) in [axes for s in share.operand_shardings for axes in s.dims]


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "mesh"), EVERYWHERE)
def test_data_parallel(name: str, mesh: str) -> None:
    everything = [*state(name, "dp", mesh, "")]
    assert everything
    assert all(s.is_replicated for _, s, _ in everything)
    assert batch_is_split(name, "dp", mesh, setting(mesh).mesh.names)
    assert kinds(name, "dp", mesh, "forward") <= {"all-reduce"}
    assert "all-reduce" in kinds(name, "dp", mesh, "backward") | kinds(name, "dp", mesh, "update")


@pytest.mark.parametrize("method", ["zero1", "zero2"])
@pytest.mark.parametrize(("name", "mesh"), EVERYWHERE)
def test_zero_shards_the_optimizer_and_no_parameter(name: str, mesh: str, method: str) -> None:
    moments = [*state(name, method, mesh, "opt_state")]
    assert any(able for _, _, able in moments)
    for path, sharding, able in moments:
        assert over_all(sharding, mesh) == bool(able), path
    assert all(s.is_replicated for _, s, _ in state(name, method, mesh, "params"))
    assert batch_is_split(name, method, mesh, setting(mesh).mesh.names)


@pytest.mark.parametrize(("name", "mesh"), EVERYWHERE)
def test_zero2_scatters_gradients_and_zero1_does_not(name: str, mesh: str) -> None:
    def scattering(method: str) -> bool:
        return "reduce-scatter" in {c.kind for _, c in listing(name, method, mesh).collectives()}

    assert scattering("zero2")
    assert not scattering("zero1")
    gathered = {c.kind for _, c in listing(name, "zero2", mesh).collectives()}
    assert "all-gather" in gathered  # the new parameters


@pytest.mark.parametrize(("name", "mesh"), EVERYWHERE)
def test_fully_sharded(name: str, mesh: str) -> None:
    for path, sharding, able in state(name, "fsdp", mesh, ""):
        assert over_all(sharding, mesh) or not able, path
        assert not sharding.partial
    assert batch_is_split(name, "fsdp", mesh, setting(mesh).mesh.names)
    assert "all-gather" in kinds(name, "fsdp", mesh, "forward")


def weight_products(name: str) -> Iterator[tuple[tuple[int, ...], Op]]:
    """Products of the forward pass that read a parameter of two dims."""
    graph = zoo(name).graph
    params = {i.value.name for i in graph.inputs if "params" in i.path and len(i.value.shape) > 1}
    for n, op in enumerate(graph.ops):
        if op.kind == "dot_general" and params & set(op.value_operands):
            yield (n,), op


@pytest.mark.parametrize("name", NAMES)
def test_megatron_splits_features_over_the_last_axis(name: str) -> None:
    plan = planned(name, "megatron", "2,4")
    found = 0
    for path, op in weight_products(name):
        assert op.rule is not None
        factor = plan.assignment_of[path].factors[-1]
        assert factor >= 0, op
        weight = op.rule.operands[1]
        assert any(factor in dim for dim in weight), op
        found += 1
    assert found >= 2
    assert batch_is_split(name, "megatron", "2,4", ("data",))
    for _, sharding, _ in state(name, "megatron", "2,4", "params"):
        assert set(sharding.axes()) <= {"model"}


# -- two kinds of axis -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "gpt", "gpt_scan"])
def test_hybrid_sharding_stays_within_the_last_axis(name: str) -> None:
    for path, sharding, able in state(name, "hsdp", "2,4", ""):
        assert "data" not in sharding.axes(), path
        assert sharding.axes() == ("model",) or not able, path
    assert batch_is_split(name, "hsdp", "2,4", ("data", "model"))
    moved = {
        (c.kind, c.axes) for _, c in listing(name, "hsdp", "2,4").collectives() if c.nbytes > 256
    }
    assert {axes for kind, axes in moved if kind == "all-gather"} == {("model",)}
    assert any(kind == "all-reduce" and "data" in axes for kind, axes in moved)


@pytest.mark.parametrize("name", ["gpt", "gpt_scan"])
def test_sharded_tensors_are_split_by_features_and_over_the_data_axis(name: str) -> None:
    for path, sharding, able in state(name, "fsdp+tp", "2,4", ""):
        assert "data" in sharding.axes() or not able, path
    kernels = [s for p, s, _ in state(name, "fsdp+tp", "2,4", "params") if "kernel" in p]
    assert kernels
    assert all(set(s.axes()) == {"data", "model"} for s in kernels)
    assert batch_is_split(name, "fsdp+tp", "2,4", ("data",))
    moved = {c.kind: c.axes for _, c in listing(name, "fsdp+tp", "2,4").collectives()}
    assert moved["reduce-scatter"] in {("data",), ("model",)}


@pytest.mark.parametrize("method", ["hsdp", "fsdp+tp"])
def test_two_kinds_of_axis_need_two_axes(method: str) -> None:
    refused = rf"{re.escape(method)} .*mesh \(data=8\) has only one\. Use"
    with pytest.raises(InfeasibleError, match=refused):
        planned("mlp", method, "8")


# -- sequences -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "dropout", "gpt_scan"])
def test_norms_and_residuals_are_split_by_position(name: str) -> None:
    """What norms take the mean of over features: [batch, position, feature], as it is read."""
    plan, graph = planned(name, "sequence", "2,4"), zoo(name).graph
    found = 0
    for op in graph.walk():
        value = graph.nested_values.get(str(op.operands[0])) if op.operands else None
        if op.kind != "reduce_sum" or op.origin.region != "forward" or value is None:
            continue
        if "Norm" not in op.origin.module or len(value.shape) < 3 or not value.is_floating:
            continue
        sharding = plan.sharding_of.get(value.name)
        if sharding is not None:
            assert sharding.dims[:2] == (("data",), ("model",)), op
            found += 1
    assert found >= 2
    for path, sharding, _ in state(name, "sequence", "2,4", "params"):
        assert set(sharding.axes()) <= {"model"}, path


def test_a_step_without_a_sequence_says_so() -> None:
    with pytest.raises(InfeasibleError, match="along a sequence, but this step has none"):
        planned("mlp", "sequence", "2,4")


def test_a_sequence_that_does_not_divide_is_named_with_its_line() -> None:
    with pytest.raises(InfeasibleError, match=r"product at vit\.py:\d+ it has 17 positions"):
        planned("vit", "sequence", "2,4")


# -- experts ---------------------------------------------------------------------------------------


_CROSSING = ("all-to-all", "all-gather")


@pytest.mark.parametrize(("mesh", "axis"), [("8", "data"), ("2,4", "model"), ("2,2,2", "model")])
@pytest.mark.parametrize("name", ["moe", "moe_switch"])
def test_experts_are_split_and_nothing_else(name: str, mesh: str, axis: str) -> None:
    experts = 0
    for path, sharding, _ in state(name, "expert", mesh, ""):
        if path.endswith(("/up", "/down")):
            assert sharding == Sharding(((axis,), (), ())), path
            experts += 1
        else:
            assert sharding.is_replicated, path
    assert experts >= 12  # two weights of two layers, and their two moments
    assert batch_is_split(name, "expert", mesh, setting(mesh).mesh.names)
    # Dispatch and combine of two layers, forward and backward. So few bytes are sooner gathered
    # and cut up again than sent by an all-to-all, which copies before and after.
    moves = [m for m, _ in listing(name, "expert", mesh).moves()]
    for region in ("forward", "backward"):
        crossing = [
            c for m in moves for c in m.collectives if m.region == region and c.kind in _CROSSING
        ]
        assert len(crossing) == 4
        assert all(c.axes == (axis,) for c in crossing)


OPTIMIZERS = {
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=16),
    "lamb": optax.lamb(1e-3),
}


@pytest.mark.parametrize(("mesh", "axis"), [("8", "data"), ("2,4", "model")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_experts_are_updated_where_they_are(optimizer: str, mesh: str, axis: str) -> None:
    """An update's norms, and the rows and columns of factored moments, are summed there."""
    case, given = cases("adam")["moe"], setting(mesh, "8xh100")
    state, tx = case.create_state(jax.random.key(0)), OPTIMIZERS[optimizer]
    step = traced(case.step, state.replace(tx=tx, opt_state=tx.init(state.params)), case.batch(0))
    plan = Optimal(recipe=recipe_named("expert")).run(step.graph, given)
    sizes = [(i.path, i.value) for i in step.graph.inputs if "/experts" in i.path]
    experts = [(path, value) for path, value in sizes if value.shape[:1] == (8,)]
    assert len(experts) == 12  # two weights of two layers, and two moments of each
    for path, value in experts:
        assert plan.sharding_of[value.name].dims[0] == (axis,), path
    moves = lowered(step.graph, plan, given).collectives()
    sums = [c for move, c in moves if move.region == "update"]
    assert {c.kind for c in sums} == {"all-reduce"}
    assert all(c.nbytes == 4 for c in sums), "a number for each weight"


def test_experts_that_divide_by_no_axis_say_so() -> None:
    with pytest.raises(InfeasibleError, match=r"8 experts divide by none of \(data=16\)"):
        planned("moe", "expert", "16", "16xcpu")


def test_a_step_without_experts_says_so() -> None:
    with pytest.raises(InfeasibleError, match="but this step has none"):
        planned("gpt", "expert", "8")


# -- axes of one device ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in RECIPES if m not in {"hsdp", "fsdp+tp"}])
def test_an_axis_of_one_device_changes_no_plan(method: str) -> None:
    name = "moe" if method == "expert" else "gpt"
    plain = planned(name, method, "model=8")
    for mesh in ("data=1,model=8", "model=8,data=1", "replica=1,model=8,data=1"):
        if not mesh.endswith("model=8") and method in {"megatron", "sequence"}:
            continue  # the last axis is that of the tensors
        plan = planned(name, method, mesh)
        assert plan.sharding_of == plain.sharding_of, mesh
        assert plan.outcome.seconds == plain.outcome.seconds
    assert {a for s in plain.sharding_of.values() for a in s.axes()} <= {"model"}


@pytest.mark.parametrize("method", ["hsdp", "fsdp+tp"])
def test_two_kinds_of_axis_may_have_one_device_each(method: str) -> None:
    for mesh, axis in (("data=1,model=8", "model"), ("data=8,model=1", "data")):
        axes = {a for s in planned("gpt", method, mesh).sharding_of.values() for a in s.axes()}
        assert axes == {axis}


# -- free choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["8xh100", "8xcpu", "v5e:2x4"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["mlp", "masked", "lstm_raw"])
def test_free_choice_is_never_dearer(name: str, mesh: str, cluster: str) -> None:
    best = planned(name, "auto", mesh, cluster).outcome
    for method in RESTRICTED:
        try:
            restricted = planned(name, method, mesh, cluster).outcome.seconds
        except InfeasibleError:
            continue  # no second axis, no experts, no sequence
        assert best.seconds <= restricted * (1 + 2e-6), method
        assert best.bound_seconds <= restricted


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["8xh100", "8xcpu", "v5e:2x4"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", sorted(cases("adam")))
def test_free_choice_is_never_dearer_anywhere(name: str, mesh: str, cluster: str) -> None:
    best = planned(name, "auto", mesh, cluster).outcome.seconds
    for method in RESTRICTED:
        try:
            restricted = planned(name, method, mesh, cluster).outcome.seconds
        except InfeasibleError:
            continue  # heads that do not divide
        assert best <= restricted * (1 + 2e-6), method


# -- errors ----------------------------------------------------------------------------------------


def test_an_unknown_recipe_lists_those_that_there_are() -> None:
    with pytest.raises(InputError, match="method 'zero4' is unknown; there are: auto, dp, zero1"):
        recipe_named("zero4")


def test_a_batch_that_does_not_divide_says_so() -> None:
    step = traced(lambda w, x: (w - x.sum(0), x @ w), floats(8), floats(6, 8))
    with pytest.raises(InfeasibleError) as caught:
        Optimal(recipe=recipe_named("dp")).run(step.graph, setting("8"))
    text = str(caught.value)
    assert "dp splits the batch over data, 8 devices, but the batch has 6 rows (x)" in text
    assert "a multiple of 8" in text
    Optimal().run(step.graph, setting("8"))


def test_heads_that_do_not_divide_are_named() -> None:
    with pytest.raises(InfeasibleError, match=r"heads over data=16, but the product at gpt\.py:"):
        planned("gpt", "megatron", "16", "16xcpu")
