"""Kills training jobs at random instants and starts them again; prints one JSON line a trial.

`python -m benchmarks.kills [--trials 100] [--seed 0]` runs `examples/train.py` with a checkpoint
after each step. In each trial a process chosen at random gets SIGKILL at a random instant, once or
several times, whatever it is doing then: importing, planning, compiling, in a step, in a save, or
in a recovery: after a point on its way that is drawn at random, and a moment. The job is started
again, in half of the trials in another shape: other processes, devices and stages. A trial holds if

* every job that is hit ends by itself, in all of its processes, once they have joined;
* what was saved is never lost again, and at most the step that ran is lost with it;
* the parameters at the end are those of a job that was never disturbed: in every bit where the
  shape, and so the plan, stayed the same; else to rounding.

Plans and compiled programs are kept on disk, in most trials from the jobs that nobody disturbed, as
a cluster would; a sixth of the trials start with none, and so plan and compile. Every process is
forked from one that has imported what the program imports, and has no JAX devices yet: half of its
time would go there, and a kill there leaves nothing behind. The last line counts what the killed
processes were doing. The exit code is 1 if a trial fails.
"""

from __future__ import annotations

import argparse
import atexit
import json
import multiprocessing
import os
import random
import re
import runpy
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

TRAIN = Path(__file__).parents[1] / "examples" / "train.py"
ENDS_WITHIN_SECONDS = 60.0  # after a kill, on a machine that does much else
START_SECONDS, MOMENT_SECONDS = 1.0, 0.4  # that joining takes; in which much is begun and done
COLD = 1 / 6  # of the trials
LIMIT_SECONDS = 600.0  # for a job that nobody kills
ROUNDING = 1e-3  # L2 distance of states over their length, after some steps of Adam


@dataclass(frozen=True)
class Shape:
    """A job: its processes, the devices of each, and the stages."""

    processes: int
    devices: int
    stages: int

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the training program."""
        staged = ("--stages", str(self.stages), "--microbatches", "2") if self.stages > 1 else ()
        return ("--virtual-devices", str(self.devices), *staged)


SHAPES = (Shape(1, 2, 1), Shape(1, 4, 2), Shape(2, 1, 1), Shape(2, 1, 2))

# What a job is doing, by the last of these that it has said.
DOING = (
    ("is saved in", "ending"),
    (r"^step +\d", "stepping"),
    ("compiling took", "in the first step"),
    ("compiling", "compiling"),
    ("planning took", "making or reading the state"),
    (r"traced \d", "planning"),
    ("planning", "tracing"),
    ("", "starting"),
)


def started_from() -> ForkServerContext:
    """What starts processes that have imported what the training program imports."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(
        ["flax.linen", "optax", "autopar.api", "autopar.step", "autopar.runtime.checkpoint"]
    )
    return found


