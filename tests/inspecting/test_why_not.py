"""Pins on a saved plan: the same as planning with them, or why that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from autopar.errors import PinError
from autopar.inspecting.why_not import why_not
from autopar.ir.explanation import Counterfactual
from autopar.options import pins_of
from tests.inspecting.questions import Asked, asked


@pytest.fixture(scope="module")
def free() -> Asked:
    return asked()


def ask(given: Asked, **pins: object) -> Counterfactual:
    return why_not(given.loaded, pins_of({f"**/{k}": dims for k, dims in pins.items()}))


@pytest.mark.parametrize(
    "pins",
    [
        {"params/up": ("data", "model")},
        {"params/up": (None, None), "params/down": (None, "data")},
        {"up": ("model",)},
        {"batch": (None, None)},
    ],
    ids=str,
)
def test_it_is_the_plan_that_planning_with_the_pins_gives(
    free: Asked, pins: dict[str, object]
) -> None:
    named = {f"**/{k}": dims for k, dims in pins.items()}
    found, plan = why_not(free.loaded, pins_of(named)), free.step.what_if(pins=named)
    assert found.pinned is not None
    assert found.price.seconds == free.plan.prediction.seconds
    assert found.pinned.seconds == pytest.approx(plan.prediction.seconds)
    assert found.pinned.peak_bytes == plan.prediction.peak_bytes
    assert found.pinned.communication_seconds == pytest.approx(
        plan.prediction.communication_seconds
    )
    before = {(t.kind, t.axes): (t.count, t.nbytes) for t in free.plan.prediction.traffic}
    after = {(t.kind, t.axes): (t.count, t.nbytes) for t in plan.prediction.traffic}
    for t in found.traffic:
        assert (t.count[0], t.nbytes[0]) == before.get((t.kind, t.axes), (0, 0))
        assert (t.count[1], t.nbytes[1]) == after.get((t.kind, t.axes), (0, 0))


def test_the_plans_own_choice_changes_nothing(free: Asked) -> None:
    found = ask(free, **{"params/up": (None, ("data", "model"))})
    assert found.pinned == found.price
    assert (found.traffic, found.moved) == ((), ())
    assert "the plan has these shardings already: nothing changes" in found.notes


def test_what_moves_along_is_named_with_both_shardings(free: Asked) -> None:
    found = ask(free, **{"params/up": ("model",)})
    assert ("state/params/up", "P(None, ('data', 'model'))", "P('model')") in found.moved
    assert ("state/momentum/up", "P(None, ('data', 'model'))", "P('model')") in found.moved
    alone = ask(free, **{"params/odd": ()})
    assert {path for path, _, _ in alone.moved} == {"state/params/odd", "state/momentum/odd"}


def test_a_pin_takes_the_place_of_the_plans_own() -> None:
    pinned = asked(pins={"params/*": ()})
    found = ask(pinned, **{"params/up": ("model",)})
    assert found.pinned is not None
    assert [path for path, _, _ in found.moved if "params" in path] == ["state/params/up"]
    (note,) = (n for n in found.notes if "own pins" in n)
    assert "state/params/down = P()" in note
    assert "state/params/up" not in note


def test_too_little_memory_is_a_refusal_that_names_a_limit() -> None:
    found = ask(asked(memory_gb=0.03), **{"params/up": ()})
    assert found.pinned is None
    assert "no plan on (data=2, model=4) fits 30.7 MiB a device" in found.refusal
    assert "memory_gb=" in found.refusal
    assert "without it" in found.refusal


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ({"params/upp": ("data",)}, "nearest paths are"),
        ({"params/up": ("rows",)}, r"names axis 'rows', but the mesh has \(data=2, model=4\)"),
        ({"params/odd": (None, "model")}, "7 is not divisible by"),
        ({"params/odd": (None, None, "data")}, "3 dims"),
    ],
    ids=str,
)
def test_a_pin_that_cannot_be_kept_is_an_error(
    free: Asked, pin: dict[str, object], said: str
) -> None:
    with pytest.raises(PinError, match=said):
        why_not(free.loaded, pins_of(pin))


@pytest.mark.parametrize("limit", [{}, {"memory_gb": 0.045}])
def test_of_stages_no_pin_does_better_than_the_planner_with_it(limit: dict[str, float]) -> None:
    given: dict[str, Any] = {"stages": 2, "microbatches": 4, "mesh": None, **limit}
    found = ask(asked(**given), **{"params/up": ("data", None)})
    planned = asked(**given, pins={"state/params/up": P("data", None)}).plan.prediction
    assert found.pinned is not None
    assert found.pinned.seconds >= planned.seconds * (1 - 1e-9)


def test_of_stages_only_the_submesh_that_holds_it_is_sharded_anew() -> None:
    staged = asked(stages=2, microbatches=4, mesh=None)
    found = ask(staged, **{"params/up": ()})
    assert found.pinned is not None
    assert found.price.seconds == pytest.approx(staged.plan.prediction.seconds)
    # So small a step waits for the host: its devices do more, but it takes no longer.
    assert found.pinned.seconds == found.price.seconds
    assert found.pinned.exposed_seconds > found.price.exposed_seconds
    assert ("state/params/up", "P(None, 'data')", "P()") in found.moved
    assert any("solved again: mesh0, whose" in note for note in found.notes)
    with pytest.raises(PinError, match="matches none"):
        ask(staged, **{"params/upp": ()})
