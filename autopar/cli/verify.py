"""`autopar verify`: a plan beside the plain step, or beside what the hardware's compiler makes."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from autopar import api
from autopar.cli.completion import files
from autopar.cli.console import (
    IMPOSSIBLE,
    err,
    gathered_warnings,
    out,
    print_json,
    print_warnings,
    told,
)
from autopar.cli.loading import load_target
from autopar.errors import AutoparError, InputError
from autopar.ir.compiled import Level
from autopar.ir.verification import Verification
from autopar.ir.verification_json import verification_data
from autopar.report.verification import verification

_LEVELS = tuple(level.value for level in Level)


@dataclass(frozen=True)
class Asked:
    """What to look for and where, as the options say it."""

    level: str
    other: str | None
    steps: int
    shrink: int | None
    limit: int


@click.command("verify")
@click.argument("path", metavar="PLAN.json", type=click.Path(path_type=Path))
@click.argument("target", metavar="FILE.py:FUNCTION", shell_complete=files)
@click.option(
    "--level",
    type=click.Choice(_LEVELS),
    default="memory",
    show_default=True,
    help="How far to go; each takes longer than the one before.",
)
@click.option(
    "--target",
    "other",
    metavar="CLUSTER",
    help="Compile for these devices instead of the plan's own, as many of them.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="numerics: so many steps.",
)
@click.option(
    "--shrink",
    type=click.IntRange(min=1),
    metavar="N",
    help="numerics: on at most N devices, mesh axes and batch rows cut down alike.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="How long a compiler may take for one program.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@told
def verify_command(path: Path, target: str, as_json: bool, **options: object) -> None:
    """Compare a saved plan with the truth; no device of its cluster is needed.

    \b
    numerics     the planned step and the plain one, on virtual CPU devices
    collectives  what the cluster's own compiler sends, by kind and mesh axes
    memory       also what a device holds, and a GPU compiler's timeline
    full         also the cycles of a TPU's kernels

    The file is as for `autopar plan`. A create_state(key) beside the step makes the state that
    numbers start from; else it is drawn like the batches.

    Exit codes: 0 the plan agrees, 1 it differs, 2 it cannot be verified.
    """
    asked = Asked(**options)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with _cannot_be_verified(), gathered_warnings() as messages:
        found = _verified(path, target, asked)
    print_warnings(messages)
    if as_json:
        print_json(verification_data(found))
    else:
        out().print(verification(found))
    if not found.agrees:
        sys.exit(IMPOSSIBLE)


def _verified(path: Path, target: str, asked: Asked) -> Verification:
    plan = api.load(path)
    api.open_cpu_devices(min(plan.device_count, asked.shrink or plan.device_count))
    with err().status("reading the file"):
        loaded = load_target(target)
        args = loaded.with_state() if asked.level == "numerics" else loaded.args
    doing = "running both steps" if asked.level == "numerics" else "compiling"
    with err().status(doing):
        return api.verify(
            plan,
            loaded.step,
            *args,
            level=asked.level,
            target=asked.other,
            steps=asked.steps,
            devices=asked.shrink,
            limit_seconds=asked.limit,
            **loaded.kwargs,
        )


@contextmanager
def _cannot_be_verified() -> Generator[None]:
    """What keeps a plan from being verified is something given that cannot be used."""
    try:
        yield
    except AutoparError as error:
        raise InputError(str(error)) from error
