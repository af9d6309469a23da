"""`autopar diff`: what changed from one plan to another."""

from pathlib import Path

import pytest

from tests.cli.running import run, written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff")
    step = f"{written(folder)}:train_step"
    for name, method in (("dp.json", "dp"), ("fsdp.json", "fsdp"), ("again.json", "dp")):
        words = ("--cluster", "8xcpu", "--mesh", "8", "--method", method, "-o", folder / name)
        done = run("plan", step, *words)
        assert done.code == 0, done.err
    return folder


def test_equal_plans_are_one_line(folder: Path) -> None:
    done = run("diff", folder / "dp.json", folder / "again.json", "--exit-code")
    assert done.code == 0
    assert done.out == "the same plan of train_step\n"


def test_other_plans_are_told_and_end_with_0(folder: Path) -> None:
    done = run("diff", folder / "dp.json", folder / "fsdp.json")
    assert done.code == 0
    for word in ("dp.json -> fsdp.json", "differs: 2 arguments", "P('data')", "0 -> ", "KiB"):
        assert word in done.out, done.out


def test_exit_code_tells_that_they_differ(folder: Path) -> None:
    done = run("diff", folder / "dp.json", folder / "fsdp.json", "--exit-code")
    assert done.code == 1
    assert not done.err


def test_json_has_both_sides_with_units(folder: Path) -> None:
    data = run("diff", folder / "dp.json", folder / "fsdp.json", "--json").data
    assert (data["equal"], data["same_decisions"], data["same_graph"]) == (False, False, True)
    assert data["asked"] == [{"name": "method", "before": "dp", "after": "fsdp"}]
    up = next(a for a in data["arguments"] if a["path"] == "state/up")
    assert (up["before"]["sharding"], up["after"]["sharding"]) == ("P()", "P('data')")
    assert up["before"]["local_bytes"] == 8 * up["after"]["local_bytes"]
    step = next(f for f in data["figures"] if f["name"] == "step")
    assert step["seconds"][1] / step["seconds"][0] - 1 == pytest.approx(step["share"])
    peak = next(f for f in data["figures"] if f["name"] == "memory peak")
    assert all(isinstance(n, int) for n in peak["bytes"])


@pytest.mark.parametrize("columns", ["40", "60", "160"])
def test_tables_keep_to_the_terminal(
    folder: Path, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cli.running.COLUMNS", columns)
    done = run("diff", folder / "dp.json", folder / "fsdp.json")
    assert max(map(len, done.out.splitlines())) <= int(columns)


def test_brackets_are_no_markup(folder: Path) -> None:
    done = run("diff", folder / "dp.json", folder / "fsdp.json")
    values = done.out.partition("Values within the step")[2].partition("Collectives")[0]
    assert "f32[" in values
    assert "P('data'" in values


def test_what_is_no_plan_ends_with_2(folder: Path) -> None:
    done = run("diff", folder / "dp.json", folder / "gone.json")
    assert done.code == 2
    assert "cannot read plan" in done.err
