"""`autopar why-not`: what pins would change in a saved plan."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from autopar import api
from autopar.cli.console import IMPOSSIBLE, err, out, print_json, told
from autopar.cli.pins import read_pins
from autopar.report.explanation import counterfactual, counterfactual_data


@click.command("why-not")
@click.argument("path", metavar="PLAN.json", type=click.Path(path_type=Path))
@click.argument("pins", metavar="PATTERN=P(...)", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@told
def why_not_command(path: Path, pins: tuple[str, ...], as_json: bool) -> None:
    """Solve a saved plan again with pins, and tell the difference or why there is no such plan.

    A pin is 'params/**/kernel=P(None,"model")'. Mesh, stages and what is recomputed are held.
    """
    with err().status("solving with the pins"):
        found = api.why_not(api.load(path), read_pins(pins))
    if as_json:
        print_json(counterfactual_data(found))
    else:
        out().print(counterfactual(found))
    if found.pinned is None:
        sys.exit(IMPOSSIBLE)
