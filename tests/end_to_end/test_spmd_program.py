"""Stages as one program give what plain jit gives, and what their own programs give."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

import autopar
from autopar.errors import LoweringError, PlanFileError, VerifyError
from autopar.frontend.compat import assembler
from autopar.ir.plan import SPMD
from autopar.ir.stages import Remat
from autopar.passes.lower.lowering import Spmd
from autopar.report.plan import pipeline
from autopar.runtime.bind import bind_mesh
from autopar.runtime.cells import Cells, CellType
from autopar.runtime.executor import Executor, Options
from autopar.runtime.pieces import StackedPieces
from tests.end_to_end.objectives import stacked, subjects
from tests.end_to_end.pipelines import (
    SETTING,
    Layout,
    Subject,
    differing_bits,
    executor_of,
    on_stages,
    plain_zoo,
    zoo_subject,
)
from tests.end_to_end.running import Leaf, differing, numbers

MAKERS = dict(subjects())


def spmd_executor(subject: Subject, layout: Layout, patience: float | None = None) -> Executor:
    made = on_stages(subject, layout).lowered_by(Spmd(), SETTING)
    assert made.lowering == SPMD
    meshes = [bind_mesh(s.mesh, s.devices) for s in made.program.submeshes]
    options = Options(patience=patience)
    return Executor(subject.sliced(layout).trace, made.lowered, meshes, options)


# Dropout's keys, a norm over all stages, tied weights, skips, gradients of several passes.
ZOO = [
    ("mlp_seven", "adam", Layout((2, 2, 2, 2), 8, "1f1b")),
    ("mlp_seven", "sgd", Layout((4, 4), 4, "gpipe")),
    ("mlp_seven", "sgd", Layout((2, 2, 2, 2), 4, "1f1b", method="megatron")),
    ("mlp_seven", "adam", Layout((4,), 4, "1f1b")),
]
LONG = [
    ("encoder_decoder", "sgd", Layout((2, 2), 4, "eager-1f1b")),
    ("gpt", "adam", Layout((2, 2, 2, 2), 4, "1f1b")),
    ("tied", "adam", Layout((2, 2), 4, "1f1b", remat=Remat.FULL)),
    ("moe_switch", "adam", Layout((4, 4), 4, "gpipe")),
    ("encoder_decoder", "adam", Layout((2, 2, 2, 2), 8, "1f1b")),
]


@pytest.mark.parametrize(
    ("model", "optimizer", "layout"),
    [*ZOO, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)],
    ids=str,
)
def test_models_equal_plain_jit(model: str, optimizer: Any, layout: Layout) -> None:
    subject = zoo_subject(model, optimizer)
    got = subject.run(spmd_executor(subject, layout))
    assert not differing(got, plain_zoo(model, optimizer))


HARD = ("clip", "dropout")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in HARD else [pytest.mark.slow]) for n in MAKERS]
)
def test_objectives_equal_plain_jit(name: str) -> None:
    subject = MAKERS[name]()
    got = subject.run(spmd_executor(subject, Layout((2, 2), 4, "1f1b")))
    assert not differing(got, subject.plain())


def test_a_chain_of_products_keeps_every_bit_of_the_other_lowering() -> None:
    """Sums over microbatches are taken in the same order; only fusions may round otherwise."""
    subject, layout = zoo_subject("mlp_seven", "adam"), Layout((2, 2, 2, 2), 8, "1f1b")
    other = subject.run(executor_of(subject, layout, on_stages(subject, layout)))
    assert not differing_bits(subject.run(spmd_executor(subject, layout)), other)


def test_it_is_one_program_under_watch() -> None:
    subject, layout = zoo_subject("mlp_seven", "sgd"), Layout((2, 2), 4, "1f1b")
    executor = spmd_executor(subject, layout, patience=60.0)
    assert len(executor.compiled) == 1
    assert executor.compile_report.compiled == 1
    assert not differing(subject.run(executor), plain_zoo("mlp_seven", "sgd"))


# -- the front door ----------------------------------------------------------------------------

PASSES = "batch=exact,layer=min-cut,stage=search{stages=2,microbatches=4},shard,lower"


def _step(subject: Subject, how: str, **options: Any) -> autopar.ParallelStep[..., Any]:
    step = autopar.parallelize(
        subject.step, cluster="4xcpu", passes=f"{PASSES}={how}", **options
    )  # fmt: skip
    return step


def _trained(
    step: autopar.ParallelStep[..., Any], subject: Subject, state: Any, seeds: range
) -> tuple[Any, tuple[Leaf, ...]]:
    told: list[Any] = []
    for seed in seeds:
        state, result = step(state, subject.batch(seed))
        told.append(result)
    return state, numbers((state, told))


def test_a_plan_says_how_its_stages_are_lowered_and_gives_the_same_bits(tmp_path: Path) -> None:
    subject, path = stacked(), tmp_path / "plan.json"
    step = _step(subject, "spmd")
    state, got = _trained(step, subject, subject.state, range(3))
    assert not differing(got, subject.plain())
    assert step.plan.lowering == SPMD
    assert "all stages are one program" in str(step.plan)
    told = io.StringIO()
    Console(file=told, width=200).print(pipeline(step.plan))
    words = " ".join(told.getvalue().split())
    assert "The picture is of the same stages as programs of their own" in words
    assert isinstance(state["params"]["stack"], StackedPieces)
    autopar.save(step.plan, path)
    again = autopar.parallelize(subject.step, plan=autopar.load(path))
    _, same = _trained(again, subject, subject.state, range(3))
    assert not differing_bits(same, got)


def test_state_is_handed_on_as_it_lies_and_consumed() -> None:
    subject = stacked()
    step = _step(subject, "spmd")
    step.plan_for(subject.state, subject.batch(0))
    born = step.init(lambda: subject.state)
    state, _ = step(born, subject.batch(0))
    leaves = [p for leaf in jax.tree.leaves(born) for p in getattr(leaf, "pieces", (leaf,))]
    assert all(leaf.is_deleted() for leaf in leaves)
    stack = state["params"]["stack"]
    assert [p.sharding for p in stack.pieces] == [
        p.sharding for p in born["params"]["stack"].pieces
    ]


def test_state_goes_on_in_the_cells_that_it_was_left_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the batch is made an array over all submeshes, unless the user changes a leaf."""
    subject = stacked()
    step, plain = _step(subject, "spmd"), jax.jit(subject.step)
    made: list[tuple[int, ...]] = []

    def make(self: CellType) -> Any:
        made.append(self.whole.shape)
        return assembler(self.whole.shape, self.whole.dtype, self.whole.sharding)

    state, _ = step(subject.state, subject.batch(0))
    wanted, _ = plain(subject.state, subject.batch(0))
    state, _ = step(state, subject.batch(1))
    wanted, _ = plain(wanted, subject.batch(1))
    monkeypatch.setattr(CellType, "make", property(make))
    state, _ = step(state, subject.batch(2))
    wanted, _ = plain(wanted, subject.batch(2))
    batch_only = len(made)
    assert batch_only <= len(jax.tree.leaves(subject.batch(0)))
    state["params"]["stack"] = jnp.asarray(state["params"]["stack"]) * 2
    wanted["params"]["stack"] *= 2
    got = step(state, subject.batch(3))
    assert len(made) > 2 * batch_only
    assert not differing(numbers(got), numbers(plain(wanted, subject.batch(3))))


