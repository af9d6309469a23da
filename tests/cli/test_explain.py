"""`autopar explain` and `autopar why-not`: a saved plan questioned from the command line."""

from pathlib import Path

import pytest

from tests.cli.running import run, written


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explain")
    path = folder / "plan.json"
    words = ("--cluster", "8xcpu", "--mesh", "2,4", "--method", "fsdp", "-o", path)
    done = run("plan", f"{written(folder)}:train_step", *words)
    assert done.code == 0, done.err
    return path


def test_an_argument_is_explained_in_a_sentence_and_a_table(saved: Path) -> None:
    done = run("explain", saved, "up")
    assert done.code == 0, done.err
    assert done.out.startswith("why state/up\nIt is sharded as P(")
    for words in ("reads it replicated after all-gather", "limits", "Alternatives, each with"):
        assert words in " ".join(done.out.split())
    assert "\x1b" not in done.out


def test_json_has_every_figure(saved: Path) -> None:
    data = run("explain", saved, "state/up", "--json").data
    assert data["subject"] == "state/up"
    assert data["price"]["seconds"] > 0
    assert data["headline"].startswith(f"It is sharded as {data['choice']}")
    assert all(a["price"]["seconds"] > 0 for a in data["alternatives"] if a["price"])


def test_what_is_not_there_ends_with_2(saved: Path) -> None:
    done = run("explain", saved, "upp")
    assert done.code == 2
    assert "the nearest paths are" in done.err
    assert run("explain", saved).code == 2


def test_an_op_may_be_several_words(saved: Path) -> None:
    many = run("explain", saved, "dot_general", "mytrain.py:7")
    assert many.code == 2
    assert "may be any of" in many.err
    name = many.err.split("* dot_general forward mytrain.py:7 ")[1].split()[0]
    one = run("explain", saved, "dot_general", name, "--json").data
    assert one["subject"] == "dot_general forward mytrain.py:7"


def test_a_pin_is_priced(saved: Path) -> None:
    done = run("why-not", saved, 'up=P(None,"model")')
    assert done.code == 0, done.err
    for words in (
        "why not up = P(None, 'model')",
        "The predicted step is",
        "note: the mesh (data=2",
    ):
        assert words in done.out
    data = run("why-not", saved, 'up=P(None,"model")', "--json").data
    assert data["pinned"]["seconds"] > 0
    assert {"path": "state/up", "before": "P(('data', 'model'))", "after": "P(None, 'model')"} in (
        data["moved"]
    )


@pytest.mark.parametrize(
    ("pin", "said"),
    [("up", "is not understood"), ("up=P(rows)", "names axis 'rows'"), ("x=P()", "matches none")],
)
def test_a_bad_pin_ends_with_2(saved: Path, pin: str, said: str) -> None:
    done = run("why-not", saved, pin)
    assert done.code == 2
    assert said in done.err


def test_no_such_plan_ends_with_1(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ("--cluster", "8xcpu", "--mesh", "8", "--memory-gb", "0.00017", "-o", path)
    done = run("plan", f"{written(tmp_path)}:train_step", *words)
    assert done.code == 0, done.err
    done = run("why-not", path, "up=P()", "down=P()", "batch=P()")
    assert done.code == 1
    assert "no plan satisfies this" in done.out
    assert "memory_gb=" in done.out
