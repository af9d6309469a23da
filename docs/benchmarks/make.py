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
    yield "| model | cluster | autopar | best by hand | next by hand | predicted of compiled | "
    yield "autopar of best |\n|---|---|---|---|---|---|---|\n"
    for path in sorted(HERE.glob("plan_quality-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for model in dict.fromkeys(line["model"] for line in lines):
            own = [line for line in lines if line["model"] == model]
            yield from (_row(line, own) for line in own if line["plan"].startswith("auto"))
    yield f"\nMeasured {facts['date']} with {facts['by']}.\n"


def _row(ours: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """One plan of ours; of a model with `jax.checkpoint` around its layers, "remat"."""
    by_hand = sorted(
        (line for line in lines if line["plan"].startswith("hand ") and line.get("fits")),
        key=lambda line: line["compiled"]["ms"],
    )
    best = by_hand[0]["compiled"]["ms"]
    share = f"{ours['compiled']['ms'] / best:.3f}" if ours.get("fits") else ""
    shown = [_shown(line) for line in (ours, *by_hand[:2])]
    shown += [""] * (3 - len(shown))
    model = f"{ours['model']}{ours['plan'].removeprefix('auto')}"
    return f"| {model} | {ours['target']} | {' | '.join(shown)} | {_errors(ours)} | {share} |\n"


def _errors(ours: dict[str, Any]) -> str:
    """Predicted over compiled: time, and memory."""
    if "compiled" not in ours:
        return ""
    predicted, compiled = ours["predicted"], ours["compiled"]
    return ", ".join(f"{predicted[name] / compiled[name]:.2f}" for name in ("ms", "peak_gib"))


def _shown(line: dict[str, Any]) -> str:
    name = "" if line["plan"].startswith("auto") else line["plan"].removeprefix("hand ")
    if "compiled" not in line:
        return f"no plan: {line['failed']}"
    figures = f"{line['compiled']['ms']:.1f} ms, {line['compiled']['peak_gib']:.1f} GiB"
    figures += "" if line["fits"] else " (too large)"
    return f"{name}: {figures}" if name else figures


if __name__ == "__main__":
    README.write_text(readme(), encoding="utf-8")
