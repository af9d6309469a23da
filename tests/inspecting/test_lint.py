"""What is found of a step before it is planned: each kind of finding, and none on a clean step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.frontend import StepSpec
from autopar.inspecting.lint import coverage_of, leaves_of, lint, rule_findings
from autopar.ir.findings import Finding, Findings, Severity, Topic
from autopar.ir.record import parse_graph
from autopar.passes.pipeline import PassPipeline
from autopar.planner.request import Request
from autopar.rules import RuleBook, attach_rules
from tests.zoo import cases, of_each_kind

Step = Callable[..., Any]


def arrays(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def linted(step: Step, *args: Any, cluster: str = "8xh100", **options: Any) -> Findings:
    return lint(
        StepSpec(step),
        args,
        {},
        Request(Cluster.parse(cluster), passes=PassPipeline.of_options(**options)),
    )


def linted_case(name: str, **options: Any) -> Findings:
    case = cases("adam")[name]
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    return linted(case.step, state, case.batch(0), **options)


def of(found: Findings, topic: Topic) -> list[Finding]:
    return [f for f in found.found if f.topic is topic]


def descent(loss: Callable[[Any, Any], jax.Array]) -> Step:
    """A step that goes down the gradient of a loss."""

    def train_step(state: Any, batch: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state, batch))

    return train_step


def product(w: Any, x: Any) -> jax.Array:
    return jnp.mean((x @ w) ** 2)


# -- the whole -------------------------------------------------------------------------------------


def test_a_clean_step_has_no_findings_at_all() -> None:
    found = linted_case("gpt")
    assert found.found == ()
    assert found.coverage.flops_share == 1
    assert found.coverage.bytes_share == 1
    assert (found.batch.rows, found.batch.loops, found.batch.barrier) == (16, 1, False)


@pytest.mark.parametrize("name", of_each_kind())
def test_no_case_of_the_zoo_has_an_error(name: str) -> None:
    found = linted_case(name)
    assert not found.of(Severity.ERROR)
    assert found.coverage.flops_share > 0.99


def test_the_gravest_comes_first() -> None:
    found = linted_case("wide_resnet_bn", microbatches=2)
    order = [list(Severity).index(f.severity) for f in found.found]
    assert order == sorted(order)
    assert order[0] == 0
    assert order[-1] == 2


# -- rules -----------------------------------------------------------------------------------------

GRAPH = """
graph step(%x: f32[64,8] batch "x") {
  %0: f32[64,8] = tanh(%x) forward flops=512  # a.py:1
  %1: f32[64,8] = mystery(%0) forward flops=1536  # a.py:2
  %2: f32[64,8] = pure_callback(%1) forward  # a.py:3
  return %2
}
"""


def test_a_primitive_without_a_rule_lowers_the_coverage() -> None:
    leaves = tuple(leaves_of(attach_rules(parse_graph(GRAPH))))
    covered = coverage_of(leaves)
    assert (covered.flops, covered.covered_flops, covered.flops_share) == (2048, 512, 0.25)
    assert covered.bytes_share == pytest.approx(1 / 3)
    mystery, callback = rule_findings(leaves)
    assert (mystery.severity, mystery.line) == (Severity.WARNING, "a.py:2")
    assert "RuleBook({'mystery'" in mystery.remedy
    assert (callback.severity, callback.line) == (Severity.NOTE, "a.py:3")


def test_a_rule_of_the_user_covers_it() -> None:
    book = RuleBook({"mystery": "b d -> b d", "pure_callback": "b d -> b d"})
    leaves = tuple(leaves_of(attach_rules(parse_graph(GRAPH), book)))
    assert coverage_of(leaves).flops_share == 1


def test_trips_of_a_loop_count() -> None:
    def step(w: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c), None), w, None, length=7)[0]

    once = linted(lambda w: jnp.tanh(w), arrays(64, 64)).coverage
    assert linted(step, arrays(64, 64)).coverage.nbytes == 7 * once.nbytes


# -- dims that do not divide -----------------------------------------------------------------------


def test_a_dim_that_no_axis_divides_is_told_with_sizes_that_would_do() -> None:
    found = linted(descent(product), arrays(64, 50257), arrays(32, 64))
    (finding,) = [f for f in of(found, Topic.INDIVISIBLE) if f.severity is Severity.WARNING]
    assert "50257: dim 1 of state" in finding.text
    assert "50256 or 50264" in finding.remedy
    assert "test_lint.py:" in finding.line
    assert not linted(descent(product), arrays(64, 50264), arrays(32, 64)).found


def test_rows_that_no_axis_divides_are_told_however_light() -> None:
    found = linted(descent(product), arrays(512, 512), arrays(31, 512))
    (finding,) = of(found, Topic.INDIVISIBLE)
    assert "31, which the rows of the batch are: dim 0 of batch" in finding.text
    assert finding.severity is Severity.WARNING
    assert finding.remedy == "Take 24 or 32."


def test_rows_that_some_devices_can_share_are_a_note() -> None:
    found = linted(descent(product), arrays(512, 512), arrays(12, 512))
    (finding,) = of(found, Topic.INDIVISIBLE)
    assert finding.severity is Severity.NOTE
    assert "only 4 of 8 devices" in finding.text


def test_a_dim_that_the_step_makes_is_a_note() -> None:
    def loss(w: Any, x: Any) -> jax.Array:
        return jnp.mean((x[:, 1:] @ w) ** 2)

    found = linted(descent(loss), arrays(64, 64), arrays(16, 64, 64))
    (finding,) = of(found, Topic.INDIVISIBLE)
    assert finding.severity is Severity.NOTE
    assert "divides 63" in finding.text
    assert "test_lint.py:" in finding.line


def test_one_device_divides_everything() -> None:
    assert not linted(descent(product), arrays(63, 51), arrays(7, 63), cluster="1xh100").found


# -- gathers ---------------------------------------------------------------------------------------


def test_an_op_that_needs_a_whole_operand_is_a_warning() -> None:
    def step(w: Any) -> Any:
        return jnp.cumsum(w)

    (finding,) = of(linted(step, arrays(4096)), Topic.GATHER)
    assert finding.severity is Severity.WARNING
    assert "cumsum needs all of dim 0 of f32[4096], and no other dim" in finding.text
    assert "test_lint.py:" in finding.line
    assert finding.nbytes == 4096 * 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda w: jnp.sort(w, axis=1), "sort needs all of dim 1"),
        (lambda w: jnp.fft.fft(w).real, "fft needs all of dim 1"),
        (lambda w: jnp.roll(w, 1, axis=1), "slice shifts items along dim 1"),
        (
            lambda w: w.reshape(64, 3, 8).sum(0),
            "reshape reads as 3 x 8, and no axis divides 3, dim 1",
        ),
        (lambda w: w.reshape(-1), "reshape merges, as the minor part of a longer dim, dim 1"),
    ],
    ids=["sort", "fft", "roll", "heads", "flatten"],
)
def test_an_op_that_needs_one_dim_is_a_note(change: Any, told: str) -> None:
    found = of(linted(change, arrays(64, 24)), Topic.GATHER)
    assert [f.severity for f in found if told in f.text] == [Severity.NOTE]


def test_what_no_axis_divides_is_never_gathered() -> None:
    assert not of(linted(lambda w: jnp.sort(w, axis=1), arrays(64, 27)), Topic.GATHER)


# -- the batch -------------------------------------------------------------------------------------


def test_what_is_hoisted_is_counted() -> None:
    batch = linted_case("masked").batch
    assert (batch.hoisted, batch.loops, batch.barrier) == (1, 1, False)
    assert "taken of the whole batch first" in batch.notes[0]


def test_a_scalar_that_only_scales_sums_is_told() -> None:
    def loss(w: Any, x: Any) -> jax.Array:
        return jnp.log(product(w, x))

    batch = linted(descent(loss), arrays(64, 64), arrays(32, 64)).batch
    assert batch.rescaled
    assert batch.loops == 1
    assert not linted(descent(product), arrays(64, 64), arrays(32, 64)).batch.rescaled


def test_a_barrier_is_a_note() -> None:
    found = linted_case("moe_switch")
    assert (found.batch.barrier, found.batch.loops) == (True, 2)
    (finding,) = of(found, Topic.BARRIER)
    assert finding.line.startswith("moe.py:")


def test_statistics_of_the_batch_are_a_warning_with_their_line() -> None:
    found = linted_case("wide_resnet_bn")
    (finding,) = of(found, Topic.BATCH)
    assert finding.severity is Severity.WARNING
    assert finding.line.startswith("vision.py:")
    assert "LayerNorm" in finding.remedy
    assert found.batch.loops == 0


def test_microbatches_that_were_asked_for_are_an_error() -> None:
    (finding,) = linted_case("wide_resnet_bn", microbatches=2).of(Severity.ERROR)
    assert finding.topic is Topic.BATCH
    (finding,) = linted_case("masked", microbatches=3).of(Severity.ERROR)
    assert "16 rows cannot be cut into 3 microbatches" in finding.text


def test_arguments_of_other_rows_are_a_warning() -> None:
    def loss(w: Any, batch: Any) -> jax.Array:
        return product(w, batch["x"] + batch["bias"])

    batch = {"x": arrays(32, 64), "bias": arrays(64)}
    (finding,) = of(linted(descent(loss), arrays(64, 64), batch), Topic.BATCH)
    assert "32 or 64 rows" in finding.text
    assert "batch_axes" in finding.remedy


# -- arguments -------------------------------------------------------------------------------------


def test_state_that_goes_as_another_type_is_told() -> None:
    def train_step(state: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: product(w["a"] @ w["b"], x))(state)
        new = jax.tree.map(lambda w, g: w - g, state, grads)
        return {**new, "b": new["b"].astype(jnp.bfloat16)}, x.sum()

    state = {"a": arrays(64, 64), "b": arrays(64, 64)}
    (finding,) = of(linted(train_step, state, arrays(32, 64)), Topic.STATE)
    assert "state/b is f32[64,64] when it comes and bf16[64,64] when it goes" in finding.text
    assert "test_lint.py:" in finding.line


def test_a_step_that_returns_no_state_is_told() -> None:
    (finding,) = of(linted(product, arrays(64, 64), arrays(32, 64)), Topic.STATE)
    assert "no argument comes back" in finding.text


def test_a_large_constant_is_told_with_its_line() -> None:
    def step(words: int) -> Findings:
        table = np.ones((words, 1024), np.float32)

        def loss(w: Any, x: Any) -> jax.Array:
            return product(w, x @ jnp.asarray(table).T[:, :64])

        return linted(descent(loss), arrays(64, 64), arrays(32, 1024))

    (finding,) = of(step(4096), Topic.CONSTANT)
    assert "f32[4096,1024]: 16.0 MiB" in finding.text
    assert not of(step(64), Topic.CONSTANT)


def test_double_precision_is_told() -> None:
    with jax.enable_x64(True):
        found = linted(descent(product), arrays(64, 64, dtype="float64"), arrays(32, 64))
    (finding,) = of(found, Topic.DTYPE)
    assert "ops compute in f64" in finding.text
    assert "test_lint.py:" in finding.line


def test_a_number_that_becomes_an_array_is_told() -> None:
    def train_step(state: Any, x: Any) -> Any:
        new = state["w"] - jax.grad(product)(state["w"], x)
        return {"w": new, "step": state["step"] + jnp.ones((), jnp.int32)}

    def found(step: Any) -> list[Finding]:
        return of(
            linted(train_step, {"w": arrays(64, 64), "step": step}, arrays(32, 64)), Topic.DTYPE
        )

    (finding,) = found(0)
    assert finding.text.startswith("state/step: a Python number")
    assert not found(arrays(dtype=jnp.int32))


def test_arguments_that_fit_no_way_are_an_error() -> None:
    wide = arrays(2**20, 2**20)  # 4 TiB
    found = linted(descent(product), wide, arrays(2**10, 2**20))
    (finding,) = of(found, Topic.MEMORY)
    assert finding.severity is Severity.ERROR
    assert "512 GiB a device at the very least" in finding.text
    assert not of(
        linted(descent(product), wide, arrays(2**10, 2**20), cluster="128xh100"), Topic.MEMORY
    )
