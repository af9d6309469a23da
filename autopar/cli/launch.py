"""`autopar launch`: the file that starts a script on a plan's hosts, and its way to the engine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from autopar.cli.console import err, out
from autopar.cluster.planned import planned_cluster
from autopar.errors import InputError
from autopar.exporting.launchers.render import Engine, Launch, engine_named, render
from autopar.ir.plan_file import load_plan
from autopar.ir.text_file import write_text


@dataclass(frozen=True)
class Asked:
    """The options of the command, and the script's own arguments."""

    name: str
    python: str
    image: str
    places: str
    words: tuple[str, ...]


def launch_plan(
    path: Path, script: str, on: str, output: Path | None, submit: bool, asked: Asked
) -> None:
    """Write the file to stdout or to `output`, and hand it to the engine where that is asked."""
    engine = engine_named(on)
    command = (script, *asked.words)
    if on in ("slurm", "mpi"):
        command = (asked.python, *command)
    cluster = planned_cluster(load_plan(path))
    text = render(engine, Launch(asked.name, cluster, command, asked.places, asked.image))
    if submit and output is None:
        output = Path(f"{asked.name}{engine.suffix}")
    if output is None:
        sys.stdout.write(text)
        return
    write_text(text, output)
    out().print(f"wrote {output}", soft_wrap=True, markup=False)
    if submit:
        _submit(engine, output)


def _submit(engine: Engine, path: Path) -> None:
    """Hand a file to the engine's own client; exits as that does."""
    if shutil.which(engine.submit[0]) is None:
        raise InputError(
            f"{path} is written, and {engine.submit[0]} is not installed here: take it to where it "
            f"is, and run {' '.join(engine.submit)} {path}"
        )
    err().print(f"{' '.join(engine.submit)} {path}", style="bright_black", markup=False)
    done = subprocess.run([*engine.submit, str(path)], check=False)
    if done.returncode:
        sys.exit(done.returncode)
