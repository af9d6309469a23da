"""`autopar lint`: what of a step can be sharded and cut up, and what stands in the way."""

from __future__ import annotations

import sys

import click

from autopar import api
from autopar.cli.console import IMPOSSIBLE, err, out, print_json, told
from autopar.cli.loading import load_target
from autopar.ir.findings import Severity
from autopar.report.findings import findings, findings_data


@click.command("lint")
@click.argument("target", metavar="FILE.py:FUNCTION")
@click.option(
    "--cluster", required=True, help="A name such as 8xh100 or v5p:4x4x4, or a .toml file."
)
@click.option(
    "--microbatches",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Ask for so many; default: whether there are any.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@told
def lint_command(target: str, cluster: str, microbatches: int, as_json: bool) -> None:
    """Tell what of a step can be sharded for a cluster, before it is planned.

    Rules that are missing, dims that do not divide, ops that force gathers, whether microbatches
    are exact, and what is odd about the arguments. The file is as for `autopar plan`.

    Exit codes: 0 the step can be planned, 1 there is an error, 2 it cannot be read.
    """
    api.keep_to_cpu()
    chosen = api.Cluster.parse(cluster)
    with err().status("reading the file"):
        loaded = load_target(target)
    with err().status("tracing"):
        found = api.lint(
            loaded.step,
            *loaded.args,
            cluster=chosen,
            microbatches=microbatches,
            kwargs=loaded.kwargs,
        )
    if as_json:
        print_json(findings_data(found))
    else:
        out().print(findings(found))
    if found.of(Severity.ERROR):
        sys.exit(IMPOSSIBLE)