def test_an_explanation_prices_the_one_program() -> None:
    subject = stacked()
    plan = _step(subject, "spmd").plan_for(subject.state, subject.batch(0))
    prediction = plan.prediction
    for argument in plan.arguments[:2]:
        price = autopar.explain(plan, argument.path).price
        assert price.seconds == pytest.approx(prediction.seconds)
        assert price.peak_bytes == prediction.peak_bytes


def test_what_is_verified_is_the_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = stacked()
    step = _step(subject, "spmd")
    ran: list[object] = []
    seen = Cells.seen

    def watched(own: Cells, inputs: Any) -> list[Any]:
        ran.append(own)
        return seen(own, inputs)

    monkeypatch.setattr(Cells, "seen", watched)
    found = step.verify(subject.state, subject.batch(0), level="numerics")
    assert found.agrees
    assert ran
    found = step.verify(subject.state, subject.batch(0), level="memory")
    (part,) = found.parts
    figures = {figure.name: figure for figure in part.figures}
    assert figures["arguments"].predicted == figures["arguments"].compiled
    assert figures.keys() == {"arguments", "peak"}
    assert any("collectives of one program of all stages" in note for note in found.notes)
    with pytest.raises(VerifyError, match="lower=mpmd"):
        step.verify(subject.state, subject.batch(0), level="collectives")


