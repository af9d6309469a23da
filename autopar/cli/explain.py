"""`autopar explain`: why a tensor or an op of a saved plan lies as it does."""

from __future__ import annotations

from pathlib import Path

import click

from autopar import api
from autopar.cli.console import err, out, print_json, told
from autopar.report.explanation import explanation, explanation_data


@click.command("explain")
@click.argument("path", metavar="PLAN.json", type=click.Path(path_type=Path))
@click.argument("words", metavar="PATH|OP", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@told
def explain_command(path: Path, words: tuple[str, ...], as_json: bool) -> None:
    """Tell why an argument or an op lies as it does, and what the next best would cost.

    \b
    params/layer0/mlp/up/kernel     an argument by its path, or the end of it
    'params/**/up/kernel'           the largest that matches
    dot_general layer0/mlp/up       an op by kind, module, line or region
    dot_general model.py:12
    """
    with err().status("solving around it"):
        found = api.explain(api.load(path), " ".join(words))
    if as_json:
        print_json(explanation_data(found))
        return
    out().print(explanation(found))
