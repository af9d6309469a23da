"""`autopar show`: the parts of a saved plan."""

from pathlib import Path

import pytest

from tests.cli.running import run, written


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("show")
    path = folder / "plan.json"
    words = ("--cluster", "8xcpu", "--mesh", "8", "--method", "fsdp", "-o", path)
    done = run("plan", f"{written(folder)}:train_step", *words)
    assert done.code == 0, done.err
    return path


def test_everything_is_shown_by_default(saved: Path) -> None:
    done = run("show", saved)
    assert done.code == 0
    for word in ("plan train_step on 8xcpu", "Collectives in a step", "Arguments", "Memory"):
        assert word in done.out


@pytest.mark.parametrize(
    ("flag", "shown"),
    [("--params", "Arguments"), ("--comm", "Collectives"), ("--memory", "Memory of a device")],
)
def test_a_flag_shows_one_part(saved: Path, flag: str, shown: str) -> None:
    done = run("show", saved, flag)
    assert done.code == 0
    titles = [t for t in ("Arguments", "Collectives", "Memory of a device") if t in done.out]
    assert titles == [shown]


def test_json_has_the_plan(saved: Path) -> None:
    data = run("show", saved, "--json").data
    assert data["step"] == "train_step"
    assert data["mesh"] == {"data": 8}
    assert data["memory"]["peak_bytes"] >= data["memory"]["argument_bytes"]


def test_a_file_that_is_no_plan_ends_with_2(saved: Path) -> None:
    assert "cannot read plan" in run("show", saved.parent / "gone.json").err
    text = saved.read_text().replace('"data"', '"dada"', 1)
    broken = written(saved.parent, text, "broken.json")
    done = run("show", broken)
    assert done.code == 2
    assert "is damaged" in done.err
