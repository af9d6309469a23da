"""Random jobs: a model of the zoo under a plan over several processes, beside one process.

`python -m tests.processes.random_cases [--cases 1000] [--seed 0]` draws jobs of one to four
processes with one to four devices each, and for each some cases: a model, an optimizer, a recipe,
microbatches or stages with any schedule, and a transport. One process runs the plan first, then the
job does. Where each submesh is inside a process all bits of every step's metrics and of the state
are equal, elsewhere the numbers to rounding. A JSON line for each case; the exit code is 1 if one
differs, raises or hangs. A case that cannot be planned so is refused, and says why.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np

import autopar
from autopar.errors import AutoparError
from autopar.schedule.table import SCHEDULES
from tests.processes.jobs import ends, start
from tests.processes.scenarios import own_parts, zoo_case
from tests.zoo import Optimizer, cases
from tests.zoo.staged import staged_cases

CASES_OF_A_JOB, MOST_DEVICES = 5, 8
METHODS = ("auto", "dp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "sequence", "fsdp+tp")
TOLERANCE = 2e-5  # of each tensor's largest magnitude

Parts = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Case:
    """A model of the zoo, planned with these options; `transport` carries it between processes."""

    seed: int
    model: str
    optimizer: Optimizer
    options: dict[str, Any]
    transport: Literal["pull", "put"]


def drawn(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    model = rng.choice([*cases("sgd"), *staged_cases("sgd")])
    optimizer: Optimizer = rng.choice(["sgd", "adam"])
    kind = rng.choice(["one mesh", "one mesh", "microbatches", "stages", "stages", "stages"])
    options: dict[str, Any] = {}
    if kind == "one mesh":
        options["method"] = rng.choice([*METHODS, *(["expert"] if "moe" in model else [])])
    elif kind == "microbatches":
        options["microbatches"] = rng.choice([2, 4])
    else:
        options["stages"] = rng.choice([2, 2, 4])
        options["microbatches"] = rng.choice([2, 4, 8])
        trained = [s.name for s in SCHEDULES.values() if s.has_backward]
        options["schedule"] = rng.choice(trained)
    return Case(seed, model, optimizer, options, rng.choice(["pull", "put"]))


def job_shape(seed: int) -> tuple[int, int]:
    """The processes of a job, and the devices of each."""
    rng = random.Random(f"job {seed}")
    count = rng.choice([1, 2, 2, 3, 4])
    return count, rng.choice([d for d in (1, 2, 4) if 2 <= count * d <= MOST_DEVICES])


def differences(found: Parts, wanted: Parts, exact: bool) -> Iterator[str]:
    """The parts of arrays that differ, in a bit or by more than rounding."""
    largest = dict[str, float]()
    for place, (dtype, data) in wanted.items():
        numbers = np.frombuffer(bytes.fromhex(data), dtype)
        if numbers.size and np.issubdtype(numbers.dtype, np.floating):
            name = place.split(" ")[0]
            largest[name] = max(largest.get(name, 0.0), float(np.max(np.abs(numbers))))
    for place, (dtype, data) in found.items():
        if place not in wanted:
            yield f"{place} is on none of one process's devices"
        elif data != wanted[place][1]:
            sides = [np.frombuffer(bytes.fromhex(d), dtype) for d in (data, wanted[place][1])]
            if exact or not np.issubdtype(sides[0].dtype, np.floating):
                yield f"{place} differs"
                continue
            gap = float(np.max(np.abs(sides[0] - sides[1])))
            share = gap / max(largest[place.split(" ")[0]], 1e-30)
            if not share <= TOLERANCE:
                yield f"{place} is off by {share:.1e}"


def one_process(case: Case, cluster: str, path: Path) -> tuple[autopar.Plan, Parts]:
    """The case's plan, saved, and all parts of what one process makes under it.

    Raises what planning raises.
    """
    zoo = zoo_case(case.model, case.optimizer)
    state = jax.eval_shape(zoo.create_state, jax.random.key(0))
    plan = autopar.plan(zoo.step, state, zoo.batch(0), cluster=cluster, **case.options)
    plan.save(path)
    return plan, own_parts(case.model, case.optimizer, str(path), "pull")


def job(seed: int, asked: list[Case]) -> Iterator[dict[str, Any]]:
    """What became of the cases of a job."""
    count, devices = job_shape(seed)
    cluster = f"{count}x{devices}xcpu" if count > 1 else f"{devices}xcpu"
    alone: dict[int, tuple[Case, bool, Parts]] = {}
    with tempfile.TemporaryDirectory() as folder:
        texts: list[tuple[str, str, str, str]] = []
        for case in asked:
            row = {**asdict(case), "processes": count, "devices": devices}
            path = str(Path(folder) / f"{case.seed}.json")
            try:
                plan, wanted = one_process(case, cluster, Path(path))
            except AutoparError as error:
                yield {**row, "outcome": "refused", "why": str(error)[:200]}
                continue
            places = [s.devices or tuple(range(plan.device_count)) for s in plan.submeshes]
            exact = all(len({d // devices for d in s}) == 1 for s in places)
            alone[case.seed] = (case, exact, wanted)
            texts.append((case.model, case.optimizer, path, case.transport))
        if not alone:
            return
        outcome, why, found = "", "", []
        try:
            ended = ends(start(count, devices, "zoo_parts", folder, json.dumps(texts)))
            codes = [e.code for e in ended]
            if any(codes):
                outcome, why = f"exit codes {codes}", max(ended, key=lambda e: e.code).said[-1500:]
            else:
                found = [json.loads(Path(e.result).read_text()) for e in ended]
        except subprocess.TimeoutExpired:
            outcome = "hung"
        for k, (case, exact, wanted) in enumerate(alone.values()):
            row = {**asdict(case), "processes": count, "devices": devices}
            if outcome:
                yield {**row, "outcome": outcome, "why": why}
                continue
            mine = [cast("Parts", process[k]) for process in found]
            faults = [fault for parts in mine for fault in differences(parts, wanted, exact)]
            faults += sorted(wanted.keys() - {place for parts in mine for place in parts})
            yield {**row, "outcome": "differs" if faults else "equal", "why": faults[:5]}


def main() -> int:
    """Jobs until there are as many cases as asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", MOST_DEVICES)
    counts = Counter[str]()
    for first in range(asked.seed, asked.seed + asked.cases, CASES_OF_A_JOB):
        last = min(first + CASES_OF_A_JOB, asked.seed + asked.cases)
        for row in job(first, [drawn(seed) for seed in range(first, last)]):
            counts[row["outcome"]] += 1
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps(counts) + "\n")
    return 0 if set(counts) <= {"equal", "refused"} else 1


if __name__ == "__main__":
    sys.exit(main())
