"""Whatever a step computes, stages and microbatches compute it too, or say why they cannot."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import BatchError, BatchStatisticError
from autopar.hlo.collectives import read_collectives
from autopar.runtime.pieces import StackedPieces
from tests.end_to_end.objectives import (
    LAYERS,
    WIDTH,
    Batch,
    Params,
    half_precision,
    logits,
    losses,
    mean_loss,
    stacked,
    subjects,
    trained,
)
from tests.end_to_end.pipelines import Layout, Subject, differing_bits, executor_of, on_stages
from tests.end_to_end.running import EAGER, STEPS, Leaf, differing, numbers, undeleted

STAGED, ACCUMULATED = Layout((2, 2), 4, "zb-h1"), Layout((4,), 4, "gpipe")
MAKERS, HALF = dict(subjects()), dict(half_precision())


PLAIN = ("mean", "sum", "multi-steps", "if-finite", "schedule", "lamb", "decay", "metrics")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in PLAIN else []) for n in MAKERS]
)
def test_a_step_on_two_stages_equals_plain_jit(name: str) -> None:
    _check(MAKERS[name](), STAGED)


ACCUMULATES = ("metrics", "sam", "dropout")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in ACCUMULATES else [pytest.mark.slow]) for n in MAKERS],
)
def test_a_step_in_microbatches_alone_equals_plain_jit(name: str) -> None:
    _check(MAKERS[name](), ACCUMULATED)


def _check(subject: Subject, layout: Layout) -> None:
    got = subject.run(executor_of(subject, layout, on_stages(subject, layout)))
    assert not differing(got, subject.plain())


@pytest.mark.parametrize("layout", [STAGED, ACCUMULATED], ids=str)
@pytest.mark.parametrize("name", HALF)
def test_gradients_of_half_precision_are_summed_in_single(name: str, layout: Layout) -> None:
    """Equal to a few of bfloat16's last bits: rows are summed in another order."""
    subject = HALF[name]()
    got = subject.run(executor_of(subject, layout, on_stages(subject, layout)))
    for (path, mine), (_, plain) in zip(got, subject.plain(), strict=True):
        assert mine.dtype == plain.dtype, path
        scale = np.abs(plain.astype(np.float32)).max()
        gap = np.abs(mine.astype(np.float32) - plain.astype(np.float32)).max()
        assert gap <= 0.03 * scale, f"{path} of {name}"


# -- steps that need the whole batch -----------------------------------------------------------


def _normalized(weights: Params, given: Batch) -> jax.Array:
    h = jnp.tanh(given["x"] @ weights["l0"]["w"])
    return losses(weights, given | {"x": h - h.mean(axis=0)}).mean()


def _contrastive(weights: Params, given: Batch) -> jax.Array:
    out = logits(weights, given)
    return -jnp.mean(jax.nn.log_softmax(out @ out.T))


def _by_size(weights: Params, given: Batch) -> jax.Array:
    if given["x"].shape[0] % 16 == 0:
        return losses(weights, given).mean()
    return (losses(weights, given) * 2.0).mean()


REFUSED = [
    (_normalized, BatchStatisticError, "h - h.mean"),
    (_contrastive, BatchError, "out @ out.T"),
    (_by_size, BatchError, "* 2.0"),
]


@pytest.mark.parametrize(
    ("loss", "error", "code"), REFUSED, ids=lambda x: getattr(x, "__name__", "")
)
def test_what_needs_the_whole_batch_is_refused_by_its_line(
    loss: Callable[[Params, Batch], jax.Array], error: type[BatchError], code: str
) -> None:
    subject = trained(loss)
    lines, first = inspect.getsourcelines(loss)
    line = first + next(i for i, text in enumerate(lines) if code in text)
    step = _parallel(subject, stages=2, microbatches=4)
    with pytest.raises(error, match=rf"test_pipeline_steps\.py:{line}\b"):
        step.plan_for(subject.state, subject.batch(0))
    _check(subject, Layout((2, 2), 1, "1f1b"))


# -- the front door ----------------------------------------------------------------------------


