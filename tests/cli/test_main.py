"""The command line as a whole."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from autopar.cli import main as declared
from tests.cli.running import STEP, run, written

ROOT = Path(__file__).parents[2]


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


def test_help_has_every_command_once_by_task_and_cuts_no_sentence() -> None:
    listed = [name for names in declared.TASKS.values() for name in names]
    assert sorted(listed) == sorted(declared.main.commands)
    told = " ".join(run("--help").out.split()).partition("Options:")[2]
    assert "..." not in told
    for task, names in declared.TASKS.items():
        assert f"{task}:" in told
        for name in names:
            sentence = (declared.main.commands[name].help or "").split(". ")[0].split("\n\n")[0]
            assert " ".join(sentence.split()).rstrip(".") in told


def test_ctrl_c_ends_a_command_with_130_and_one_line(tmp_path: Path) -> None:
    file = written(tmp_path, f"{STEP}\ndef example_args():\n    raise KeyboardInterrupt\n")
    done = run("plan", file, "--cluster", "8xcpu", "-o", tmp_path / "plan.json")
    assert (done.code, done.err, done.out) == (130, "interrupted\n", "")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["mytrain.py"]


_INTERRUPTED = """
import os, signal, threading
from examples.gpt import example_args, train_step as plain

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the parent does with it
interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))


def train_step(state, batch):
    if interrupt.ident is None:  # the step is traced more than once
        interrupt.start()
    return plain(state, batch)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a process sends itself no SIGINT there")
def test_ctrl_c_while_it_plans_leaves_nothing_behind(tmp_path: Path) -> None:
    written(tmp_path, _INTERRUPTED)
    words = ["plan", "mytrain.py", "--cluster", "8xh100", "--stages", "auto", "-o", "plan.json"]
    done = subprocess.run(
        [sys.executable, "-m", "autopar", *words], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["mytrain.py"]


def test_the_version() -> None:
    assert run("--version").out == f"autopar, version {version('autopar')}\n"


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "autopar", "clusters", "8xcpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cluster 8xcpu\n")
    assert "\x1b" not in done.stdout  # a pipe gets no colors
