"""Random jobs: a model under a plan over several processes, beside one process.

`python -m tests.processes.random_cases [--draws 1000] [--seed 0]` draws for each seed a number of
devices, a model (mostly a random program of the fuzzer, with few blocks; else of the zoo), a
recipe, microbatches or stages with any schedule, a transport, and where the state begins. One
process runs the plan first. Then jobs do whose processes share the devices in all other ways that
there are, up to four processes: each is a case. Under stages that are within processes all bits of
every step's metrics and of the state are equal; elsewhere the numbers are, to the rounding that the
fuzzer finds in the program. A JSON line for each case; the exit code is 1 if one differs, breaks or
hangs. What cannot be planned so is refused, and says why.

The processes of a job stand ready for one case after the other. All compile as the other tests do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import jax

import autopar
from autopar.errors import AutoparError
from autopar.schedule.table import SCHEDULES
from tests.compiling import XLA_FLAGS
from tests.fuzz.case import LAST_BITS, noise_of, stepped
from tests.fuzz.program import draw_program
from tests.processes.jobs import BrokenJob, StandingJob, standing_job
from tests.processes.parts import ROUNDING, Parts, gaps, is_exact, magnitude
from tests.processes.scenarios import PROGRAM, model, own_parts
from tests.zoo import Case as ZooCase
from tests.zoo import Optimizer, cases
from tests.zoo.staged import staged_cases

MOST_DEVICES = 8
DRAWS_AT_ONCE = 200  # compiled programs pile up in a process
CASES_KEPT = 8  # in the caches of JAX, where they pile up: cases have much in common
METHODS = ("auto", "dp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "sequence", "fsdp+tp")
ZOO = 0.05  # of the draws, as they take long

# Ways for processes to share devices: their number, and the devices of each.
SHAPES = {2: [(2, 1)], 3: [(3, 1)], 4: [(2, 2), (4, 1)], 6: [(2, 3), (3, 2)], 8: [(2, 4), (4, 2)]}


@dataclass(frozen=True)
class Case:
    """A model, planned for so many devices with these options.

    The `transport` carries it between processes; the state begins where `start` says.
    """

    seed: int
    devices: int
    model: str
    optimizer: Optimizer
    options: dict[str, Any]
    transport: Literal["pull", "put"]
    start: Literal["init", "host"]

    def built(self) -> ZooCase:
        """The model itself."""
        return model(self.model, self.optimizer)


def drawn(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    devices = rng.choice([2, 3, 4, 4, 4, 6, 8])
    kind = rng.choice(["one mesh", "one mesh", "microbatches", "stages", "stages", "stages"])
    options: dict[str, Any] = {}
    if kind == "one mesh":
        options["method"] = rng.choice(METHODS)
    elif kind == "microbatches":
        options["microbatches"] = rng.choice([2, 4])
    else:
        options["stages"] = rng.choice([2, 2, 4 if devices % 4 == 0 else devices])
        options["microbatches"] = rng.choice([2, 4, 8])
        options["method"] = rng.choice(["auto", "dp"])
        trained = [s.name for s in SCHEDULES.values() if s.has_backward]
        options["schedule"] = rng.choice(trained)
    name = f"{PROGRAM}{_program(rng, kind != 'one mesh')}"
    if rng.random() < ZOO:
        name = rng.choice([*cases("sgd"), *staged_cases("sgd")])
    return Case(
        seed, devices, name, rng.choice(["sgd", "adam"]), options, rng.choice(["pull", "put"]),
        rng.choice(["init", "host"]),
    )  # fmt: skip


def _program(rng: random.Random, is_cut: bool) -> int:
    """The seed of a program; of one whose rows do not meet where the batch is cut up."""
    while True:
        seed = rng.randrange(2**31)
        if not (is_cut and draw_program(seed).mixes):
            return seed


def noise(case: Case) -> dict[str, float]:
    """By path how far the plain step's results move when its inputs do in their last bits."""
    made = case.built()
    state, batches = made.create_state(jax.random.key(0)), [made.batch(n) for n in range(2)]
    step = jax.jit(made.step)
    plain = stepped(step, state, batches)
    found = dict[str, float]()
    for number, moved in enumerate(noise_of(step, plain, state, batches, [LAST_BITS] * 4)):
        for path, gap in moved.items():
            size = max(magnitude(plain[number][path]), 1e-6)
            is_state = path.startswith("[0]")  # of which only the last is compared
            found[path[3:] if is_state else f"{path[3:]} {number}"] = gap / size
    return found