def _parallel(subject: Subject, **options: Any) -> autopar.ParallelStep[..., Any]:
    step = autopar.parallelize(subject.step, cluster=EAGER, **options)
    return step


def _three(
    step: autopar.ParallelStep[..., Any], subject: Subject, state: Any
) -> tuple[Any, tuple[Leaf, ...]]:
    told: list[Any] = []
    for seed in range(STEPS):
        state, result = step(state, subject.batch(seed))
        told.append(result)
    return state, numbers((state, told))


def test_a_saved_plan_gives_the_same_bits(tmp_path: Path) -> None:
    """State that stages share comes back in pieces, which host arrays are made of."""
    subject, path = stacked(), tmp_path / "plan.json"
    step = _parallel(subject, stages=2, microbatches=4, schedule="1f1b", method="fsdp")
    state, got = _three(step, subject, subject.state)
    assert not differing(got, subject.plain())
    assert isinstance(state["params"]["stack"], StackedPieces)
    assert np.asarray(state["params"]["stack"]).shape == (LAYERS - 1, WIDTH, WIDTH)

    autopar.save(step.plan, path)
    assert autopar.load(path) == step.plan
    again = _parallel(subject, plan=autopar.load(path))
    _, same = _three(again, subject, subject.state)
    assert not differing_bits(same, got)


def test_state_is_born_in_place_and_consumed() -> None:
    subject = stacked()
    step = _parallel(subject, stages=2, microbatches=4, schedule="1f1b", method="fsdp")
    step.plan_for(subject.state, subject.batch(0))
    born = step.init(lambda: subject.state)
    assert not differing_bits(numbers(born), numbers(subject.state))
    assert isinstance(born["params"]["stack"], StackedPieces)
    pieces = _pieces(born)
    assert len(undeleted(pieces)) == len(pieces)
    state, _ = step(born, subject.batch(0))
    assert not undeleted(pieces)
    held = _pieces(state)
    step(state, subject.batch(1))
    assert not undeleted(held)


def _pieces(tree: Any) -> list[jax.Array]:
    """The arrays of a tree, those of leaves in pieces one by one."""
    return list(_arrays(jax.tree.leaves(tree)))


def _arrays(leaves: list[Any]) -> Iterator[jax.Array]:
    for leaf in leaves:
        yield from leaf.pieces if isinstance(leaf, StackedPieces) else (leaf,)


# -- reductions --------------------------------------------------------------------------------


OPTIMIZERS = {"sgd": optax.sgd(0.05), "adam": optax.adam(1e-2, eps=1e-3)}


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_are_reduced_once_a_step(name: str, optimizer: str) -> None:
    """Data-parallel devices sum weight gradients in the update, and never in the loop."""
    subject = trained(mean_loss, OPTIMIZERS[optimizer])
    layout = Layout((4, 4), 4, name, method="dp")
    programs = executor_of(subject, layout, on_stages(subject, layout)).compiled
    found = {part: read_collectives(c.as_text()) for part, c in programs.items()}
    assert {part[0] for part, listed in found.items() if listed} == {"u"}
    listed = [c for part in found.values() for c in part]
    assert {c.kind for c in listed} == {"all-reduce"}
    gradients = sum(leaf.nbytes for leaf in jax.tree.leaves(subject.state["params"]))
    loss = 4
    assert sum(c.total_bytes for c in listed) == gradients + loss


def test_gradients_that_are_all_made_in_a_loop_are_accumulated_too() -> None:
    """No op of the step itself is of the forward pass then."""

    def step(w: Any, x: Any) -> Any:
        def add(i: Any, total: Any) -> Any:
            return total + jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - i) ** 2))(w)

        return w - 0.1 * jax.lax.fori_loop(0, 3, add, jnp.zeros_like(w))

    w, x = np.random.default_rng(0).standard_normal((2, 16, 16), dtype=np.float32)
    parallel = autopar.parallelize(step, cluster="8xcpu", mesh=8, microbatches=2, donate=False)
    np.testing.assert_allclose(parallel(w, x), jax.jit(step)(w, x), rtol=1e-5, atol=1e-6)
