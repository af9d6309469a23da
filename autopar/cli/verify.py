"""`autopar verify`: a plan beside the plain step, or beside what the hardware's compiler makes."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autopar import api
from autopar.cli.console import (
    err,
    gather_warnings,
    out,
    print_json,
    print_warnings,
)
from autopar.cli.group import IMPOSSIBLE
from autopar.cli.loading import load_target
from autopar.errors import AutoparError, InputError
from autopar.ir.verification import Verification
from autopar.ir.verification_json import verification_data
from autopar.report.verification import verification


@dataclass(frozen=True)
class Asked:
    """The options of the command: how far to verify, and on which devices."""

    level: str
    other: str | None
    steps: int
    shrink: int | None
    limit: int


def verify_plan(path: Path, target: str, asked: Asked, as_json: bool) -> None:
    """Print a saved plan beside the truth; exits with 1 where they differ."""
    with _cannot_be_verified(), gather_warnings() as messages:
        found = _verify(path, target, asked)
    print_warnings(messages)
    if as_json:
        print_json(verification_data(found))
    else:
        out().print(verification(found))
    if not found.agrees:
        sys.exit(IMPOSSIBLE)


def _verify(path: Path, target: str, asked: Asked) -> Verification:
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
    """Turn errors of the block into InputErrors: something given cannot be used."""
    try:
        yield
    except AutoparError as error:
        raise InputError(str(error)) from error
