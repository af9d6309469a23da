"""`autopar cache` and `plan --cache`: plans that are kept on disk."""

from pathlib import Path

import pytest

from tests.cli.running import STEP, run


def test_a_plan_is_kept_listed_and_cleared(tmp_path: Path) -> None:
    model, folder = tmp_path / "model.py", tmp_path / "plans"
    model.write_text(STEP)
    words = ["plan", f"{model}:train_step", "--cluster", "8xh100", "--mesh", "8"]
    first = run(*words, "--cache", str(folder), "--json").data
    again = run(*words, "--cache", str(folder), "--json").data
    assert {**first, "planning_seconds": 0} == {**again, "planning_seconds": 0}
    listed = run("cache", "list", str(folder))
    assert "train_step on 8xh100, auto" in listed.out
    assert run("cache", "size", str(folder), "--json").data["plans"] == 1
    assert "1 plan," in run("cache", "clear", str(folder)).out
    assert run("cache", "list", str(folder)).out.startswith("0 plans")


@pytest.mark.parametrize("words", [["cache"], ["cache", "burn"]])
def test_what_cannot_be_done_ends_with_2(words: list[str]) -> None:
    assert run(*words).code == 2