def run(words: Sequence[str], log: Path, compiled: Path) -> None:
    """The training program in a process of its own."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    jax.config.update("jax_compilation_cache_dir", str(compiled))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_disable_most_optimizations", True)  # of programs, which are tiny
    sys.argv = [str(TRAIN), *words]
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    finally:  # JAX leaves its job in these, and multiprocessing leaves them out
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]


class Job:
    """The processes of one start of the training program, and what they say.

    `compiled` is the folder of plans and compiled programs, `words` are further options.
    """

    def __init__(
        self, shape: Shape, folder: Path, compiled: Path, steps: int, *words: str | Path
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._logs = [folder / f"process{n}.log" for n in range(shape.processes)]
        common = (
            *("--folder", str(folder / "checkpoints"), "--steps", str(steps)),
            *("--save-every", "1", "--tell-every", "1", "--tiny"),
            *(*shape.options, *map(str, words)),
        )
        self.processes: list[ForkServerProcess] = []
        for n, log in enumerate(self._logs):
            place = f"127.0.0.1:{port},{shape.processes},{n}"
            joins = ("--join", place) if shape.processes > 1 else ()
            log.write_text("")
            process = started_from().Process(target=run, args=((*common, *joins), log, compiled))
            process.start()
            self.processes.append(process)

    def kill(self, which: int) -> bool:
        """Kill a process; False where it has ended already."""
        process = self.processes[which % len(self.processes)]
        is_running = process.is_alive()
        process.kill()
        return is_running

    def ends(self, limit_seconds: float) -> list[int] | None:
        """The exit code of each process; None where one does not end within the limit."""
        end = time.monotonic() + limit_seconds
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return None if None in codes else [code for code in codes if code is not None]

    @property
    def said(self) -> str:
        """All that its processes have said."""
        return "".join(log.read_text(errors="replace") for log in self._logs)

    def says(self, pattern: str, limit_seconds: float) -> None:
        """Wait until it has said this, has ended, or the limit has passed."""
        end = time.monotonic() + limit_seconds
        while time.monotonic() < end and all(p.is_alive() for p in self.processes):
            if re.search(pattern, self.said, re.MULTILINE):
                return
            time.sleep(0.01)

    @property
    def doing(self) -> str:
        """What its first process is doing, as far as it has said."""
        said = self._logs[0].read_text(errors="replace")
        return next(name for mark, name in DOING if re.search(mark, said, re.MULTILINE))

    @property
    def first_step(self) -> int:
        """The step after which it went on."""
        found = re.search(r"going on after step (\d+)", self.said)
        return int(found[1]) if found else 0


def saved_steps(folder: Path) -> list[int]:
    """The steps whose checkpoints are committed."""
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        return sorted(manager.all_steps())


def parameters(folder: Path, step: int) -> list[np.ndarray[Any, Any]]:
    """The parameters of a checkpoint, read with Orbax alone."""
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        asked = ocp.args.Composite(state=ocp.args.StandardRestore())
        return [np.asarray(x) for x in jax.tree.leaves(manager.restore(step, args=asked)["state"])]


def distance(some: Sequence[Any], others: Sequence[Any]) -> float:
    """The L2 distance of two lists of arrays over the length of the second."""
    pairs = [
        (a.astype(np.float64), b.astype(np.float64)) for a, b in zip(some, others, strict=True)
    ]
    apart, whole = sum(((a - b) ** 2).sum() for a, b in pairs), sum((b**2).sum() for _, b in pairs)
    return float(np.sqrt(apart / whole))


Leaves = list[np.ndarray[Any, Any]]


def undisturbed(shape: Shape, folder: Path, compiled: Path, steps: int) -> Leaves:
    """The parameters at the end of a job that nobody kills; raises RuntimeError where it fails."""
    job = Job(shape, folder, compiled, steps)
    if job.ends(LIMIT_SECONDS) != [0] * shape.processes:
        raise RuntimeError(f"{shape} fails with nobody killing it:\n{job.said[-3000:]}")
    return parameters(folder, steps)


@dataclass(frozen=True)
class Kill:
    """A job, and when one of its processes is killed: some seconds after it has come so far.

    `after` is a pattern of what it says, or a number of steps that it has gone on for.
    """

    shape: Shape
    after: str | int
    seconds: float
    process: int


@dataclass(frozen=True)
class Trial:
    """Kills, one after another, and the job that then comes through.

    A cold one has no plans and no compiled programs at first.
    """

    kills: tuple[Kill, ...]
    last: Shape
    is_cold: bool = False

    @property
    def shapes(self) -> list[Shape]:
        """Those of its jobs, in turn."""
        return [*(kill.shape for kill in self.kills), self.last]


def drawn(rng: random.Random, steps: int, shapes: Sequence[Shape]) -> Trial:
    """A trial at random: in half of them the shape stays.

    In half of them, and before every second kill, some steps are saved first: what comes after is
    a recovery.
    """
    points = ["", "planning", r"traced \d", "planning took", "compiling", "compiling took"]
    count, stays = rng.choice((1, 1, 2, 3)), rng.random() < 0.5
    first, is_cold = rng.choice(shapes), rng.random() < COLD
    chosen = [first, *(first if stays else rng.choice(shapes) for _ in range(count))]
    kills: list[Kill] = []
    for number, shape in enumerate(chosen[:-1]):
        is_late = number == 0 and (count > 1 or rng.random() < 0.5)
        after = rng.choice(range(2, steps) if is_late else [*points, *range(1, steps)])
        longest = START_SECONDS if after == "" else MOMENT_SECONDS
        kills.append(Kill(shape, after, rng.uniform(0.0, longest), rng.randrange(shape.processes)))
    return Trial(tuple(kills), chosen[-1], is_cold)


def wait_for(kill: Kill, job: Job, done: int, steps: int) -> None:
    """Wait until a job that goes on after step `done` has come to where it is to be killed."""
    number = kill.after
    at = number if isinstance(number, str) else rf"^step +{min(done + number, steps - 1)} "
    if at:
        job.says(at, LIMIT_SECONDS)
    time.sleep(kill.seconds)


def run_trial(
    trial: Trial, folder: Path, compiled: Path, steps: int, alone: Mapping[Shape, Leaves]
) -> Any:
    """One job that is killed and started again until it comes through."""
    if trial.is_cold:
        compiled = folder / "compiled"
    faults: list[str] = []
    kills: list[dict[str, Any]] = []
    for kill in trial.kills:
        before = saved_steps(folder)
        job = Job(kill.shape, folder, compiled, steps)
        wait_for(kill, job, before[-1] if before else 0, steps)
        doing = job.doing
        if not job.kill(kill.process):
            break  # it came through before
        # Who has not joined yet waits for the others for minutes; there a launcher ends the rest.
        has_joined = doing != "starting"
        if job.ends(ENDS_WITHIN_SECONDS if has_joined else 1.0) is None and has_joined:
            faults.append(f"{kill.shape} does not end after the kill")
        torn = [p.name for p in (folder / "checkpoints").glob("*.orbax-checkpoint-tmp*")]
        there = saved_steps(folder)
        told = [int(n) for n in re.findall(r"^step +(\d+) ", job.said, re.MULTILINE)]
        kills.append(
            {
                "shape": str(kill.shape),
                "doing": f"{'saving' if torn else doing}{', in a recovery' if before else ''}",
                "saved": there[-1:],
                "steps_lost": max(0, told[-1] - (there[-1] if there else 0)) if told else 0,
            }
        )
        if before and (not there or there[-1] < before[-1]):
            faults.append(f"saved {before} before, {there} after")
        # Step n is told once its save has begun, before which that of step n - 1 is committed.
        if told and told[-1] - (there[-1] if there else 0) > 1:
            faults.append(f"step {told[-1]} was told, and {there} is saved")
    there = saved_steps(folder)
    begin = time.monotonic()
    job = Job(trial.last, folder, compiled, steps)
    if job.ends(LIMIT_SECONDS) != [0] * trial.last.processes:
        faults.append(f"the last start fails: {job.said[-1500:]}")
        return {"kills": kills, "faults": faults}
    if there and there[-1] < steps and job.first_step != there[-1]:
        faults.append(f"{there[-1]} was saved, and it went on after {job.first_step}")
    stays = len(set(trial.shapes)) == 1
    found, wanted = parameters(folder, steps), alone[trial.shapes[0]]
    is_same = all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))
    apart = distance(found, wanted)
    if not is_same if stays else apart > ROUNDING:
        faults.append(f"the parameters are {apart:.2g} from those of the undisturbed job")
    return {
        "stays": stays,
        "cold": trial.is_cold,
        "kills": kills,
        "last_shape": str(trial.last),
        "last_seconds": round(time.monotonic() - begin, 1),
        "bits_equal": is_same,
        "distance": apart,
        "faults": faults,
    }


def outcomes(trials: Iterable[Trial], steps: int, shapes: Sequence[Shape]) -> Iterator[Any]:
    """What came of each trial, after the undisturbed job of each shape."""
    with tempfile.TemporaryDirectory() as root:
        alone: dict[Shape, Leaves] = {}
        compiled = Path(root) / "compiled"
        for number, shape in enumerate(shapes):
            folder = Path(root) / f"alone{number}"
            folder.mkdir()
            alone[shape] = undisturbed(shape, folder, compiled, steps)
        for number, trial in enumerate(trials):
            folder = Path(root) / f"trial{number}"
            folder.mkdir()
            yield run_trial(trial, folder, compiled, steps, alone)
            shutil.rmtree(folder)


def main() -> None:
    """Run the trials and tell of each."""
    parser = argparse.ArgumentParser(description="Kill jobs, and start them again.")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    held, doing = 0, Counter[str]()
    steps, seeds = options.steps, range(options.seed, options.seed + options.trials)
    trials = (drawn(random.Random(seed), steps, SHAPES) for seed in seeds)
    for seed, found in zip(seeds, outcomes(trials, steps, SHAPES), strict=True):
        held += not found["faults"]
        doing.update(kill["doing"] for kill in found["kills"])
        print(json.dumps({"seed": seed, **found}), flush=True)
    print(json.dumps({"trials": options.trials, "held": held, "killed while": dict(doing)}))
    sys.exit(held != options.trials)


if __name__ == "__main__":
    main()
