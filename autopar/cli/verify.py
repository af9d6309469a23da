"""`autopar verify`: a plan beside the plain step, or beside what the hardware's compiler makes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from autopar import api, plans
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
from autopar.ir.plan import Plan
from autopar.ir.verification import Verification, verification_data
from autopar.report.verification import verification
from autopar.verifying.shrink import Called
from autopar.verifying.verify import Inquiry, level_named, verify_planned


@dataclass(frozen=True)
class Asked:
    """The options of the command: how far to verify, and on which devices."""

    level: str
    other: str | None
    steps: int
    shrink: int | None
    limit: int
    processes: int | None = None


def verify_plan(path: Path, target: str, asked: Asked, as_json: bool) -> None:
    """Print a saved plan beside the truth; exits with 1 where they differ."""
    with gather_warnings() as messages:
        try:
            found = _verify(path, target, asked)
        except AutoparError as error:  # something given cannot be used
            raise InputError(str(error)) from error
    print_warnings(messages)
    if as_json:
        print_json(verification_data(found))
    else:
        out().print(verification(found))
    if not found.agrees:
        sys.exit(IMPOSSIBLE)


def _verify(path: Path, target: str, asked: Asked) -> Verification:
    plan = plans.load(path)
    if asked.processes is not None:
        return _over_processes(path, plan, target, asked, asked.processes)
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


def _over_processes(path: Path, plan: Plan, target: str, asked: Asked, count: int) -> Verification:
    """The numbers of a plan over processes of this machine beside the plain step's here."""
    if asked.level != "numerics" or asked.shrink is not None or asked.other is not None:
        raise InputError(
            "--processes compares numbers of the whole plan: add --level numerics, and leave out "
            "--shrink and --target"
        )
    if plan.device_count % count:
        raise InputError(f"{count} processes cannot share {plan.device_count} devices evenly")
    api.open_cpu_devices(1)
    with err().status("reading the file"):
        loaded = load_target(target)
        args = loaded.with_state()
    step = api.under_plan(loaded.step, plan)
    words = (str(path.resolve()), target)
    inquiry = Inquiry(
        level_named(asked.level),
        steps=asked.steps,
        elsewhere=(
            api.over_processes(count, "autopar.cli.rank", "main", words),
            f"{count} processes of this machine, each with {plan.device_count // count} devices",
        ),
    )
    with err().status(f"running the planned step in {count} processes"):
        called = Called(step.spec, args, loaded.kwargs)
        return verify_planned(step.planned(*args, **loaded.kwargs), called, inquiry)
