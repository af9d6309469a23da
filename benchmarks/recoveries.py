"""Times how long a training job takes to go on after its checkpoint, beside the start of JAX alone.

`python -m benchmarks.recoveries [--times 3]` lets `examples/train.py` save a few steps, and then
starts in turn

    JAX alone      Python, `import jax`, its devices, and one tiny program
    a recovery     the same program again: plan, state and compiled step are on disk

and prints a JSON line for each shape: wall and CPU seconds of JAX alone; of the recovery less that,
until the state is there and until the first step has been told; and the load of the machine. What
a recovery takes is what the user imports, traces and reads too, not autopar's work alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TRAIN = Path(__file__).parents[1] / "examples" / "train.py"
JAX_ALONE = (
    "import jax; jax.config.update('jax_platforms', 'cpu'); "
    "jax.config.update('jax_num_cpu_devices', 2); print('started', float(jax.jit(abs)(-1.0)))"
)
SHAPES: dict[str, Sequence[str]] = {
    "one program": ("--virtual-devices", "2"),
    "two stages": ("--virtual-devices", "2", "--stages", "2", "--microbatches", "2"),
}
STATE, STEP = "going on", "step "


def cpu_seconds(process: int) -> float:
    """The CPU seconds that a running process and its threads have used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def until(
    marks: Sequence[str], words: Sequence[str], kept: Mapping[str, str]
) -> dict[str, tuple[float, float]]:
    """Wall and CPU seconds until a program says each of these; raises RuntimeError if it fails."""
    found: dict[str, tuple[float, float]] = {}
    begin = time.perf_counter()
    command = [sys.executable, *words]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **kept},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            for mark in marks:
                if line.startswith(mark):
                    now = time.perf_counter() - begin, cpu_seconds(process.pid)
                    found.setdefault(mark, now)
    if process.returncode or len(found) < len(marks):
        raise RuntimeError(f"{' '.join(command)} ends with {process.returncode}, says {found}")
    return found


def main() -> None:
    """Measure each shape and tell."""
    parser = argparse.ArgumentParser(description="Time recoveries.")
    parser.add_argument("--times", type=int, default=3)
    asked = parser.parse_args()
    for name, options in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            kept = {
                "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            common = [str(TRAIN), "--folder", f"{folder}/checkpoints", "--tiny", *options]
            common += ["--save-every", "1", "--tell-every", "1", "--steps"]
            until((STEP,), [*common, "2"], kept)
            starts: list[tuple[float, float]] = []
            states: list[tuple[float, float]] = []
            steps: list[tuple[float, float]] = []
            loads = [os.getloadavg()[0]]
            for number in range(asked.times):
                starts.append(until(("started",), ["-c", JAX_ALONE], kept)["started"])
                found = until((STATE, STEP), [*common, str(3 + number)], kept)
                states.append(found[STATE])
                steps.append(found[STEP])
                loads.append(os.getloadavg()[0])
        kinds = {"wall_seconds": 0, "cpu_seconds": 1}
        middle = {
            what: [statistics.median(pair[kind] for pair in pairs) for kind in (0, 1)]
            for what, pairs in (("start", starts), ("state", states), ("step", steps))
        }
        line: dict[str, object] = {"shape": name, "load": [min(loads), max(loads)]}
        for unit, kind in kinds.items():
            alone = middle["start"][kind]
            line[unit] = {
                "jax_alone": round(alone, 2),
                "then_to_the_state": round(middle["state"][kind] - alone, 2),
                "then_to_the_first_step": round(middle["step"][kind] - alone, 2),
            }
        sys.stdout.write(f"{json.dumps(line)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
