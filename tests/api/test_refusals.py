"""The errors that a user will meet, told in the user's terms."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import (
    ArgumentError,
    BatchStatisticError,
    ClusterError,
    InfeasibleError,
    InputError,
    MemoryLimitError,
    MeshError,
    PinError,
    PlanError,
    PlanMismatchError,
    TraceError,
)
from tests.zoo import cases

S = jax.ShapeDtypeStruct


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda v: jnp.mean(jnp.tanh(x @ v) ** 2))(w)


W, X = S((64, 64), jnp.float32), S((16, 64), jnp.float32)


def plan_of(**options: Any) -> autopar.Plan:
    return autopar.plan(step, W, options.pop("x", X), cluster="8xcpu", **options)


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(InfeasibleError, match=r"batch has 12 rows .*is not divisible by 8"):
        plan_of(method="dp", x=S((12, 64), jnp.float32))


def test_heads_that_do_not_divide() -> None:
    case = cases("sgd")["vit"]
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    heads = r"splits attention heads over \w+=\d+, but the product at vit.py:\d+ has \d+ heads"
    with pytest.raises(InfeasibleError, match=heads):
        autopar.plan(
            case.step, state, case.batch(0), cluster="16xh100", mesh=(16,), method="megatron"
        )


@pytest.mark.parametrize("schedule", ["1f1b", "serial"])
def test_a_schedule_that_mixes_what_the_step_keeps_apart(schedule: str) -> None:
    case = cases("sgd")["moe_switch"]
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    options: dict[str, Any] = {"stages": 2, "microbatches": 4, "schedule": schedule}
    with pytest.raises(BatchStatisticError, match=r"mean over rows .*moe\.py(.|\n)*gpipe"):
        autopar.plan(case.step, state, case.batch(0), cluster="8xcpu", **options)


def test_a_schedule_of_one_program() -> None:
    with pytest.raises(ArgumentError, match=r"schedule='1f1b' is an order of stages .* stages=2"):
        plan_of(schedule="1f1b")


@pytest.mark.parametrize(
    ("given", "meant"), [("meshes", "mesh"), ("donate_argnums", "donate"), ("memory", "memory_gb")]
)
def test_an_option_that_starts_alike_is_meant(given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"did you mean '{meant}'"):
        autopar.parallelize(step, **dict[str, Any]({given: 8}))


def test_a_pin_is_shown_as_its_names_are_spelled() -> None:
    def layered(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda w: w - jnp.mean(x @ w), params)

    params = {"layers": [{"up": W}, {"up": W}]}
    pins = {"params/layer/*/up": P("data")}
    with pytest.raises(PinError, match=r"the nearest paths are params/layers/\*/up, "):
        autopar.plan(layered, params, X, cluster="8xcpu", pins=pins)


def test_a_mesh_larger_than_the_cluster() -> None:
    with pytest.raises(MeshError, match="has 16 devices, but cluster 8xcpu has 8"):
        plan_of(mesh=(4, 4))


def test_a_cluster_larger_than_what_is_here() -> None:
    parallel = autopar.parallelize(step, cluster="16xh100", mesh=(2, 8))
    with pytest.raises(MeshError, match="needs 16 devices but 8"):
        parallel(jnp.ones((64, 64)), jnp.ones((16, 64)))


def test_memory_that_cannot_fit_says_what_is_big_and_what_helps() -> None:
    big = S((4096, 4096), jnp.float32)
    with pytest.raises(MemoryLimitError) as error:
        autopar.plan(step, big, S((64, 4096), jnp.float32), cluster="8xcpu", memory_gb=0.001)
    text = str(error.value)
    assert "too much" in text
    assert "* w f32[4096,4096]: 8.00 MiB to 64.0 MiB a device, by how it is sharded" in text
    assert "memory_gb" in text


def test_pins_that_contradict_each_other() -> None:
    pins = {"w": P(None, "model"), "*": P("model", None)}
    with pytest.raises(PinError, match="contradict each other on w"):
        plan_of(mesh=(2, 4), pins=pins)


def test_a_pin_that_is_no_spec() -> None:
    with pytest.raises(InputError, match="write a PartitionSpec"):
        plan_of(pins={"w": 3})


def test_a_step_that_does_not_trace() -> None:
    def broken(w: Any, x: Any) -> Any:
        return w if x.sum() > 0 else -w

    with pytest.raises(TraceError, match="broken does not trace") as error:
        autopar.plan(broken, W, X, cluster="8xcpu")
    assert error.value.__cause__ is not None


def test_a_plan_for_another_model() -> None:
    plan = plan_of(mesh=(2, 4))
    parallel = autopar.parallelize(step, plan=plan)
    with pytest.raises(PlanMismatchError, match=r"argument w is f32\[64, 64\] in the plan and"):
        parallel.plan_for(S((128, 64), jnp.float32), S((16, 128), jnp.float32))


def test_a_plan_for_other_operations() -> None:
    def other(w: Any, x: Any) -> Any:
        return w - 0.2 * jax.grad(lambda v: jnp.mean(jnp.sin(x @ v) ** 2))(w)

    parallel = autopar.parallelize(other, plan=plan_of(mesh=(2, 4)))
    with pytest.raises(PlanMismatchError, match="the step's operations differ"):
        parallel.plan_for(W, X)


def test_a_plan_for_another_cluster() -> None:
    with pytest.raises(PlanMismatchError, match="made for cluster 8xcpu and this is 8xh100"):
        autopar.parallelize(step, plan=plan_of(mesh=(2, 4)), cluster="8xh100")


def test_a_plan_before_there_is_one() -> None:
    with pytest.raises(PlanError, match="has no plan yet"):
        _ = autopar.parallelize(step, cluster="8xcpu").plan


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(ClusterError, match="h100"):
        autopar.parallelize(step, cluster="8xh101")
    with pytest.raises(InputError, match="there are: auto, dp, zero1, zero2, fsdp, hsdp, megatron"):
        plan_of(method="zero9")


def test_an_unknown_primitive_warns_once_with_its_line() -> None:
    mystery = jex.Primitive("mystery")
    mystery.def_abstract_eval(lambda a: a)

    def called(w: Any, x: Any) -> Any:
        return w - mystery.bind(mystery.bind(x)).T @ x

    with pytest.warns(UserWarning, match=r"'mystery' at test_refusals.py:\d+ has no") as caught:
        autopar.plan(called, W, X, cluster="8xcpu", mesh=(8,))
    assert len(caught) == 1


def test_foreign_code_warns_too() -> None:
    def called(w: Any, x: Any) -> Any:
        return w - jax.ffi.ffi_call("mine", jax.ShapeDtypeStruct(w.shape, w.dtype))(w) * x.sum()

    with pytest.warns(UserWarning, match=r"'ffi_call' at test_refusals.py:\d+ has no"):
        autopar.plan(called, W, X, cluster="8xcpu", mesh=(8,))


def test_what_a_refusal_says_would_do_was_planned_and_does() -> None:
    w, x = S((64, 2048), jnp.float32), S((4096, 64), jnp.float32)
    limit = 0.3 * autopar.plan(step, w, x, cluster="8xcpu").prediction.peak_bytes / 2**30
    with pytest.raises(MemoryLimitError) as caught:
        autopar.plan(step, w, x, cluster="8xcpu", memory_gb=limit)
    told = re.fullmatch(
        r"Planned and found to fit: microbatches=(\d+) \(.*\), (\d+xcpu) \(.*\)\.",
        str(caught.value).splitlines()[-1],
    )
    assert told is not None
    autopar.plan(step, w, x, cluster="8xcpu", memory_gb=limit, microbatches=int(told[1]))
    autopar.plan(step, w, x, cluster=told[2], memory_gb=limit)


def layers(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        h = x
        for m in w:
            h = h + jnp.tanh(jnp.sin(h @ m) * 2)
        return jnp.sum(h**2)

    return [m - 0.1 * g for m, g in zip(w, jax.grad(loss)(w), strict=True)]


def test_layers_are_made_again_in_segments() -> None:
    """At one price for all bytes, all of them would be made again at once."""
    given = [S((64, 64), jnp.float32)] * 8, S((8192, 64), jnp.float32)
    peak = autopar.plan(layers, *given, cluster="8xcpu").prediction.peak_bytes
    plan = autopar.plan(layers, *given, cluster="8xcpu", memory_gb=0.6 * peak / 2**30)
    assert plan.recomputation.values
    assert plan.prediction.peak_bytes <= 0.6 * peak
    with pytest.raises(MemoryLimitError) as caught:
        autopar.plan(layers, *given, cluster="8xcpu", memory_gb=0.25 * peak / 2**30)
    assert "at its peak the step, with all made again that saves memory, holds" in str(caught.value)
    told = re.search(r"Use a limit of .* \(memory_gb=([\d.e-]+)\)\.", str(caught.value))
    assert told is not None
    plan = autopar.plan(layers, *given, cluster="8xcpu", memory_gb=float(told[1]))
    assert plan.recomputation.values


def test_filters_that_are_cut_out_of_all_are_refused_in_words() -> None:
    """Each task has filters of its own, which are cut out, and laid out anew by the same kernel."""

    def convolved(x: Any, filters: Any) -> Any:
        dims = ("NHWC", "HWIO", "NHWC")
        filters = filters.astype(jnp.bfloat16)
        made = jax.lax.conv_general_dilated(x, filters, (1, 1), "SAME", dimension_numbers=dims)
        return jnp.tanh(made)

    def task(filters: Any, x: Any) -> Any:
        def loss(filters: Any) -> Any:
            y = convolved(convolved(x.astype(jnp.bfloat16), filters[0]), filters[1])
            return jnp.sum(y.astype(jnp.float32) ** 2)

        def adapt(filters: Any, _: None) -> Any:
            return jax.tree.map(lambda f, g: f - 0.1 * g, filters, jax.grad(loss)(filters)), None

        return loss(jax.lax.scan(adapt, filters, None, length=2)[0])

    def step(filters: Any, x: Any) -> Any:
        grads = jax.grad(lambda f: jax.vmap(task, (None, 0))(f, x).mean())(filters)
        return jax.tree.map(lambda f, g: f - 0.1 * g, filters, grads)

    filters = [S((3, 3, 8, 8), jnp.float32)] * 2
    with pytest.raises(MemoryLimitError, match=r"no plan on \(data=8\) fits"):
        autopar.plan(
            step, filters, S((8, 6, 16, 16, 8), jnp.float32), cluster="8xh100", mesh=8,
            memory_gb=1e-4,
        )  # fmt: skip


def test_a_refusal_advises_nothing_that_was_not_found_to_fit() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        plan_of(memory_gb=1e-6)
    told = str(caught.value)
    assert told.endswith("more devices of the kind were found to make it fit.")
    assert "jax.checkpoint" not in told


def test_what_is_tried_for_a_refusal_keeps_mesh_and_pins() -> None:
    pins = {"w": P("rows", None)}
    with pytest.raises(MemoryLimitError, match=r"no plan on \(rows=8\) fits"):
        plan_of(mesh={"rows": 8}, pins=pins, memory_gb=1e-6)


def test_an_option_that_is_none_is_named_with_the_function_that_was_called() -> None:
    with pytest.raises(TypeError, match=r"plan\(\) got .* 'memory_gbs': did you mean 'memory_gb'?"):
        plan_of(memory_gbs=4)
    parallelize: Any = autopar.parallelize
    with pytest.raises(TypeError, match=r"parallelize\(\) got .* did you mean 'microbatches'?"):
        parallelize(step, micro_batches=4)


def test_a_method_that_is_none_has_its_neighbour() -> None:
    with pytest.raises(ArgumentError, match="it takes a name, as in method='megatron'; there are"):
        plan_of(method="megatorn")


def test_a_chip_alone_is_no_cluster() -> None:
    with pytest.raises(ClusterError, match="For 8 devices of cpu: '8xcpu'"):
        autopar.plan(step, W, X, cluster="cpu")


def test_a_step_that_does_not_trace_has_its_line_and_its_batch() -> None:
    def broken(params: Any, batch: Any) -> Any:
        return batch["x"] @ params["w0"] + batch["y"]

    params = {f"w{i}": W for i in range(9)}
    batch = {"x": X, "y": S((3,), jnp.float32)}
    with pytest.raises(TraceError) as error:
        autopar.plan(broken, params, batch, cluster="8xcpu")
    headline, shapes, _ = str(error.value).splitlines()
    assert re.search(r"\(test_refusals\.py:\d+\)$", headline)
    assert "params (9 arrays), batch/x float32[" in shapes
    assert shapes.endswith("batch/y float32[3].")


def test_a_pattern_with_a_slip_is_given_back_without_it() -> None:
    def deep(state: Any, x: Any) -> Any:
        return state, x @ state["net"]["kernel"]

    with pytest.raises(PinError, match=r"paths are state/\*\*/kernel, state/net/kernel"):
        autopar.plan(
            deep, {"net": {"kernel": W}}, X, cluster="8xcpu", pins={"state/**/kernal": P("data")}
        )


def test_too_few_devices_are_told_before_anything_is_traced() -> None:
    def never(w: jax.Array) -> jax.Array:
        raise AssertionError

    w = jnp.zeros((8, 8))
    with pytest.raises(MeshError, match="has 4 devices, but cluster 8xcpu has 8"):
        autopar.parallelize(never, cluster="8xcpu", mesh=(4,))
    with pytest.raises(
        MeshError, match="16 stages need 16 devices or more, and cluster 8xcpu has 8"
    ):
        autopar.parallelize(never, cluster="8xcpu", stages=16)
    with pytest.raises(MeshError, match=r"2 stages, each on a mesh \(data=8\), need 16 devices"):
        autopar.parallelize(never, cluster="8xcpu", stages=2, mesh=(8,))
    autopar.parallelize(never, cluster="8xcpu", stages=2, mesh=(4,))  # of each stage
    with pytest.raises(MeshError, match="cluster 16xcpu needs 16 devices but 8 cpu device"):
        autopar.parallelize(never, cluster="16xcpu")(w)
    with pytest.raises(MeshError, match="cluster 16xcpu needs 16 devices but 8 cpu device"):
        autopar.parallelize(never, cluster="16xcpu").compile(w)
