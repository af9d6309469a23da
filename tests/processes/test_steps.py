"""A step over several processes gives what one process gives under the same plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.processes.jobs import results
from tests.processes.parts import is_exact
from tests.processes.scenarios import ROWS, WIDTH, create, own_rows, train, trained


class Case(NamedTuple):
    """A plan's options; the state may be made before there is a plan."""

    name: str
    options: dict[str, Any]
    when: str = "late"


# Stages as one program of all processes: arrays between stages travel within it.
ONE_PROGRAM = "batch=exact,layer=min-cut,stage=search{stages=4,microbatches=4},shard,lower=spmd"
CASES = [
    Case("fsdp", {"method": "fsdp"}, "early"),
    Case("1f1b", {"stages": 4, "microbatches": 4, "schedule": "1f1b"}, "early"),
    Case("one program", {"passes": ONE_PROGRAM}, "early"),
]


class OneProcess(NamedTuple):
    """A saved plan, and what one process does under it."""

    path: str
    plan: autopar.Plan
    told: list[str]
    rows: dict[str, str]


def one_process(folder: Path, cluster: str, case: Case) -> OneProcess:
    """Devices are numbered alike in one process of four and in two of two: a plan is for both."""
    plan = autopar.plan(
        train,
        jax.eval_shape(create, jax.random.key(0)),
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
        cluster=cluster,
        **case.options,
    )
    path = folder / f"{case.name}.json"
    plan.save(path)
    step = autopar.parallelize(train, plan=plan)
    told, state = trained(step, step.init(create, jax.random.key(0)))
    return OneProcess(str(path), plan, told, own_rows(state["w"]))


def check_job(
    folder: Path, count: int, devices: int, cases: Sequence[Case], transport: str = "pull"
) -> None:
    """All cases over so many processes, in one job."""
    cluster = f"{count}x{devices}xcpu"
    alone = [one_process(folder, cluster, case) for case in cases]
    texts = [(one.path, case.when, transport) for one, case in zip(alone, cases, strict=True)]
    found = results(count, devices, "plans", json.dumps(texts))
    for i, (one, case) in enumerate(zip(alone, cases, strict=True)):
        exact = is_exact(one.plan, devices)
        seen: dict[str, str] = {}
        for process in found:
            check_equal(process[i][0], one.told, exact, case.name)
            seen |= process[i][1]
        assert seen.keys() == one.rows.keys(), case.name
        for place, data in seen.items():
            check_equal([data], [one.rows[place]], exact, f"{case.name} {place}")


def check_equal(got: Any, wanted: Any, exact: bool, name: str) -> None:
    """Numbers as hex digits, equal in every bit or to rounding."""
    if exact:
        assert got == wanted, name
        return
    sides = [[np.frombuffer(bytes.fromhex(d), np.float32) for d in side] for side in (got, wanted)]
    for g, w in zip(*sides, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.ci
def test_two_processes_give_every_bit_of_one(tmp_path: Path) -> None:
    check_job(tmp_path, 2, 2, CASES)


SCHEDULES = {
    "gpipe": 2, "1f1b": 2, "eager-1f1b": 2, "interleaved": 4, "zb-h1": 2, "zb-h2": 4, "zb-v": 4,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(4, 1), (4, 2), (2, 4)])
def test_every_schedule_and_recipe_over_more(tmp_path: Path, count: int, devices: int) -> None:
    staged = [
        Case(name, {"stages": stages, "microbatches": 4, "schedule": name})
        for name, stages in SCHEDULES.items()
    ]
    whole = [Case(name, {"method": name}) for name in ("dp", "fsdp", "megatron", "fsdp+tp")]
    check_job(tmp_path, count, devices, [*staged, *whole])


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 2), (4, 1)])
def test_puts_give_every_bit_too(tmp_path: Path, count: int, devices: int) -> None:
    check_job(tmp_path, count, devices, CASES[1:2], "put")


@pytest.mark.smoke
def test_the_first_plans_and_each_brings_its_own_rows() -> None:
    """Nobody names a cluster, and state is made before there is a plan."""
    first, second = results(2, 2, "own_rows_of", json.dumps({"method": "dp"}))
    assert [first["rows"], second["rows"]] == [[[0, ROWS // 2]], [[ROWS // 2, ROWS]]]
    assert first["cluster"] == "2x2xcpu"
    assert first["plan"] == second["plan"]
    for process in (first, second):
        assert process["of all rows"] == process["of own rows"]


@pytest.mark.slow
def test_the_rows_of_stages_are_read_where_they_enter() -> None:
    """The first stage reads the batch, and so does the last: it compares with it."""
    options = {"stages": 2, "microbatches": 4, "schedule": "1f1b"}
    for process in results(4, 1, "own_rows_of", json.dumps(options)):
        assert process["of all rows"] == process["of own rows"]
        assert process["rows"]
