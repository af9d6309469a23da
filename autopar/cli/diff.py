"""`autopar diff`: what changed from one plan to another, and what it costs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from autopar import api
from autopar.cli.console import IMPOSSIBLE, out, print_json, told
from autopar.report.comparison import comparison, comparison_data


@click.command("diff")
@click.argument("before", metavar="A.json", type=click.Path(path_type=Path))
@click.argument("after", metavar="B.json", type=click.Path(path_type=Path))
@click.option("--exit-code", "exits", is_flag=True, help="End with 1 where the plans differ.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@told
def diff_command(before: Path, after: Path, exits: bool, as_json: bool) -> None:
    """Compare two saved plans: what changed from A to B, and what it costs.

    Plans may be of different steps, clusters or releases of JAX: that is said, and what can be
    compared is.
    """
    found = api.compare(api.load(before), api.load(after))
    if as_json:
        print_json(comparison_data(found))
    else:
        alike = before.name == after.name
        names = (str(before), str(after)) if alike else (before.name, after.name)
        out().print(comparison(found, names))
    if exits and not found.is_equal:
        sys.exit(IMPOSSIBLE)
