"""`autopar report`: a saved plan as one HTML page that needs no network."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import click

from autopar import api
from autopar.cli.console import check_folder, err, out, told
from autopar.errors import InputError
from autopar.ir.json_reader import Json

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("report")
@click.argument("path", metavar="PLAN.json", type=_FILE)
@click.option("-o", "--output", type=_FILE, help="The page. Default: PLAN.html beside the plan.")
@click.option(
    "--against",
    "others",
    multiple=True,
    metavar="OTHER.json",
    type=_FILE,
    help="Another plan to compare with; may be repeated.",
)
@click.option("--trace", type=_FILE, help="A step that ran, as step.trace(PATH) wrote it.")
@click.option(
    "--verification",
    metavar="VERIFIED.json",
    type=_FILE,
    help="What `autopar verify --json` printed, to stand beside what was predicted.",
)
@told
def report_command(
    path: Path,
    output: Path | None,
    others: tuple[Path, ...],
    trace: Path | None,
    verification: Path | None,
) -> None:
    """Write a saved plan as one HTML page: open it in a browser, send it, print it.

    It loads nothing from anywhere, and the same plan gives the same bytes.
    """
    target = output if output is not None else path.with_suffix(".html")
    check_folder(target)
    plan = api.load(path)
    with err().status("drawing the plan"), _told(target):
        api.write_report(
            plan,
            target,
            against={other.name: api.load(other) for other in others},
            trace=trace,
            verification=_verified(verification) if verification is not None else None,
        )
    out().print(f"wrote {target}", soft_wrap=True)


def _verified(path: Path) -> dict[str, Json]:
    """A verification's JSON; raises InputError where it is none."""
    try:
        data: Json = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(data, dict) or not {"agrees", "level", "parts", "notes"} <= set(data):
        raise InputError(f"{path} is no verification: give what `autopar verify --json` prints")
    return data


@contextmanager
def _told(target: Path) -> Generator[None]:
    """Tells where the page cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {str(target)!r}: {error.strerror or error}") from error