def faults(case: Case, exact: bool, mine: Sequence[Parts], wanted: Parts) -> list[str]:
    """What the processes of a job have otherwise than one process, or do not have."""
    off = {path: gap for path, gap in gaps(mine, wanted, exact).items() if not gap <= ROUNDING}
    if off and not exact:
        known = noise(case)
        off = {path: gap for path, gap in off.items() if not gap <= 6 * known.get(path, 0.0)}
    return [f"{path} is off by {gap:.1e}" for path, gap in sorted(off.items())]


class Jobs:
    """The jobs of each shape, started when they are first needed, and again after one breaks."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._jobs: dict[tuple[int, int], StandingJob] = {}
        self._counts = Counter[tuple[int, int]]()

    def parts(self, shape: tuple[int, int], folder: str, words: Sequence[str]) -> list[Parts]:
        """What the processes of a job have after a case; raises BrokenJob."""
        if shape not in self._jobs:
            self._jobs[shape] = self._stack.enter_context(standing_job(*shape))
        self._counts[shape] += 1
        then = "keep" if self._counts[shape] % CASES_KEPT else "forget"
        try:
            files = self._jobs[shape].results("parts", folder, json.dumps(words), then)
        except BrokenJob:
            del self._jobs[shape]
            raise
        return [json.loads(Path(file).read_text()) for file in files]


@contextmanager
def standing_jobs() -> Generator[Jobs]:
    """Jobs of all shapes, which end together."""
    with ExitStack() as stack:
        yield Jobs(stack)


def outcomes(
    case: Case, jobs: Jobs, shapes: Sequence[tuple[int, int]] | None = None
) -> Iterator[dict[str, Any]]:
    """What became of a case in each shape of a job, or in some shapes."""
    row: dict[str, Any] = asdict(case)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/plan.json"
        words = (case.model, case.optimizer, path, case.transport, case.start)
        try:
            plan = planned(case)
            plan.save(path)
            wanted = own_parts(*words)
        except AutoparError as error:
            yield {**row, "outcome": "refused", "why": str(error)[:200]}
            return
        for count, devices in shapes or SHAPES[case.devices]:
            row |= {"processes": count, "of devices": devices}
            exact = is_exact(plan, devices)
            try:
                found = faults(case, exact, jobs.parts((count, devices), folder, words), wanted)
            except BrokenJob as error:
                outcome = "hangs" if error.is_hung else "breaks"
                yield {**row, "outcome": outcome, "why": str(error)}
                continue
            equal = "equal in every bit" if exact else "equal"
            yield {**row, "outcome": "differs" if found else equal, "why": found[:5]}


def planned(case: Case) -> autopar.Plan:
    """The plan of a case; raises what planning raises."""
    made = case.built()
    state = jax.eval_shape(made.create_state, jax.random.key(0))
    count, devices = SHAPES[case.devices][0]
    cluster = f"{count}x{devices}xcpu"
    return autopar.plan(made.step, state, made.batch(0), cluster=cluster, **case.options)


def main() -> int:
    """Draws in turn, those of as many devices side by side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    os.environ["XLA_FLAGS"] = XLA_FLAGS  # read when the first device is asked for, and by all jobs
    jax.config.update("jax_num_cpu_devices", MOST_DEVICES)
    counts = Counter[str]()
    # 1. Some draws at a time, of which those for as many devices have the same jobs.
    for first in range(asked.seed, asked.seed + asked.draws, DRAWS_AT_ONCE):
        last = min(first + DRAWS_AT_ONCE, asked.seed + asked.draws)
        draws = sorted(map(drawn, range(first, last)), key=lambda c: (c.devices, c.seed))
        for _, own in groupby(draws, key=lambda c: c.devices):
            # 2. Each in all shapes of a job.
            with standing_jobs() as jobs:
                for case in own:
                    for row in outcomes(case, jobs):
                        counts[row["outcome"]] += 1
                        sys.stdout.write(json.dumps(row) + "\n")
                        sys.stdout.flush()
            jax.clear_caches()
    sys.stdout.write(json.dumps(counts) + "\n")
    return 0 if not counts.keys() & {"differs", "breaks", "hangs"} else 1


if __name__ == "__main__":
    sys.exit(main())
