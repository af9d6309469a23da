"""Runners-up of the stage search that are built because the best came out slower than priced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from autopar.errors import MemoryLimitError
from autopar.passes.stage.prices import Choice
from autopar.passes.stage.search import Ranked
from autopar.planner.stage_programs import StagePrograms
from autopar.planner.stage_search import fastest_built

NO_ROOM = float("inf")


def choice(seconds: float) -> Choice:
    return Choice((), 8, "1f1b", 1, seconds, seconds, ())


def programs(seconds: float) -> StagePrograms:
    timing = SimpleNamespace(order=(seconds, seconds), device_seconds=seconds)
    return cast(StagePrograms, SimpleNamespace(timing=timing))


@pytest.mark.parametrize(
    ("priced", "takes", "built", "chosen"),
    [
        ([1.0, 1.002], [1.0, 1.0], [0], 0),  # it came out as it was priced
        ([1.0, 1.002], [1.005, 1.0], [0], 0),  # no runner-up is priced clearly below that
        ([1.0, 1.02, 1.03], [1.1, 1.02, 1.0], [0, 1], 1),  # nor below the runner-up
        ([1.0, 1.02, 1.03], [1.1, 1.2, 1.03], [0, 1, 2], 2),
        ([1.0, 1.02, 1.03], [1.1, NO_ROOM, 1.04], [0, 1, 2], 2),
        ([1.0, 1.01, 1.02, 1.03, 1.04], [2.0, 2.1, 2.1, 2.1, 1.0], [0, 1, 2, 3], 0),
    ],
)
def test_runners_up_are_built_while_they_are_priced_below_what_is_built(
    priced: list[float], takes: list[float], built: list[int], chosen: int
) -> None:
    choices = [choice(s) for s in priced]
    ranked = cast(Ranked, SimpleNamespace(best=choices[0], others=tuple(choices[1:])))
    seen = [0]

    def build(wanted: Choice) -> StagePrograms:
        k = choices.index(wanted)
        seen.append(k)
        if takes[k] == NO_ROOM:
            raise MemoryLimitError("too much")
        return programs(takes[k])

    found, best = fastest_built(ranked, programs(takes[0]), build)
    assert (seen, choices.index(best)) == (built, chosen)
    assert found.timing.device_seconds == takes[chosen]
