"""The command: `python -m tests.fuzz --seeds 0:2000 --jobs 2 --out failures.jsonl`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from tests.fuzz.configs import config_from, draw_config
from tests.fuzz.program import draw_program
from tests.fuzz.shrink import shrunk_apart
from tests.fuzz.workers import Task, run_all
from tests.fuzz.writing import OPS

FAILURES = ("WRONG", "CRASH", "hang")


def main() -> int:
    """Run cases, show one, or shrink one; the exit status tells whether any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="from:to, or a list such as 3,17")
    parser.add_argument("--configs", type=int, default=1, help="configs for each program")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of work for one case")
    parser.add_argument("--seconds", type=float, help="start no case after so long")
    parser.add_argument(
        "--out", type=Path, help="a line for each case; a run goes on where it stopped"
    )
    parser.add_argument("--show", action="store_true", help="print the programs, run nothing")
    parser.add_argument("--shrink", action="store_true", help="print the smallest failing programs")
    parser.add_argument("--config", type=int, help="only the config of that number")
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    seeds = _seeds(given.seeds)
    numbers = range(given.configs) if given.config is None else (given.config,)
    if given.show:
        for seed in seeds:
            program = draw_program(seed)
            configs = [draw_config(seed, n, program.mixes) for n in numbers]
            sys.stdout.write(f"{program.text}\n# {configs}\n")
        return 0
    tasks = [Task(seed, number) for seed in seeds for number in numbers]
    if given.shrink:
        return _shrink(tasks, given.limit)
    return _run(tasks, given.jobs, given.limit, given.seconds, given.out)


def _seeds(text: str) -> list[int]:
    if ":" in text:
        first, stop = text.split(":")
        return list(range(int(first), int(stop)))
    return [int(part) for part in text.split(",")]


def _run(
    tasks: list[Task], jobs: int, limit: float, seconds: float | None, out: Path | None
) -> int:
    """Run the cases that the file has no row of, and print what all its rows come to."""
    began = time.monotonic()
    rows = _read_rows(out) if out and out.exists() else []
    known = {(row["seed"], row["number"]) for row in rows}
    file = out.open("a", encoding="utf-8") if out else None
    left = [task for task in tasks if (task.seed, task.number) not in known]
    for done in run_all(left, jobs, limit, seconds):
        outcome = done.outcome
        row = {
            "seed": done.task.seed, "number": done.task.number,
            "kind": outcome.kind + (" (noisy)" if outcome.error == "noisy" else ""),
            "error": outcome.error, "detail": outcome.detail, "seconds": outcome.seconds,
            "config": done.config, "way": config_from(done.config).name if done.config else "",
            "kinds": done.kinds, "primitives": outcome.primitives,
        }  # fmt: skip
        rows.append(row)
        if file:
            file.write(json.dumps(row) + "\n")
            file.flush()
        if len(rows) % 25 == 0:
            outcomes = dict(Counter(row["kind"] for row in rows))
            sys.stderr.write(f"{len(rows)} in {time.monotonic() - began:.0f} s: {outcomes}\n")
    summary = _summary(rows)
    sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    return 1 if summary["failures"] else 0


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of an earlier run; its last line may have been cut off as it was stopped."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    file.write_text("".join(whole), encoding="utf-8")
    return [json.loads(line) for line in whole]


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of outcomes, refusals and kinds of op over all cases, and the cases that failed."""
    outcomes = Counter(row["kind"] for row in rows)
    ways: dict[str, Counter[str]] = {}
    for row in rows:
        ways.setdefault(row["way"], Counter())[row["kind"].removesuffix(" (noisy)")] += 1
    kinds = Counter(kind for row in rows for kind in row["kinds"])
    met = {kind for kind in kinds if kind in OPS}
    return {
        "cases": len(rows),
        "outcomes": dict(outcomes.most_common()),
        "refusals": dict(Counter(r["error"] for r in rows if r["kind"] == "refused").most_common()),
        "ways": {way: dict(counts) for way, counts in sorted(ways.items())},
        "op_kinds": len(met),
        "op_kinds_not_met": sorted(set(OPS) - met),
        "frame_kinds": {k: n for k, n in sorted(kinds.items()) if k not in OPS},
        "primitive_names": sorted({name for row in rows for name in row["primitives"]}),
        "seconds_a_case": round(sum(r["seconds"] for r in rows) / max(1, len(rows)), 2),
        "failures": [
            {k: row[k] for k in ("seed", "number", "kind", "error", "way")}
            for row in rows
            if row["kind"] in FAILURES
        ],
    }


def _shrink(tasks: list[Task], limit: float) -> int:
    for task in tasks:
        program = draw_program(task.seed)
        config = draw_config(task.seed, task.number, program.mixes)
        failed = next(iter(run_all([task], 1, limit))).outcome
        if failed.kind not in (*FAILURES, "refused"):
            sys.stdout.write(f"seed {task.seed} is {failed.kind}\n")
            continue
        found = shrunk_apart(program, config, failed, limit)
        sys.stdout.write(
            f"# seed {task.seed}, config {task.number}: {found.outcome.signature}\n"
            f"# {found.config}\n# {found.outcome.detail!r}\n{found.program.text}\n"
        )
        sys.stdout.flush()
    return 1


if __name__ == "__main__":
    sys.exit(main())
