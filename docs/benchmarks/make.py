"""Writes the README's table of planned against hand-written shardings from stored measurements.

`python -m benchmarks.plan_quality --plans auto,hand` prints the lines of
`plan_quality-CLUSTER.jsonl` beside this file; the date is in `measured.toml`.
`python -m docs.benchmarks.make` writes the table into README.md, and a test compares the two.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
_BEGIN, _END = "<!-- plan_quality: python -m docs.benchmarks.make -->\n", "<!-- end -->\n"


def readme() -> str:
    """The README with the table of the stored measurements."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{''.join(table())}{_END}{after}"


def table() -> Iterator[str]:
    """A row for each model and cluster: the plan beside the best hand-written ones."""
    facts = tomllib.loads((HERE / "measured.toml").read_text(encoding="utf-8"))["plan_quality"]
    yield "| model | cluster | autopar | best by hand | next by hand | autopar of best |\n"
    yield "|---|---|---|---|---|---|\n"
    for path in sorted(HERE.glob("plan_quality-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for model in dict.fromkeys(line["model"] for line in lines):
            yield _row([line for line in lines if line["model"] == model and line.get("fits")])
    yield f"\nMeasured {facts['date']} with {facts['by']}.\n"


def _row(lines: list[dict[str, Any]]) -> str:
    (ours,) = (line for line in lines if line["plan"] == "auto")
    by_hand = sorted(
        (line for line in lines if line["plan"].startswith("hand ")),
        key=lambda line: line["compiled"]["ms"],
    )
    share = ours["compiled"]["ms"] / by_hand[0]["compiled"]["ms"]
    shown = [_shown(line) for line in (ours, *by_hand[:2])]
    shown += [""] * (3 - len(shown))
    return f"| {ours['model']} | {ours['target']} | {' | '.join(shown)} | {share:.3f} |\n"


def _shown(line: dict[str, Any]) -> str:
    name = line["plan"].removeprefix("hand ") if line["plan"] != "auto" else ""
    figures = f"{line['compiled']['ms']:.1f} ms, {line['compiled']['peak_gib']:.1f} GiB"
    return f"{name}: {figures}" if name else figures


if __name__ == "__main__":
    README.write_text(readme(), encoding="utf-8")
