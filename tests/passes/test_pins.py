"""What the user fixes stays fixed: pins by path, and constraints inside the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autopar.errors import PinError
from autopar.ir.paths import matches
from autopar.ir.sharding import Sharding
from autopar.ir.sharding_plan import ShardingPlan
from autopar.passes.base import Setting
from autopar.passes.shard.model.pins import Dims, show_spec
from autopar.passes.shard.optimal import Optimal
from tests.passes.corners import CORNERS, floats
from tests.passes.driving import Traced, largest_error, lowered, run_listing, setting, traced

DATA, MODEL, BOTH, TURNED = ("data",), ("model",), ("data", "model"), ("model", "data")

PATHS = (
    ("state/params/block/kernel", "state/params/block/kernel", True),
    ("params/block/kernel", "state/params/block/kernel", True),
    ("params/*/kernel", "state/params/block/kernel", True),
    ("params/**/kernel", "state/params/block/kernel", True),
    ("params/**/kernel", "state/params/a/b/kernel", True),
    ("params/**/kernel", "state/params/kernel", True),
    ("**/kernel", "state/params/block/kernel", True),
    ("**", "anything/at/all", True),
    ("params/**", "state/params/block/kernel", True),
    ("*/*/block/*", "state/params/block/kernel", True),
    ("params/block_[01]/k*", "state/params/block_1/kernel", True),
    ("params/*/kernel", "state/params/a/b/kernel", False),
    ("kernel", "state/params/block/kernel", False),
    ("block/kernel", "state/params/block/kernel", False),
    ("params/block", "state/params/block/kernel", False),
    ("params/*", "state/params/block/kernel", False),
    ("PARAMS/**", "state/params/kernel", False),
    ("w", "w", True),
    ("*", "w", True),
)


@pytest.mark.smoke
@pytest.mark.parametrize(("pattern", "path", "expected"), PATHS)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


def test_specs_print_as_jax_writes_them() -> None:
    assert show_spec(((), MODEL, BOTH)) == "P(None, 'model', ('data', 'model'))"
    assert show_spec(()) == "P()"


def net(state: dict[str, Any], x: jax.Array) -> Any:
    """Two layers and a plain gradient step."""

    def loss(params: Any) -> jax.Array:
        h = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
        return jnp.mean((h @ params["second"]["kernel"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value


@pytest.fixture(scope="module")
def step() -> Traced:
    first = {"kernel": floats(8, 16), "bias": floats(16)}
    params = {"first": first, "second": {"kernel": floats(16, 8)}}
    return traced(net, {"params": params}, floats(16, 8))


def pinned(*pins: tuple[str, Dims]) -> Setting:
    return replace(setting("2,4"), pins=pins)


def input_of(step: Traced, plan: ShardingPlan, path: str) -> Sharding:
    """How the argument at a path lies."""
    return next(plan.sharding_of[i.value.name] for i in step.graph.inputs if i.path.endswith(path))


def test_pins_are_kept_and_exact(step: Traced, devices: list[jax.Device]) -> None:
    given = pinned(("params/*/kernel", ((), MODEL)), ("state/params/first/bias", (TURNED,)))
    plan = Optimal().run(step.graph, given)
    assert input_of(step, plan, "first/kernel") == Sharding(((), MODEL))
    assert input_of(step, plan, "second/kernel") == Sharding(((), MODEL))
    assert input_of(step, plan, "first/bias") == Sharding((TURNED,))
    got = run_listing(step, lowered(step.graph, plan, given), given)
    assert largest_error(got, jax.jit(net)(*step.args)) < 1e-6


@pytest.mark.parametrize("dims", [(TURNED,), (BOTH,), (MODEL, DATA), (), ((), TURNED)])
def test_a_batch_pin_of_any_order_is_kept(
    step: Traced, dims: Dims, devices: list[jax.Device]
) -> None:
    given = pinned(("x", dims))
    plan = Optimal().run(step.graph, given)
    padded = (*dims, *((),) * (2 - len(dims)))
    assert input_of(step, plan, "x") == Sharding(padded)
    got = run_listing(step, lowered(step.graph, plan, given), given)
    assert largest_error(got, jax.jit(net)(*step.args)) < 1e-6


def test_pins_may_name_an_axis_of_one_device(step: Traced, devices: list[jax.Device]) -> None:
    """A layout that is written for any mesh is taken on this one, where `data` splits nothing."""
    pins = (
        ("x", (DATA,)),
        ("params/first/kernel", (DATA, MODEL)),
        ("params/second/kernel", (TURNED,)),
    )
    given = replace(setting("data=1,model=4"), pins=pins)
    plan = Optimal().run(step.graph, given)
    assert input_of(step, plan, "x") == Sharding(((), ()))
    assert input_of(step, plan, "first/kernel") == Sharding(((), MODEL))
    assert input_of(step, plan, "second/kernel") == Sharding((MODEL, ()))
    listing = lowered(step.graph, plan, given)
    assert not any("data" in c.axes for _, c in listing.collectives())
    got = run_listing(step, listing, given)
    assert largest_error(got, jax.jit(net)(*step.args)) < 1e-6


def test_a_pin_on_what_is_cut_up_at_once_is_kept(devices: list[jax.Device]) -> None:
    """16 examples are reshaped to (4, 4): eight devices may still hold two each."""
    fun, args = CORNERS["accumulated"]
    step, given = traced(fun, *args), replace(setting("8"), pins=(("x", (DATA,)),))
    plan = Optimal().run(step.graph, given)
    assert input_of(step, plan, "x") == Sharding((DATA, ()))
    got = run_listing(step, lowered(step.graph, plan, given), given)
    assert largest_error(got, jax.jit(fun)(*args)) < 1e-6


BAD = (
    (
        "params/frist/kernel",
        (),
        r"matches none of the 4 arguments; the nearest paths are .*first/k",
    ),
    ("params/first/bias", ((), MODEL), r"has 2 dims, but state/params/first/bias is f32\[16\]"),
    ("x", (("expert",),), r"names axis 'expert', but the mesh has \(data=2, model=4\)"),
    ("x", (MODEL, MODEL), "uses an axis twice"),
    ("params/odd", (MODEL,), r"splits dim 0 of state/params/odd f32\[6\] over 4 devices"),
)


@pytest.mark.parametrize(("pattern", "dims", "text"), BAD)
def test_pins_that_cannot_be_kept(step: Traced, pattern: str, dims: Dims, text: str) -> None:
    graph = step.graph
    if "odd" in pattern:
        graph = traced(lambda state, x: (state, x.sum()), {"params": {"odd": floats(6)}}, 1.0).graph
    with pytest.raises(PinError, match=text) as caught:
        Optimal().run(graph, pinned((pattern, dims)))
    assert "* pin" in str(caught.value)
    assert str(caught.value).endswith("or leave them out.")


def test_all_faults_come_at_once(step: Traced) -> None:
    faulty = pinned(
        ("params/**", (DATA,)), ("params/first/bias", (MODEL,)), ("nothing", ()), ("x", (("z",),))
    )
    with pytest.raises(PinError) as caught:
        Optimal().run(step.graph, faulty)
    text = str(caught.value)
    assert text.count("\n* ") == 3
    assert "contradict each other on state/params/first/bias f32[16]" in text


def test_pins_that_agree_do_not_contradict(step: Traced) -> None:
    given = pinned(("params/**/kernel", (DATA,)), ("params/first/kernel", (DATA, ())))
    plan = Optimal().run(step.graph, given)
    assert input_of(step, plan, "first/kernel") == Sharding((DATA, ()))


# -- constraints in the step -----------------------------------------------------------------------

OPEN = PartitionSpec.UNCONSTRAINED
SPECS = (
    PartitionSpec("data", "model"),
    PartitionSpec(("model", "data")),
    PartitionSpec(None, ("model", "data")),
    PartitionSpec(OPEN, "model"),
    PartitionSpec(("model", "data"), OPEN),
    PartitionSpec(),
)


def constrained(spec: PartitionSpec, names: tuple[str, str] = ("data", "model")) -> Traced:
    """A step whose hidden layer its user has laid out."""
    mesh = jax.make_mesh((2, 4), names, axis_types=(AxisType.Auto,) * 2)

    def constrained_step(w: jax.Array, x: jax.Array) -> Any:
        hidden = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, spec))
        return w - jnp.tanh(hidden).sum(0) * 0.01, hidden * 2

    return traced(constrained_step, floats(8, 8), floats(16, 8))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_constraints_are_kept(spec: PartitionSpec, devices: list[jax.Device]) -> None:
    step, given = constrained(spec), setting("2,4")
    plan = Optimal().run(step.graph, given)
    result = next(op.results[0] for op in step.graph.walk() if op.kind == "sharding_constraint")
    held = plan.sharding_of[result.name]
    padded = (*spec, None, None)[:2]
    for entry, axes in zip(padded, held.dims, strict=True):
        if entry is not OPEN:
            assert axes == ((entry,) if isinstance(entry, str) else tuple(entry or ()))
    got = run_listing(step, lowered(step.graph, plan, given), given)
    x_w = step.args[1] @ step.args[0]
    expected = (step.args[0] - jnp.tanh(x_w).sum(0) * 0.01, x_w * 2)
    assert largest_error(got, expected) < 1e-6


def test_open_dims_take_only_axes_that_are_left() -> None:
    """Where the open dim would pay to be split, it takes data: model is taken."""
    step = constrained(PartitionSpec(OPEN, "model"))
    plan = Optimal().run(step.graph, replace(setting("2,4"), pins=(("x", (DATA,)),)))
    result = next(op.results[0] for op in step.graph.walk() if op.kind == "sharding_constraint")
    assert plan.sharding_of[result.name] in (
        Sharding((DATA, MODEL)),
        Sharding(((), MODEL)),
    )


def test_a_constraint_on_another_mesh_says_so() -> None:
    step = constrained(PartitionSpec("batch"), ("batch", "tensor"))
    with pytest.raises(PinError, match=r"names axis 'batch', but the plan's mesh has \(data=2"):
        Optimal().run(step.graph, setting("2,4"))
    with pytest.raises(PinError, match=r"test_pins\.py"):
        Optimal().run(step.graph, setting("2,4"))


def test_a_constraint_that_does_not_divide_says_so() -> None:
    step = constrained(PartitionSpec("model"))
    with pytest.raises(PinError, match=r"splits dim 0 of f32\[16,8\] over 3 devices"):
        Optimal().run(step.graph, setting("data=2,model=3"))
