"""`autopar verify`: its tables, its JSON, its exit codes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from tests.cli.running import STEP, Ran, run, written

WITH_STATE = f"""{STEP}

def create_state(key):
    up, down = jax.random.split(key)
    return {{
        "up": 0.1 * jax.random.normal(up, (64, 128)),
        "down": 0.1 * jax.random.normal(down, (128, 64)),
    }}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verify")


@pytest.fixture(scope="module")
def plan(folder: Path) -> Path:
    """A saved plan of data parallelism."""
    path = folder / "plan.json"
    words = ("--cluster", "8xcpu", "--mesh", "8", "--method", "dp", "-o", path)
    done = run("plan", written(folder, WITH_STATE), *words)
    assert done.code == 0, done.err
    return path


def verified(plan: Path, *options: str, text: str = WITH_STATE) -> Ran:
    """`autopar verify` of a plan, its step in a file beside it."""
    return run("verify", plan, written(plan.parent, text), *options)


@pytest.mark.smoke
def test_numbers_of_both_steps_are_a_table(plan: Path) -> None:
    done = verified(plan, "--level", "numerics", "--steps", "2")
    assert done.code == 0, done.err
    assert done.out.startswith("verify train_step on 8xcpu\n")
    assert "2 steps on 8 virtual CPU devices: data=8" in done.out
    assert "agrees to rounding" in done.out
    for path in ("state/up", "state/down"):
        (row,) = (line for line in done.out.splitlines() if line.startswith(path))
        assert row.split()[-1] == "agrees"
    assert "arrays of state were" not in done.out  # create_state made it
    assert "batches were random numbers" in done.out


def test_shrunk_numbers_say_so(plan: Path) -> None:
    done = verified(plan, "--level", "numerics", "--steps", "1", "--shrink", "4")
    assert done.code == 0, done.err
    assert "shrunk from mesh (data=8) to (data=4) with 128 rows" in done.out.replace("\n", " ")


def test_without_create_state_the_state_is_drawn(plan: Path) -> None:
    done = verified(plan, "--level", "numerics", "--steps", "1", text=STEP)
    assert done.code == 0, done.err
    assert "2 arrays of state were random numbers" in done.out


def keys_of(data: Any) -> Any:
    """The keys of nested objects; of lists those of their first entry."""
    if isinstance(data, dict):
        return {key: keys_of(value) for key, value in data.items()}
    if isinstance(data, list):
        return [keys_of(entry) for entry in data[:1]]
    return None


def test_json_of_numbers(plan: Path) -> None:
    done = verified(plan, "--level", "numerics", "--steps", "1", "--json")
    assert done.code == 0, done.err
    output = dict.fromkeys(("path", "error", "noise", "tolerance", "agrees"))
    assert keys_of(done.data) == {
        "json_version": None, "step": None, "cluster": None, "level": None, "target": None,
        "agrees": None,
        "numerics": {
            "agrees": None, "steps": None, "devices": None, "where": None, "rounding": None,
            "outputs": [output], "notes": [None],
        },
        "parts": [],
        "notes": [],
    }  # fmt: skip
    assert done.data["agrees"] is True
    assert done.data["numerics"]["devices"] == 8


def test_json_of_figures_has_units_in_its_keys(plan: Path) -> None:
    done = verified(plan, "--json")
    assert done.code == 0, done.err
    figure = dict.fromkeys(
        ("name", "kind", "axes", "predicted_bytes", "compiled_bytes", "ratio", "agrees",
         "negligible")
    )  # fmt: skip
    collective = dict.fromkeys(("kind", "axes", "dtype", "bytes", "runs", "op", "line"))
    found = keys_of(done.data)
    assert found["parts"][0].pop("compiled") == {
        "target": None, "compiler": None, "argument_bytes": None, "peak_bytes": None,
        "step_seconds": None, "exposed_seconds": None, "out_of_memory": None,
        "collectives": [collective | {"axes": [None]}],
    }  # fmt: skip
    assert found["parts"] == [
        {"name": None, "alike": [], "agrees": None, "fits": None, "device_bytes": None,
         "figures": [figure | {"axes": [None]}], "differences": []}
    ]  # fmt: skip
    row = done.data["parts"][0]["figures"][0]
    assert (row["kind"], row["axes"]) == ("all-reduce", ["data"])
    assert row["predicted_bytes"] == row["compiled_bytes"] > 0


def test_figures_are_a_table(plan: Path) -> None:
    done = verified(plan)
    assert done.code == 0, done.err
    assert "agrees with the compiler" in done.out
    for name in ("all-reduce over data", "arguments", "peak"):
        assert any(line.startswith(name) for line in done.out.splitlines())
    assert "XLA on CPU" in done.out


def test_a_wrong_prediction_ends_with_1(plan: Path) -> None:
    right = autopar.load(plan)
    wrong = replace(right.prediction, argument_bytes=right.prediction.argument_bytes + 10**9)
    path = plan.with_name("wrong.json")
    autopar.save(replace(right, prediction=wrong), path)
    done = verified(path)
    assert done.code == 1, done.err
    assert "differs: arguments" in done.out
    assert verified(path, "--json").data["agrees"] is False


def test_stages_are_an_overview_with_a_row_a_part(folder: Path) -> None:
    path = folder / "stages.json"
    words = ("--cluster", "8xcpu", "--stages", "2", "--microbatches", "4", "-o", path)
    assert run("plan", written(folder, WITH_STATE), *words).code == 0
    done = verified(path, "--level", "collectives")
    assert done.code == 0, f"{done.out}{done.err}"
    assert "Programs of the plan" in done.out
    assert {"F0", "B0"} <= {line.split()[0] for line in done.out.splitlines() if line.strip()}


@pytest.mark.parametrize("columns", ["40", "60", "160"])
def test_tables_keep_to_the_terminal(
    plan: Path, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cli.running.COLUMNS", columns)
    done = verified(plan)
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= int(columns)
    assert "differs" not in done.out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--level", "numbers"), "'numbers' is not one of"),
        (("--target", "4xh100"), "target 4xh100 has 4 devices and the plan is for 8"),
        (("--target", "8xnope"), "no chip is called 'nope'"),
        (("--level", "numerics", "--shrink", "1"), "shrinks to (data=2) and no further"),
        (("--steps", "0"), "0 is not in the range"),
    ],
)
def test_what_cannot_be_asked_ends_with_2(plan: Path, options: tuple[str, ...], told: str) -> None:
    done = verified(plan, *options)
    assert done.code == 2
    assert told in done.err
    assert "Traceback" not in done.err


def test_another_step_ends_with_2_and_says_what_differs(plan: Path) -> None:
    done = verified(plan, text=WITH_STATE.replace("shape((256, 64)", "shape((512, 64)"))
    assert done.code == 2
    assert "argument batch is f32[256, 64] in the plan and f32[512, 64] here" in done.err


def test_no_plan_ends_with_2(folder: Path) -> None:
    done = verified(folder / "none.json")
    assert done.code == 2
    assert "cannot read plan" in done.err
