"""Starts one training job by every engine that is installed here; prints one JSON line for each.

`python -m benchmarks.engines [plain mpi slurm ray] [--hosts 2]` plans a tiny model of
`examples/train.py` for as many hosts, writes each engine's file by `autopar launch`, as a user
would, and hands it to the real engine: Open MPI's mpirun, a Slurm of its own (munged, slurmctld and
a slurmd for each host, on ports of this machine) or Ray. `plain` starts the processes itself.
Every job must print the same losses as one process with the same plan's devices, and end with 0.
The exit code is 1 if one does not; an engine that is not installed is told and left out.

    apt-get install openmpi-bin slurmctld slurmd slurm-client munge; pip install ray
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import autopar
from examples.train import TINY, example_args, train_step

TRAIN = Path(__file__).parents[1] / "examples" / "train.py"
DEVICES, STEPS, LIMIT_SECONDS = 2, 3, 420.0  # of a host; of a job
ROUNDING = 2e-4  # of a loss that is printed with four digits

NEEDED = {
    "plain": (),
    "mpi": ("mpirun",),
    "slurm": ("munged", "slurmctld", "slurmd", "sbatch"),
    "ray": ("ray",),
}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def autopar_command(*words: object) -> list[str]:
    """A command line of autopar."""
    return [sys.executable, "-m", "autopar", *map(str, words)]


def launched(folder: Path, engine: str, plan: Path, *options: str) -> Path:
    """The file that `autopar launch` writes for an engine."""
    file = folder / f"start.{engine}"
    script = ("--plan", plan, "--tiny", "--steps", STEPS, "--tell-every", 1)
    words = ("launch", "--on", engine, plan, TRAIN, "--name", "engines", "-o", file)
    if engine != "ray":
        options = ("--python", sys.executable, *options)
    ends = ("--", *script, "--folder", folder / "checkpoints")
    subprocess.run(autopar_command(*words, *options, *ends), check=True, capture_output=True)
    return file


def finished(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command that ended, with all that it printed."""
    return subprocess.run(
        words, cwd=folder, env={**os.environ, **variables}, text=True, timeout=LIMIT_SECONDS,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip


def plain(folder: Path, plan: Path, hosts: int) -> tuple[int, str]:
    """Processes that are told of each other on the command line."""
    (port,) = free_ports(1)
    words = [sys.executable, str(TRAIN), "--plan", str(plan), "--tiny", "--steps", str(STEPS)]
    words += ["--tell-every", "1", "--folder", str(folder / "checkpoints")]
    words += ["--virtual-devices", str(DEVICES)]
    jobs = [
        subprocess.Popen(
            [*words, "--join", f"127.0.0.1:{port},{hosts},{k}"], cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for k in range(hosts)
    ]  # fmt: skip
    try:
        printed = [job.communicate(timeout=LIMIT_SECONDS)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return max(abs(job.returncode) for job in jobs), "".join(printed)


def mpi(folder: Path, plan: Path, hosts: int) -> tuple[int, str]:
    """Open MPI on this machine."""
    file = launched(folder, "mpi", plan, "--hosts", f"localhost:{hosts}")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = finished(["bash", str(file)], folder, **allowed)
    return done.returncode, done.stdout


def slurm(folder: Path, plan: Path, hosts: int) -> tuple[int, str]:
    """A Slurm of its own, handed the batch file by sbatch."""
    with slurm_cluster(folder / "slurm", hosts) as conf:
        file = launched(folder, "slurm", plan)
        words = ["sbatch", "--wait", "--output", "job.txt", str(file)]
        done = finished(words, folder, SLURM_CONF=str(conf))
        job = folder / "job.txt"
        return done.returncode, done.stdout + (job.read_text() if job.exists() else "")


def ray(folder: Path, plan: Path, hosts: int) -> tuple[int, str]:
    """A Ray of its own with as many nodes, all of them on this machine."""
    file = launched(folder, "ray", plan)
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    start = ["ray", "start", "--num-cpus", "1", "--disable-usage-stats"]
    try:
        head = (*start, "--head", "--port", str(port), "--include-dashboard", "false")
        subprocess.run(head, check=True, capture_output=True)
        for _ in range(hosts - 1):
            subprocess.run((*start, "--address", address), check=True, capture_output=True)
        paths = os.pathsep.join(filter(None, sys.path))
        done = finished(
            [sys.executable, str(file)], folder, RAY_ADDRESS=address, PYTHONPATH=paths
        )  # fmt: skip
    finally:
        subprocess.run(["ray", "stop", "--force"], capture_output=True, check=False)
    return done.returncode, done.stdout


@contextmanager
def slurm_cluster(folder: Path, hosts: int) -> Generator[Path]:
    """Slurm's daemons, one slurmd for each host; gives the path of the configuration.

    Hosts are called 127.0.0.1, 127.0.0.2 and so on: names that every Linux reaches.
    """
    folder.mkdir()
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    host, (main, *ports) = socket.gethostname(), free_ports(hosts + 1)
    nodes = [
        f"NodeName=127.0.0.{k + 1} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2"
        for k, port in enumerate(ports)
    ]
    conf = folder / "slurm.conf"
    conf.write_text(
        "\n".join(
            [
                f"ClusterName=one\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={main}",
                f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge.socket",
                f"SlurmUser={os.environ.get('USER', 'root')}\nSlurmdUser=root\nMpiDefault=none",
                f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n",
                f"SlurmctldPidFile={folder}/ctld.pid\nSlurmdPidFile={folder}/%n.pid",
                "ProctrackType=proctrack/pgid\nTaskPlugin=task/none\nReturnToService=2",
                "SelectType=select/cons_tres\nSlurmdParameters=config_overrides\nKillWait=5",
                *nodes,
                "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n",
            ]
        )
    )
    names = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = [f"--{option}={folder}/munge.{name}" for option, name in names.items()]
    munge.append(f"--key-file={key}")
    daemons = [["munged", "--foreground", "--force", *munge], ["slurmctld", "-D", "-f", str(conf)]]
    daemons += [["slurmd", "-D", "-N", f"127.0.0.{k + 1}", "-f", str(conf)] for k in range(hosts)]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for daemon in daemons:
            log = (folder / f"{daemon[0]}-{len(running)}.txt").open("wb")
            running.append(subprocess.Popen(daemon, stdout=log, stderr=log))
            time.sleep(1.0)
        yield conf
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(20)


LAUNCHERS = {"plain": plain, "mpi": mpi, "slurm": slurm, "ray": ray}


def losses(printed: str) -> list[float]:
    """The loss after each step; Ray says what an actor prints once for each node of a machine."""
    found = re.findall(r"step +(\d+) +loss (\d+\.\d+)", printed)
    return [float(loss) for _, loss in sorted({int(step): loss for step, loss in found}.items())]


def trial(engine: str, hosts: int) -> dict[str, Any]:
    """One job by an engine: its exit code, its losses, its seconds, and the end of what it said."""
    missing = [name for name in NEEDED[engine] if shutil.which(name) is None]
    if engine == "ray" and find_spec("ray") is None:
        missing = ["ray"]
    if missing:
        return {"engine": engine, "left_out": f"not installed: {', '.join(missing)}"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = f"{hosts}x{DEVICES}xcpu" if hosts > 1 else f"{DEVICES}xcpu"
        plan = folder / "plan.json"
        step = partial(train_step, size=TINY)
        autopar.plan(step, *example_args(TINY), cluster=cluster, method="fsdp").save(plan)
        began = time.perf_counter()
        code, printed = LAUNCHERS[engine](folder, plan, hosts)
        seconds = time.perf_counter() - began
    found: dict[str, Any] = {"engine": engine, "hosts": hosts, "exit_code": code}
    found |= {"losses": losses(printed), "seconds": round(seconds, 1)}
    return found if code == 0 else {**found, "said": printed[-2000:]}


def main() -> int:
    """Every engine that was asked for, beside one process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("engines", nargs="*", default=list(LAUNCHERS), help="those to try")
    parser.add_argument("--hosts", type=int, default=2)
    asked = parser.parse_args()
    one = trial("plain", 1)
    print(json.dumps({**one, "engine": "one process"}), flush=True)
    fine = len(one["losses"]) == STEPS
    for engine in asked.engines:
        found = trial(engine, asked.hosts)
        if "left_out" not in found:
            pairs = list(zip(found["losses"], one["losses"], strict=False))
            found["agrees"] = len(found["losses"]) == STEPS and all(
                abs(a - b) <= ROUNDING * b for a, b in pairs
            )
            fine &= found["agrees"] and found["exit_code"] == 0
        print(json.dumps(found), flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
