"""An explanation's figures are those of plans made for it, and what binds is named."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import ArgumentError
from autopar.inspecting.compare import sent_by
from autopar.inspecting.explain import explain, two_counts
from autopar.inspecting.loaded_plan import reopen
from autopar.inspecting.reshardable_unit import units_of
from autopar.ir.explanation import Explanation, Price
from autopar.ir.naming import Names
from autopar.passes.shard.model.pins import Dims
from autopar.passes.shard.optimal import Optimal
from tests.inspecting.questions import Asked, asked

AXES = ("data", "model")


@pytest.fixture(scope="module")
def free() -> Asked:
    return asked()


def specs(shape: tuple[int, ...], sizes: tuple[int, int] = (2, 4)) -> list[Dims]:
    """Every way to give two axes to the dims of a shape."""
    found: list[Dims] = []
    for places in itertools.product((-1, *range(len(shape))), repeat=2):
        dims = tuple(
            tuple(a for a, p in zip(AXES, places, strict=True) if p == d) for d in range(len(shape))
        )
        counts = [1] * len(shape)
        for p, n in zip(places, sizes, strict=True):
            counts[p] *= n if p >= 0 else 1
        if all(n % c == 0 for n, c in zip(shape, counts, strict=True)):
            found.append(dims)
    return found


def tried(given: Asked, path: str, shape: tuple[int, ...]) -> list[float]:
    """What the solver makes of every choice of an argument, by pins, the cheapest first."""
    (unit,) = units_of(given.loaded)
    found: list[float] = []
    for dims in specs(shape):
        setting = replace(unit.setting(((path, dims),)), memory_bytes=2**60)
        found.append(Optimal().run(unit.graph, setting).outcome.seconds)
    return sorted(found)


@pytest.mark.parametrize("path", ["params/up", "params/down", "params/odd", "batch"])
def test_the_next_best_are_the_best_of_all_that_can_be_pinned(free: Asked, path: str) -> None:
    found = explain(free.loaded, path)
    own, *rest = tried(free, found.subject, found.shape)
    assert found.price.solver_seconds == pytest.approx(own)
    told = sorted(a.price.solver_seconds for a in found.alternatives if a.price is not None)
    assert len(told) == min(3, len(rest))
    assert told == pytest.approx(rest[: len(told)], rel=1e-5)


def test_each_alternative_is_priced_as_its_pinned_plan(free: Asked) -> None:
    """But where planning also finds one that waits for every move, which is faster."""
    found = explain(free.loaded, "params/up")
    alike = 0
    for other in found.alternatives:
        assert other.sharding is not None
        assert other.price is not None
        dims = tuple(axes or None for axes in other.sharding.dims)
        plan = free.step.what_if(pins={"state/params/up": dims})
        if plan.outcome.sentence.startswith("Solved with no overlap"):
            assert plan.prediction.seconds < other.price.seconds
            continue
        alike += 1
        assert other.price.solver_seconds == pytest.approx(plan.outcome.seconds, rel=1e-5)
        assert other.price.seconds == pytest.approx(plan.prediction.seconds, rel=0.05)
    assert alike > 1


def test_prices_are_those_of_the_plan(free: Asked) -> None:
    found, p = explain(free.loaded, "params/up"), free.plan.prediction
    assert found.choice == "P(None, ('data', 'model'))"
    assert (found.price.seconds, found.price.peak_bytes) == (p.seconds, p.peak_bytes)
    assert found.price.solver_seconds == pytest.approx(free.plan.outcome.seconds)
    assert found.local_bytes == 1024 * 4096 * 4 // 8
    seconds = [a.price.seconds for a in found.alternatives if a.price is not None]
    assert seconds == sorted(seconds)


def test_who_reads_it_and_how_is_told() -> None:
    found = explain(asked(method="fsdp").loaded, "params/up")
    assert "forward dot_general (questions.py:" in found.reads[0]
    assert "reads it replicated after all-gather over data and model (16.0 MiB" in found.reads[0]
    assert any("the update reads it as P(('data', 'model'))" in r for r in found.reads)
    assert any("its new value is made after reduce-scatter" in r for r in found.reads)


def test_collectives_that_change_say_what_is_waited_for(free: Asked) -> None:
    found = explain(free.loaded, "params/up")
    told = [c for a in found.alternatives for c in a.changes if " over " in c]
    assert told
    assert all(change.endswith(" exposed") for change in told)


@pytest.mark.parametrize("options", [{}, {"stages": 2, "microbatches": 4, "mesh": None}])
def test_what_is_waited_for_of_collectives_adds_up(options: dict[str, Any]) -> None:
    waited = list[float]()
    for unit in units_of(asked(**options).loaded):
        kept = unit.weighed(unit.kept, 0.0)
        found = sent_by(kept, Names(unit.graph)).values()
        waited.append(sum(s.exposed_seconds for s in found))
        assert waited[-1] == pytest.approx(kept.price.exposed_seconds)
    assert max(waited) > 0


KEPT = Price(1.0, 1.0, 0.5, 0.6, 0.5, 2**20)


@pytest.mark.parametrize(
    ("step", "cost", "said"),
    [
        (0.9, 1.1, "100 ms higher, though the predicted step, with overlap and fusion, is shorter"),
        (1.1, 0.9, "100 ms lower, though the predicted step, with overlap and fusion, is longer"),
        (1.0, 0.9, "100 ms lower; the predicted step, with overlap and fusion, is as long"),
        (0.9, 0.9, "100 ms lower, too: a better plan, which the solver has not found"),
        (1.1, 1.1, ""),
        (0.9, 1.0, ""),
    ],
)
def test_two_ways_to_count_that_disagree_are_told(step: float, cost: float, said: str) -> None:
    other = replace(KEPT, seconds=step, solver_seconds=cost)
    before = "the cost that the solver minimizes, without overlap, is "
    assert [*two_counts(KEPT, other)] == ([before + said] if said else [])


def test_who_reads_it_in_a_loop_is_told() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)
            return jnp.mean(h**2)

        return w - 0.1 * jax.grad(loss)(w), jnp.float32(0)

    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1024, 1024), (256, 1024)))
    loaded = reopen(autopar.plan(step, w, x, cluster="8xh100", mesh=(8,), method="fsdp"))
    forward, backward, *_ = explain(loaded, "w").reads
    for read, region in ((forward, "forward"), (backward, "backward")):
        assert read.startswith(f"{region} dot_general (test_explain.py:")
        assert "reads it replicated after all-gather over data (4.00 MiB" in read


def test_dims_that_do_not_divide_and_state_bind(free: Asked) -> None:
    binds = explain(free.loaded, "params/odd").binds
    assert "dim 1 of size 7 is not divisible by data=2" in binds
    assert "dim 1 of size 7 is not divisible by model=4" in binds
    assert any("it is state" in b for b in binds)
    assert not any("state" in b for b in explain(free.loaded, "batch").binds)


def test_a_pin_binds_and_its_price_is_told() -> None:
    found = explain(asked(pins={"params/up": ("data",)}).loaded, "params/up")
    assert found.choice == "P('data')"
    assert found.binds[0] == "the pin 'params/up' = P('data') fixes it"
    assert "if it were free, P(None, ('data', 'model')) would take" in found.binds[-1]
    least = min(a.price.seconds for a in found.alternatives if a.price is not None)
    assert least == pytest.approx(asked().plan.prediction.seconds)


def test_a_method_that_leaves_one_choice_binds() -> None:
    found = explain(asked(method="dp").loaded, "params/up")
    assert "method='dp' allows only this choice" in found.binds
    assert found.choice == "P()"
    assert found.alternatives


def test_what_does_not_fit_says_by_how_much() -> None:
    tight = asked(memory_gb=0.023)
    found = explain(tight.loaded, "params/up")
    limit = tight.plan.origin.memory_bytes
    barred = [a for a in found.alternatives if a.price is None]
    assert barred
    assert all("more than the limit of 23.6 MiB" in a.refusal for a in barred)
    assert all(a.price is None or a.price.peak_bytes <= limit for a in found.alternatives)
    assert any("not fit 23.6 MiB a device" in b for b in found.binds)


def test_one_of_several_matches_is_told_of_and_the_others_named(free: Asked) -> None:
    found = explain(free.loaded, "**/odd")
    assert {found.subject, *found.others} == {"state/params/odd", "state/momentum/odd"}
    assert explain(free.loaded, "params/*").shape in ((1024, 4096), (4096, 1024))


def op_of(given: Asked, words: str) -> Explanation:
    return explain(given.loaded, words)


def test_an_op_is_split_and_its_next_best_cost_more(free: Asked) -> None:
    line = next(o.origin.line for o in free.loaded.batching.graph.ops if o.kind == "dot_general")
    found = op_of(free, f"dot_general {line} forward")
    assert found.is_split
    assert found.choice == "P() x P(None, ('data', 'model')) -> P(None, ('data', 'model'))"
    assert len(found.alternatives) == 3
    assert all(
        a.price is not None and a.price.solver_seconds >= found.price.solver_seconds * (1 - 1e-6)
        for a in found.alternatives
    )
    assert op_of(free, found.subject).choice == found.choice


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("params/upp", "the nearest paths are"),
        ("dot_general", "may be any of"),
        ("conv model.py:1", "is no argument and no op of train_step"),
    ],
)
def test_what_is_not_one_thing_is_an_error_with_candidates(
    free: Asked, words: str, said: str
) -> None:
    with pytest.raises(ArgumentError, match=said):
        explain(free.loaded, words)


def test_a_stage_is_asked_on_its_submesh_and_priced_in_the_whole_schedule() -> None:
    staged = asked(stages=2, microbatches=4, mesh=None)
    found = explain(staged.loaded, "params/up")
    p = staged.plan.prediction
    assert found.price.seconds == pytest.approx(p.seconds)
    assert found.price.peak_bytes == p.peak_bytes
    assert found.alternatives
    whole = next(a for a in found.alternatives if a.choice == "P()")
    assert whole.price is not None
    # The host sets the pace of so small a step; the devices wait longer all the same.
    assert whole.price.seconds >= found.price.seconds
    assert whole.price.exposed_seconds > found.price.exposed_seconds
    assert whole.changes[0].endswith("yet the step is as long: they do not set its pace alone")
