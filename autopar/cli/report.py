"""`autopar report`: a saved plan as one HTML page that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

from autopar import api
from autopar.cli.console import err, out, told
from autopar.errors import InputError
from autopar.ir.json_reader import Item, Json, JsonError, parse_json
from autopar.ir.text_file import PAGE, check_output, read_text
from autopar.ir.verification_json import check_verification

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
    check_output(target, PAGE)
    plan = api.load(path)
    with err().status("drawing the plan"):
        api.write_report(
            plan,
            target,
            against={other.name: api.load(other) for other in others},
            trace=trace,
            verification=_verified(verification) if verification is not None else None,
        )
    out().print(f"wrote {target}", soft_wrap=True, markup=False)


def _verified(path: Path) -> dict[str, Json]:
    """A verification's JSON; raises InputError where it is none."""
    text = read_text(path, "a verification")
    try:
        data = parse_json(text)
        check_verification(Item(data))
    except JsonError as error:
        raise InputError(
            f"{path} is no verification: {error}. Give what `autopar verify --json` prints."
        ) from None
    return cast("dict[str, Json]", data)
