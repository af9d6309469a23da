"""`autopar explain`, `diff`, `why-not` and `lint`: questions to a plan, to two, and to a step."""

from __future__ import annotations

import sys
from pathlib import Path

from autopar import api, plans, reasons
from autopar.cli.console import err, out, print_json
from autopar.cli.group import IMPOSSIBLE
from autopar.cli.loading import load_target
from autopar.cli.pins import read_pins
from autopar.ir.findings import Severity
from autopar.report.comparison import comparison, comparison_data
from autopar.report.explanation import (
    counterfactual,
    counterfactual_data,
    explanation,
    explanation_data,
)
from autopar.report.findings import findings, findings_data


def explain_plan(path: Path, words: tuple[str, ...], as_json: bool) -> None:
    """Print why an argument or an op of a saved plan is sharded as it is."""
    with err().status("solving around it"):
        found = reasons.explain(plans.load(path), " ".join(words))
    if as_json:
        print_json(explanation_data(found))
        return
    out().print(explanation(found))


def compare_plans(before: Path, after: Path, exits: bool, as_json: bool) -> None:
    """Print what changed from one plan to another; with `exits`, end with 1 where they differ."""
    found = plans.compare(plans.load(before), plans.load(after))
    if as_json:
        print_json(comparison_data(found))
    else:
        alike = before.name == after.name
        names = (str(before), str(after)) if alike else (before.name, after.name)
        out().print(comparison(found, names))
    if exits and not found.is_equal:
        sys.exit(IMPOSSIBLE)


def lint_step(target: str, cluster: str, microbatches: int, as_json: bool) -> None:
    """Print what of a step can be sharded; exits with 1 where there is an error."""
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
