"""The command line as a whole."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.cli.running import STEP, run, written


def test_help_names_every_command_and_exit_code() -> None:
    done = run("--help")
    assert done.code == 0
    for word in (
        "plan",
        "show",
        "clusters",
        "schedule",
        "profile",
        "partition",
        "demo",
        "Exit codes: 0",
    ):
        assert word in done.out


def test_ctrl_c_ends_a_command_with_130_and_one_line(tmp_path: Path) -> None:
    file = written(tmp_path, f"{STEP}\ndef example_args():\n    raise KeyboardInterrupt\n")
    done = run("plan", file, "--cluster", "8xcpu", "-o", tmp_path / "plan.json")
    assert (done.code, done.err, done.out) == (130, "interrupted\n", "")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["mytrain.py"]


def test_the_version() -> None:
    assert run("--version").out == f"autopar, version {version('autopar')}\n"


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "autopar", "clusters", "8xcpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cluster 8xcpu\n")
    assert "\x1b" not in done.stdout  # a pipe gets no colors
