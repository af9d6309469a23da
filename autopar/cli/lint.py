"""`autopar lint` and `why-not`: what a step can be, and what a plan would be with other pins."""

from __future__ import annotations

import sys
from pathlib import Path

from autopar import api, plans
from autopar.cli.console import err, out, print_json
from autopar.cli.group import IMPOSSIBLE
from autopar.cli.loading import load_target, tracing
from autopar.cli.pins import read_pins
from autopar.ir.findings import Severity
from autopar.report.explanation import counterfactual, counterfactual_data
from autopar.report.findings import findings, findings_data


def lint_step(target: str, cluster: str, microbatches: int, as_json: bool) -> None:
    """Print what of a step can be sharded; exits with 1 where there is an error."""
    api.keep_to_cpu()
    chosen = api.Cluster.parse(cluster)
    with err().status("reading the file"):
        loaded = load_target(target)
    with err().status("tracing"), tracing(loaded):
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


def try_pins(path: Path, pins: tuple[str, ...], as_json: bool) -> None:
    """Print what pins would change in a saved plan; exits with 1 where there is no such plan."""
    with err().status("solving with the pins"):
        found = api.why_not(plans.load(path), read_pins(pins))
    if as_json:
        print_json(counterfactual_data(found))
    else:
        out().print(counterfactual(found))
    if found.pinned is None:
        sys.exit(IMPOSSIBLE)
