"""Python that a step calls is called as often, with the same values and in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

import autopar
from autopar.errors import BatchError, RowsError, TraceError
from autopar.exporting.python import python_module
from tests.end_to_end.calling import BANK, SCALAR, Log, check, given
from tests.exporting.running import loaded

MESH: dict[str, Any] = {"mesh": (2, 4), "method": "fsdp+tp"}
CUT: dict[str, Any] = {"stages": 1, "microbatches": 2}
STAGES: dict[str, Any] = {"stages": 2, "microbatches": 4}


def parallel(step: Any, cluster: str = "8xcpu", **options: Any) -> Any:
    return autopar.parallelize(step, cluster=cluster, donate=False, **options)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, MESH) for name in BANK if name not in ("unread", "whiles")),
        *((name, STAGES) for name in ("scalars", "rows", "scanned", "nested", "results")),
    ],
)
def test_ordered_calls_are_those_of_plain_jit(name: str, form: dict[str, Any]) -> None:
    log = Log()
    step = BANK[name](log, True)
    assert check(log, jax.jit(step), parallel(step, **form), ordered=True) >= 2


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, CUT) for name in BANK if name not in ("rows", "nested", "scalars")),
        ("results", {"method": "dp"}),
        ("rows", {}),
        ("unread", {"stages": 2, "microbatches": 1}),
    ],
)
def test_calls_are_those_of_plain_jit(name: str, form: dict[str, Any]) -> None:
    log = Log()
    step = BANK[name](log, False)
    assert check(log, jax.jit(step), parallel(step, **form)) >= 2


@pytest.mark.parametrize("name", BANK)
def test_calls_of_a_step_for_gpus_are_those_of_plain_jit(name: str) -> None:
    """Calls that make nothing are listed and timed beside what GPUs make."""
    log = Log()
    step = BANK[name](log, False)
    assert check(log, jax.jit(step), parallel(step, cluster="8xh100")) >= 2


def trained(w: Any, b: Any) -> tuple[Any, Any]:
    value, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(b @ w) - b) ** 2))(w)
    return w - 0.1 * gradient, value


@pytest.mark.parametrize("form", [MESH, STAGES], ids=["mesh", "stages"])
def test_prints_come_once(form: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    def step(w: Any, b: Any) -> Any:
        new, value = trained(w, b)
        jax.debug.print("shape {x.shape}", x=b)
        jax.debug.print("key {}", jax.random.key_data(jax.random.key(7)), ordered=True)
        jax.debug.print("sum {:.1f}", jnp.sum(b), ordered=True)
        return new, value

    planned = parallel(step, **form)
    planned(*given())
    jax.effects_barrier()
    lines = capfd.readouterr().out.split("\n")
    assert sorted(filter(None, lines)) == [
        "key [0 7]",
        "shape (16, 8)",
        f"sum {given()[1].sum():.1f}",
    ]


# -- calls that raise ------------------------------------------------------------------------


def refuses(*_: Any) -> Any:
    raise OverflowError("the user's own")


def test_a_call_that_raises_is_heard_of_at_the_barrier_and_by_the_next_step() -> None:
    def step(w: Any, b: Any) -> Any:
        new, value = trained(w, b)
        io_callback(refuses, None, value)
        return new, value, jnp.sum(new)  # sums over devices, which wait for one another

    planned = parallel(step, **MESH)
    kept: list[Any] = []

    def until_told() -> None:
        kept.append(planned(*given()))
        jax.effects_barrier()

    with pytest.raises(jax.errors.JaxRuntimeError, match="the user's own"):
        until_told()
    with pytest.raises(OverflowError, match="the user's own"):
        planned(*given())


@pytest.mark.parametrize("form", [MESH, STAGES], ids=["mesh", "stages"])
def test_a_call_whose_result_is_used_raises_from_the_step(form: dict[str, Any]) -> None:
    def step(w: Any, b: Any) -> Any:
        scale = io_callback(refuses, SCALAR, jnp.max(w))
        return trained(w, b * scale)

    with pytest.raises(OverflowError, match="the user's own"):
        parallel(step, **form)(*given())


def test_a_result_that_is_not_as_declared_raises_from_the_step() -> None:
    def step(w: Any, b: Any) -> Any:
        scale = jax.pure_callback(lambda _: np.zeros(3, np.float32), SCALAR, jnp.max(w))
        return trained(w, b * scale)

    with pytest.raises(RuntimeError, match=r"was to return .* and gave"):
        parallel(step, **MESH)(*given())


# -- what cannot be --------------------------------------------------------------------------


def test_ordered_calls_that_would_lose_their_order_are_refused() -> None:
    def step(w: Any, b: Any) -> Any:
        io_callback(lambda _: None, None, jnp.max(w), ordered=True)
        one = io_callback(lambda _: np.float32(1), SCALAR, jnp.max(w), ordered=True)
        return trained(w, b * one)

    with pytest.raises(BatchError, match=r"lose their order(.|\n)*test_callbacks.py:\d+"):
        parallel(step, **STAGES)(*given())


def test_results_that_go_with_rows_are_refused_in_microbatches() -> None:
    def step(w: Any, b: Any) -> Any:
        kind = jax.ShapeDtypeStruct(b.shape, b.dtype)
        return trained(w, io_callback(lambda x: x, kind, b))

    with pytest.raises(RowsError, match=r"io_callback .*test_callbacks.py:\d+"):
        parallel(step, **CUT)(*given())


def test_calls_in_a_while_over_rows_are_refused_in_microbatches() -> None:
    def step(w: Any, b: Any) -> Any:
        def trip(carry: Any) -> Any:
            n, x = carry
            io_callback(lambda n: None, None, n)
            return n + 1, jnp.tanh(x)

        _, x = lax.while_loop(lambda c: c[0] < 3, trip, (0, b))
        return trained(w, x)

    with pytest.raises(RowsError, match=r"once for each microbatch(.|\n)*test_callbacks.py:\d+"):
        parallel(step, **CUT)(*given())


def test_a_check_that_no_jit_takes_is_refused_with_its_line() -> None:
    def step(w: Any, b: Any) -> Any:
        new, value = trained(w, b)
        checkify.check(value > 0, "no loss")
        return new, value

    with pytest.raises(TraceError, match=r"test_callbacks.py:\d+(.|\n)*checkify.checkify"):
        parallel(step, **MESH)(*given())


# -- plans -----------------------------------------------------------------------------------


def test_a_saved_plan_of_stages_makes_the_same_calls(tmp_path: Path) -> None:
    log = Log()
    step = BANK["rows"](log, True)
    parallel(step, **STAGES).plan_for(*given()).save(tmp_path / "plan.json")
    plan = autopar.Plan.load(tmp_path / "plan.json")
    again = autopar.parallelize(step, plan=plan, donate=False)
    assert check(log, jax.jit(step), again, steps=1, ordered=True) == 3


@pytest.mark.parametrize("name", ["scalars", "branches"])
def test_an_exported_step_makes_the_same_calls(name: str, tmp_path: Path) -> None:
    log = Log()
    step = BANK[name](log, True)
    module = loaded(python_module(parallel(step, **MESH).plan_for(*given())), tmp_path)
    exported = module.parallelize(step, *given())
    own = lambda *args: exported(*jax.tree.map(jnp.copy, args))  # noqa: E731  it takes its state
    assert check(log, jax.jit(step), own, steps=1, ordered=True) >= 3


def test_two_results_of_stages_may_be_one_value() -> None:
    def step(w: Any, b: Any) -> Any:
        new, value = trained(w, b)
        return new, value, value

    out = parallel(step, **STAGES)(*given())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), out, step(*given()))


def test_a_call_makes_one_all_reduce_of_its_result() -> None:
    def step(w: Any, b: Any) -> Any:
        scale = io_callback(lambda x: x, SCALAR, jnp.max(w))
        return trained(w, b * scale)

    (part,) = parallel(step, mesh=(8,), method="dp").planned(*given()).program.parts
    moved = [
        (move.combiner, [c.kind for c in move.collectives])
        for move, _ in part.listing.moves()
        if move.value.shape == () and move.combiner == "max"
    ]
    assert moved == [("max", ["all-reduce"])]