def test_either_lowering_goes_on_where_the_other_stopped(tmp_path: Path) -> None:
    """Between them a checkpoint is the same: each stage's state lies on its own submesh."""
    subject = stacked()
    many, one = _step(subject, "mpmd"), _step(subject, "spmd")
    _, expected = _trained(many, subject, subject.state, range(4))
    state, _ = _trained(one, subject, subject.state, range(2))
    with ocp.CheckpointManager(tmp_path) as manager:
        assert one.save(manager, 2, state)
        manager.wait_until_finished()
        found = many.restore(manager, many.abstract_state(lambda: subject.state))
    assert found is not None
    state, got = _trained(many, subject, found.state, range(2, 4))
    wanted = dict(expected)
    assert not differing(
        tuple((p, a) for p, a in got if p.startswith("[0]")),
        tuple((p, wanted[p]) for p, _ in got if p.startswith("[0]")),
    )
    # State of the one is taken by the other as it is.
    _trained(one, subject, state, range(4, 5))


def test_a_plan_with_another_word_for_it_is_refused() -> None:
    subject = stacked()
    plan = _step(subject, "spmd").plan_for(subject.state, subject.batch(0))
    with pytest.raises(PlanFileError, match="'both'"):
        autopar.parallelize(subject.step, plan=replace(plan, lowering="both")).plan_for(
            subject.state, subject.batch(0)
        )


def test_what_cannot_be_one_program_is_refused_with_the_reason() -> None:
    subject = stacked()
    passes = PASSES.replace("microbatches=4", "microbatches=4,schedule=zb-h1") + "=spmd"
    step = autopar.parallelize(subject.step, cluster="4xcpu", passes=passes)
    with pytest.raises(LoweringError, match=r"'zb-h1'.*there are gpipe"):
        step.plan_for(subject.state, subject.batch(0))
    uneven = Layout((2, 2, 4), 4, "1f1b")
    with pytest.raises(LoweringError, match=r"submesh 0 is \(data=2\) and submesh 2 is \(data=4\)"):
        spmd_executor(zoo_subject("mlp_seven", "sgd"), uneven)


def test_a_step_that_calls_python_is_refused() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            fixed = jax.lax.stop_gradient(w[0])
            shape = jax.ShapeDtypeStruct(fixed.shape, fixed.dtype)
            scale = jax.pure_callback(np.sqrt, shape, fixed, vmap_method="sequential")
            return jnp.mean((jnp.tanh(x @ (w[0] * scale)) @ w[1]) ** 2)

        return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))

    w = [np.ones((8, 8), np.float32)] * 2
    parallel = autopar.parallelize(step, cluster="4xcpu", passes=f"{PASSES}=spmd")
    with pytest.raises(LoweringError, match=r"calls Python at test_spmd_program\.py:\d+"):
        parallel.plan_for(w, np.ones((16, 8), np.float32))
