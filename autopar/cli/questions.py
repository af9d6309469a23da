"""`autopar explain` and `diff`: questions to a saved plan and to two."""

from __future__ import annotations

import sys
from pathlib import Path

from autopar import plans, reasons
from autopar.cli.console import err, out, print_json
from autopar.cli.group import IMPOSSIBLE
from autopar.report.comparison import comparison, comparison_data
from autopar.report.explanation import explanation, explanation_data


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
