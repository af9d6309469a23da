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
from tests.fuzz.workers import Done, Task, run_all
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
    parser.add_argument("--out", type=Path, help="where failures and refusals go, a line each")
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
    began = time.monotonic()
    outcomes: Counter[str] = Counter()
    ways: dict[str, Counter[str]] = {}
    kinds: Counter[str] = Counter()
    primitives: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    file = out.open("a", encoding="utf-8") if out else None
    spent = 0.0
    for done in run_all(tasks, jobs, limit, seconds):
        outcome = done.outcome
        noted = outcome.kind + (" (noisy)" if outcome.error == "noisy" else "")
        outcomes[noted] += 1
        ways.setdefault(_way(done), Counter())[outcome.kind] += 1
        kinds.update(done.kinds)
        primitives.update(outcome.primitives)
        spent += outcome.seconds
        row = {
            "seed": done.task.seed, "number": done.task.number, "kind": noted,
            "error": outcome.error, "detail": outcome.detail, "seconds": outcome.seconds,
            "config": done.config, "way": _way(done),
        }  # fmt: skip
        if outcome.kind == "refused":
            refusals[outcome.error] += 1
        if outcome.kind in FAILURES:
            failures.append({k: row[k] for k in ("seed", "number", "kind", "error", "way")})
        if file and noted != "equal":
            file.write(json.dumps(row) + "\n")
            file.flush()
        if sum(outcomes.values()) % 25 == 0:
            now = time.monotonic() - began
            sys.stderr.write(f"{sum(outcomes.values())} in {now:.0f} s: {dict(outcomes)}\n")
    ops = {k for k in kinds if k in OPS}
    summary = {
        "cases": sum(outcomes.values()),
        "outcomes": dict(outcomes.most_common()),
        "refusals": dict(refusals.most_common()),
        "ways": {name: dict(count) for name, count in sorted(ways.items())},
        "op_kinds": len(ops),
        "op_kinds_not_met": sorted(set(OPS) - ops),
        "frame_kinds": {k: n for k, n in sorted(kinds.items()) if k not in OPS},
        "primitives": len(primitives),
        "primitive_names": sorted(primitives),
        "seconds": round(time.monotonic() - began),
        "seconds_a_case": round(spent / max(1, sum(outcomes.values())), 2),
        "failures": failures,
    }
    sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    return 1 if failures else 0


def _way(done: Done) -> str:
    return config_from(done.config).name if done.config else "unknown"


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
