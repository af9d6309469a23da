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
a cluster would; a quarter of the trials start with none, and so plan and compile. The last line
counts what the killed processes were doing. The exit code is 1 if a trial fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

TRAIN = Path(__file__).parents[1] / "examples" / "train.py"
ENDS_WITHIN_SECONDS = 60.0  # after a kill, on a machine that does much else
START_SECONDS, MOMENT_SECONDS = 4.0, 0.4  # that importing takes; in which much is begun and done
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


SHAPES = (Shape(1, 2, 1), Shape(1, 4, 2), Shape(2, 1, 1), Shape(2, 2, 2))

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
            *(sys.executable, str(TRAIN), "--folder", str(folder / "checkpoints")),
            *("--steps", str(steps), "--save-every", "1", "--tell-every", "1", "--tiny"),
            *(*shape.options, *map(str, words)),
        )
        kept = {
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # of compiled programs, which are tiny
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        for n, log in enumerate(self._logs):
            place = f"127.0.0.1:{port},{shape.processes},{n}"
            joins = ("--join", place) if shape.processes > 1 else ()
            with log.open("wb") as out:
                started = subprocess.Popen(
                    [*common, *joins], stdout=out, stderr=subprocess.STDOUT, env=os.environ | kept
                )
            self.processes.append(started)

    def kill(self, which: int) -> bool:
        """Kill a process; False where it has ended already."""
        process = self.processes[which % len(self.processes)]
        if process.poll() is not None:
            return False
        process.send_signal(signal.SIGKILL)
        return True

    def ends(self, limit_seconds: float) -> list[int] | None:
        """The exit code of each process; None where one does not end within the limit."""
        end = time.monotonic() + limit_seconds
        try:
            return [p.wait(max(0.1, end - time.monotonic())) for p in self.processes]
        except subprocess.TimeoutExpired:
            return None
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    @property
    def said(self) -> str:
        """All that its processes have said."""
        return "".join(log.read_text(errors="replace") for log in self._logs)

    def says(self, pattern: str, limit_seconds: float) -> None:
        """Wait until it has said this, has ended, or the limit has passed."""
        end = time.monotonic() + limit_seconds
        while time.monotonic() < end and all(p.poll() is None for p in self.processes):
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


def wait_for_an_instant(rng: random.Random, job: Job, steps: range) -> None:
    """Wait until the job has come to a random point on its way, and for a moment."""
    points = ["planning", "traced", "planning took", "compiling", "compiling took"]
    at = rng.choice(["", *points, *(rf"^step +{n} " for n in steps)])
    if at:
        job.says(at, LIMIT_SECONDS)
    time.sleep(rng.uniform(0.0, MOMENT_SECONDS if at else START_SECONDS))


def trial(
    rng: random.Random, folder: Path, compiled: Path, steps: int, alone: dict[Shape, Leaves]
) -> Any:
    """One job that is killed and started again until it comes through."""
    shapes = list(alone)
    stays = rng.random() < 0.5
    if is_cold := rng.random() < 0.25:
        compiled = folder / "compiled"
    shape = first = rng.choice(shapes)
    faults: list[str] = []
    kills: list[dict[str, Any]] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        before = saved_steps(folder)
        job = Job(shape, folder, compiled, steps)
        wait_for_an_instant(rng, job, range((before or [0])[-1] + 1, steps))
        doing = job.doing
        if not job.kill(rng.randrange(shape.processes)):
            break  # it came through before
        # Who has not joined yet waits for the others for minutes; there a launcher ends the rest.
        has_joined = doing != "starting"
        if job.ends(ENDS_WITHIN_SECONDS if has_joined else 1.0) is None and has_joined:
            faults.append(f"{shape} does not end after the kill")
        torn = [p.name for p in (folder / "checkpoints").glob("*.orbax-checkpoint-tmp*")]
        there = saved_steps(folder)
        told = [int(n) for n in re.findall(r"^step +(\d+) ", job.said, re.MULTILINE)]
        kills.append(
            {
                "shape": str(shape),
                "doing": f"{'saving' if torn else doing}{', in a recovery' if before else ''}",
                "saved": there[-1:],
            }
        )
        if before and (not there or there[-1] < before[-1]):
            faults.append(f"saved {before} before, {there} after")
        # Step n is told before it is saved, and step n - 1 is committed before n is saved.
        if told and told[-1] - (there[-1] if there else 0) > 2:
            faults.append(f"step {told[-1]} was told, and {there} is saved")
        shape = shape if stays else rng.choice(shapes)
    there = saved_steps(folder)
    begin = time.monotonic()
    job = Job(shape, folder, compiled, steps)
    if job.ends(LIMIT_SECONDS) != [0] * shape.processes:
        faults.append(f"the last start fails: {job.said[-1500:]}")
        return {"kills": kills, "faults": faults}
    if there and there[-1] < steps and job.first_step != there[-1]:
        faults.append(f"{there[-1]} was saved, and it went on after {job.first_step}")
    found, wanted = parameters(folder, steps), alone[first]
    is_same = all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))
    apart = distance(found, wanted)
    if not is_same if stays else apart > ROUNDING:
        faults.append(f"the parameters are {apart:.2g} from those of the undisturbed job")
    return {
        "stays": stays,
        "cold": is_cold,
        "kills": kills,
        "last_shape": str(shape),
        "last_seconds": round(time.monotonic() - begin, 1),
        "bits_equal": is_same,
        "distance": apart,
        "faults": faults,
    }


def trials(count: int, seed: int, steps: int, shapes: Sequence[Shape]) -> Iterator[Any]:
    """The undisturbed job of each shape, and so many trials, each from a seed of its own."""
    with tempfile.TemporaryDirectory() as root:
        alone: dict[Shape, Leaves] = {}
        compiled = Path(root) / "compiled"
        for number, shape in enumerate(shapes):
            folder = Path(root) / f"alone{number}"
            folder.mkdir()
            alone[shape] = undisturbed(shape, folder, compiled, steps)
        for number in range(seed, seed + count):
            folder = Path(root) / f"trial{number}"
            folder.mkdir()
            yield {
                "seed": number,
                **trial(random.Random(number), folder, compiled, steps, alone),
            }
            shutil.rmtree(folder)


def main() -> None:
    """Run the trials and tell of each."""
    parser = argparse.ArgumentParser(description="Kill jobs, and start them again.")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    held, doing = 0, Counter[str]()
    for found in trials(options.trials, options.seed, options.steps, SHAPES):
        held += not found["faults"]
        doing.update(kill["doing"] for kill in found["kills"])
        print(json.dumps(found), flush=True)
    print(json.dumps({"trials": options.trials, "held": held, "killed while": dict(doing)}))
    sys.exit(held != options.trials)


if __name__ == "__main__":
    main()
