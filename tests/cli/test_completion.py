"""`autopar completion`: the scripts, and what a shell that runs them is answered."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from autopar.cli.main import main
from tests.cli.running import run

AUTOPAR = Path(sys.executable).with_name("autopar")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(shell: str) -> None:
    script = run("completion", shell).out
    assert f"_AUTOPAR_COMPLETE={shell}_complete" in script
    assert "_autopar_completion" in script


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sho", ["show"]),
        ("show --pa", ["--params"]),
        ("show pl", ["file"]),
        ("verify plan.json tr", ["file"]),
        ("completion z", ["zsh"]),
        ("plan x.py --method fs", ["fsdp", "fsdp+tp"]),
        ("plan x.py --schedule zb-h", ["zb-h1", "zb-h2"]),
        ("plan x.py --cluster v5e", ["v5e:4x4"]),
        ("schedule 1f", ["1f1b"]),
        ("schedule nothing", []),
        ("clusters 72", ["72xgb200"]),
        ("clusters ours", ["file"]),
    ],
)
def test_commands_options_choices_names_and_files_are_offered(
    line: str, offered: list[str]
) -> None:
    *words, begun = line.split()
    found = BashComplete(main, {}, "autopar", "").get_completions(words, begun)
    assert [i.value if i.type == "plain" else i.type for i in found] == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_answered(shell: str) -> None:
    env = {
        **os.environ,
        "_AUTOPAR_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "autopar show --pa",
        "COMP_CWORD": "2" if shell == "zsh" else "--pa",
    }
    done = subprocess.run([AUTOPAR], env=env, capture_output=True, text=True, check=True)
    assert "--params" in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_itself_is_answered(tmp_path: Path) -> None:
    script = f"""
        {run("completion", "bash").out}
        compopt() {{ COMPREPLY=(files); }}  # the real one works only while a key is pressed
        ask() {{
            COMP_WORDS=($1); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
            _autopar_completion {AUTOPAR}; echo "${{COMPREPLY[*]}}"
        }}
        ask 'autopar plan x.py --method fs'
        ask 'autopar show pl'
    """
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["fsdp fsdp+tp", "files"]
