"""Models of the zoo over two and four processes give what one process gives under the same plan."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from autopar.schedule.table import SCHEDULES
from tests.processes.random_cases import SHAPES, Case, outcomes, standing_jobs
from tests.zoo import KINDS

Transport = Literal["pull", "put"]


def one_mesh(model: str, **options: Any) -> Case:
    return Case(0, 4, model, "adam", options, "pull", "host")


def staged(model: str, schedule: str, stages: int, transport: Transport) -> Case:
    options = {"stages": stages, "microbatches": 4, "method": "dp", "schedule": schedule}
    return Case(0, 4, model, "sgd", options, transport, "init")


def check(cases: list[Case], in_turn: bool = False) -> None:
    """Every case in jobs of two and of four processes, or in one of them."""
    shapes = [SHAPES[4][n % 2 : n % 2 + 1] if in_turn else SHAPES[4] for n in range(len(cases))]
    with standing_jobs() as jobs:
        rows = [
            row
            for case, chosen in zip(cases, shapes, strict=True)
            for row in outcomes(case, jobs, chosen)
        ]
    faults = [r for r in rows if r["outcome"] not in ("equal", "equal in every bit")]
    if faults:  # in whole: an assertion's message is cut
        pytest.fail("\n".join(map(json.dumps, faults)), pytrace=False)
    assert len(rows) == sum(map(len, shapes))


# Stages are on two devices each, or one; the puts are of values that lie on both alike.
SAMPLE = [
    one_mesh("mlp_equinox", method="fsdp"),
    one_mesh("mlp", method="megatron"),
    one_mesh("mlp", microbatches=2),
    staged("mlp_seven", "1f1b", 2, "put"),
    staged("mlp_seven", "zb-v", 4, "pull"),
]


@pytest.mark.ci
def test_a_sample() -> None:
    """Over two processes and over four in turn: each process compiles all that a case runs."""
    check(SAMPLE, in_turn=True)


@pytest.mark.slow
def test_the_sample_over_two_and_over_four() -> None:
    check(SAMPLE)


RECIPES = ("auto", "dp", "zero2", "fsdp", "hsdp", "megatron", "fsdp+tp")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp_nnx", "gpt_scan", "tied", "moe_switch", "vit"])
def test_every_recipe(model: str) -> None:
    check([one_mesh(model, method=method) for method in RECIPES])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "tied", "clip"])
def test_every_schedule(model: str) -> None:
    names = [s.name for s in SCHEDULES.values() if s.has_backward]
    check([staged(model, name, 4, ("pull", "put")[n % 2]) for n, name in enumerate(names)])


@pytest.mark.slow
def test_every_kind_in_microbatches() -> None:
    check([one_mesh(model, microbatches=2) for model in KINDS if model != "unet"])
