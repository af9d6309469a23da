"""`autopar lint`: what is found of a step in a file, before it is planned."""

from pathlib import Path

import pytest

from tests.cli.running import STEP, run, written

ODD = STEP.replace("(256, 64)", "(255, 64)")


def test_a_clean_step_is_told_so(tmp_path: Path) -> None:
    done = run("lint", f"{written(tmp_path)}:train_step", "--cluster", "8xh100")
    assert done.code == 0, done.err
    for word in (
        "lint train_step for 8xh100",
        "100.0% of FLOPs",
        "256 rows may be cut: exact in 1",
    ):
        assert word in done.out
    assert "no problems found" in done.out


def test_a_warning_ends_with_0_and_says_what_to_do(tmp_path: Path) -> None:
    done = run("lint", written(tmp_path, ODD), "--cluster", "8xh100")
    assert done.code == 0, done.err
    assert "1 warning" in done.out
    assert "indivisible dim  mytrain.py:" in done.out
    assert "Take 248 or 256." in done.out


def test_an_error_ends_with_1(tmp_path: Path) -> None:
    step = written(tmp_path, ODD)
    done = run("lint", step, "--cluster", "8xh100", "--microbatches", "2")
    assert done.code == 1
    assert "error  microbatches" in done.out
    assert run("lint", step, "--cluster", "8xh100", "--microbatches", "3").code == 0


def test_json_has_everything(tmp_path: Path) -> None:
    words = ("--cluster", "8xh100", "--microbatches", "2", "--json")
    done = run("lint", written(tmp_path, ODD), *words)
    assert done.code == 1
    data = done.data
    assert (data["step"], data["cluster"], data["devices"]) == ("train_step", "8xh100", 8)
    assert data["coverage"]["flops_share"] == 1
    assert data["microbatches"]["rows"] == 255
    assert data["microbatches"]["exact"] is False
    found = [(f["severity"], f["topic"]) for f in data["findings"]]
    assert found == [("error", "microbatches"), ("warning", "indivisible dim")]
    assert data["findings"][1]["bytes"] == 255 * 64 * 4


@pytest.mark.parametrize("columns", ["40", "60", "160"])
def test_lines_keep_to_the_terminal(
    tmp_path: Path, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cli.running.COLUMNS", columns)
    done = run("lint", written(tmp_path, ODD), "--cluster", "8xh100")
    assert max(map(len, done.out.splitlines())) <= int(columns)


def test_what_cannot_be_read_ends_with_2(tmp_path: Path) -> None:
    assert run("lint", tmp_path / "gone.py", "--cluster", "8xh100").code == 2
    assert run("lint", written(tmp_path), "--cluster", "8xnope").code == 2
    broken = STEP.replace("batch @", "batch.nope @")
    done = run("lint", written(tmp_path, broken), "--cluster", "8xh100")
    assert done.code == 2
    assert "does not trace" in done.err
