"""The command line starts at once: help, the version and completion import nothing that plans."""

import os
import subprocess
import sys

import click
import pytest

from autopar.calibrating.ladder import FULL, QUICK
from autopar.cli import main as declared
from autopar.ir.compiled import CheckLevel
from autopar.passes.stage.pipedream import SYNCS
from autopar.schedule.table import SCHEDULES
from tests.cli.test_main import ROOT

PLAN = str(ROOT / "tests/golden/golden/test_plans/test_gpt-megatron.plan.json")
_HEAVY = ("jax", "numpy", "highspy", "numba", "pulp", "rich", "jinja2")
_SCRIPT = """
import sys
sys.argv[0] = "autopar"
from autopar.cli.main import main
try:
    main()
finally:
    print("imported:", *(name for name in {heavy} if name in sys.modules), file=sys.stderr)
"""


def _imported(*words: str, **env: str) -> tuple[str, str]:
    """What a command line printed, and the heavy packages that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(heavy=_HEAVY), *words],
        env={**os.environ, **env}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout, done.stderr.strip()


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("plan", "--help"), ("demo", "-h")])
def test_help_and_the_version_import_nothing_that_plans(words: tuple[str, ...]) -> None:
    assert _imported(*words)[1] == "imported:"


@pytest.mark.parametrize("words", [("show", PLAN), ("diff", PLAN, PLAN), ("clusters", "8xh100")])
def test_what_is_read_from_a_plan_waits_for_no_jax(words: tuple[str, ...]) -> None:
    assert "jax" not in _imported(*words)[1].split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("autopar sho", "show"),
        ("autopar plan x.py --sched", "--schedule"),
        ("autopar plan x.py --schedule zb-v", "zb-v"),
        ("autopar verify p.json x.py --level num", "numerics"),
    ],
)
def test_completion_imports_nothing_that_plans(line: str, offered: str) -> None:
    number = str(len(line.split()) - 1)
    env = {"_AUTOPAR_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": number}
    printed, imported = _imported(**env)
    assert (printed, imported) == (f"plain,{offered}\n", "imported:")


def test_the_choices_of_options_are_what_there_is() -> None:
    assert tuple(SCHEDULES) == declared.SCHEDULES
    assert SYNCS == declared.SYNCS
    assert tuple(level.value for level in CheckLevel) == declared.LEVELS
    seconds = next(p for p in declared.calibrate.params if p.name == "seconds")
    assert isinstance(seconds, click.Option)
    assert seconds.help is not None
    assert f"Default: {FULL.seconds:.0f}, quick {QUICK.seconds:.0f}." in seconds.help
