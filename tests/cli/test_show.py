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
    for word in (
        "plan train_step on 8xcpu", "Mesh axes", "Collectives of a device in a step",
        "Arguments", "Memory",
        "In full: autopar show PLAN.json with --params, --ops, --stages, --comm, --memory",
    ):  # fmt: skip
        assert word in done.out
    assert len(done.out.splitlines()) < 60


@pytest.mark.parametrize(
    ("flag", "shown"),
    [
        ("--params", ["Arguments"]),
        ("--ops", ["Ops of a step"]),
        ("--stages", ["Modules"]),
        ("--comm", ["Collectives of a device in a step", "Each collective"]),
        ("--memory", ["Memory of a device", "Memory over a step"]),
    ],
)
def test_a_flag_shows_one_part(saved: Path, flag: str, shown: list[str]) -> None:
    done = run("show", saved, flag)
    assert done.code == 0
    titles = (
        "Arguments", "Ops of a step", "Modules", "Collectives of a device in a step",
        "Each collective", "Memory of a device", "Memory over a step",
    )  # fmt: skip
    assert [t for t in titles if t in done.out] == shown


def test_an_axis_has_its_roles_and_so_has_what_lies_over_it(saved: Path) -> None:
    (axis,) = run("show", saved, "--json").data["inspection"]["axes"]
    assert (axis["axis"], axis["size"]) == ("data", 8)
    assert axis["roles"][0] == "fsdp"
    gathered = [line.split() for line in run("show", saved, "--params").out.splitlines()]
    assert [words[-3] for words in gathered if words[0] == "state/up"] == ["fsdp"]


def test_ops_name_the_users_line_and_what_is_left_out(saved: Path) -> None:
    few, full = run("show", saved, "--ops").out, run("show", saved, "--ops", "--all").out
    assert "dot_general" in few
    assert "mytrain.py:7" in few
    assert "--all shows" not in full
    assert len(full.splitlines()) >= len(few.splitlines())


def test_only_what_matches_is_shown(saved: Path) -> None:
    text = run("show", saved, "--params", "--match", "**/up").out
    assert "state/up" in text
    assert "state/down" not in text
    done = run("show", saved, "--match", "**/nothing")
    assert done.code == 2
    assert "no argument, op or collective of the plan matches '**/nothing'" in done.err


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
