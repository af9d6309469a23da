"""Restores a state of 1 GiB under other plans; prints what each process read and held, as JSON.

`python -m benchmarks.restores [--mib 1024]` starts two processes of two devices each. They save a
state under two stages, and restore it under one mesh, and under four stages. For each plan and
process a line tells, in MiB,

    needed   different bytes that the process's devices hold: replicas count once
    held     bytes that its devices hold
    read     bytes that came out of the files, by tensorstore's own count
    peak     what the process had at most beside what it had before: on CPUs that is the memory of
             its devices, too

A byte is read about once where `read` is near `needed`. No leaf is ever whole where `peak` stays
below `held` and one more leaf. The values are compared with those that were saved.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import PartitionSpec as P

import autopar

PROCESSES, DEVICES, WIDTH, ROWS = 2, 2, 1024, 16
MIB = 2**20
BY_COLUMNS = {"w": P(None, "data"), "m": P(None, "data")}
PLANS: dict[str, dict[str, Any]] = {
    "one mesh": {"mesh": (4,), "method": "fsdp"},
    "one mesh, by columns": {"mesh": (4,), "pins": BY_COLUMNS},
    "four stages": {"stages": 4, "microbatches": 4},
}


def values(first: Any, shape: tuple[int, ...], of: Any) -> Any:
    """Bits without a pattern that would compress, from the place of each value in its stack."""
    steps = [of.uint32(2654435761), of.uint32(40503), of.uint32(69069)]
    places = [of.arange(n, dtype=of.uint32) for n in shape]
    places[0] = places[0] + of.uint32(first)
    x, y, z = (p * s for p, s in zip(places, steps, strict=True))
    mixed = (x[:, None, None] ^ y[None, :, None]) * (z[None, None, :] | of.uint32(1))
    return (mixed >> of.uint32(8)).astype(of.float32) / of.float32(2**24)


def create(layers: int) -> dict[str, Any]:
    """Weights and their momenta, each a stack of layers."""
    shape = (layers, WIDTH, WIDTH)
    return {"w": values(0, shape, jnp), "m": values(7, shape, jnp)}


def train(state: dict[str, Any], batch: Any) -> dict[str, Any]:
    """A step of momentum through all layers."""

    def loss_of(weights: jax.Array) -> jax.Array:
        made, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch, weights)
        return jnp.mean(made**2)

    moment = 0.9 * state["m"] + jax.grad(loss_of)(state["w"])
    return {"w": state["w"] - 0.1 * moment, "m": moment}


def bytes_read() -> int:
    """The bytes that tensorstore has read from files in this process."""
    name = "/tensorstore/kvstore/file/bytes_read"
    found: list[dict[str, Any]] = json.loads(
        json.dumps(ts.experimental_collect_matching_metrics(name))
    )
    return sum(int(value["value"]) for metric in found for value in metric["values"])


def memory(what: str) -> int:
    """Bytes of memory: VmRSS are those of now, VmHWM the most since `forget_peak`."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if what in s)
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Let VmHWM begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def shards(leaf: Any) -> Iterator[tuple[int, tuple[slice, ...], Any]]:
    """The shards of a leaf that are here: its first row, the box from there, and the data."""
    first = 0
    for piece in getattr(leaf, "pieces", (leaf,)):
        for shard in piece.addressable_shards:
            box = tuple(slice(*s.indices(n)) for s, n in zip(shard.index, piece.shape, strict=True))
            yield first, box, shard.data
        first += piece.shape[0]


def check(leaf: Any, first: int) -> tuple[int, int]:
    """The bytes that are needed and held; raises AssertionError where a value is another one."""
    needed: dict[str, int] = {}
    held = 0
    for start, box, data in shards(leaf):
        held += data.nbytes
        needed[f"{start} {box}"] = data.nbytes
        row = start + box[0].start
        columns = (slice(None), *box[1:])
        whole = values(first + row, (data.shape[0], WIDTH, WIDTH), np)
        np.testing.assert_array_equal(np.asarray(data), whole[columns])
    return sum(needed.values()), held


def work(folder: Path, layers: int) -> None:
    """Save under two stages, restore under each of the other plans, and tell."""
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    made = partial(create, layers)
    shapes = jax.eval_shape(made)
    saver = autopar.parallelize(train, stages=2, microbatches=4)
    saver.plan_for(shapes, batch)
    with ocp.CheckpointManager(folder) as manager:
        begin = time.perf_counter()
        saver.save(manager, 1, saver.init(made))
        manager.wait_until_finished()
        saved = time.perf_counter() - begin
        for name, options in PLANS.items():
            step = autopar.parallelize(train, **options)
            step.plan_for(shapes, batch)
            wanted = step.abstract_state(made)
            before, had = bytes_read(), memory("VmRSS")
            forget_peak()
            begin = time.perf_counter()
            found = step.restore(manager, wanted)
            seconds = time.perf_counter() - begin
            peak, read = memory("VmHWM") - had, bytes_read() - before
            assert found is not None
            sizes = [check(found.state[leaf], first) for leaf, first in (("w", 0), ("m", 7))]
            needed, held = map(sum, zip(*sizes, strict=True))
            told = {"needed": needed, "held": held, "read": read, "peak": peak}
            line = {
                "plan": name,
                "process": jax.process_index(),
                **{f"{key}_mib": round(n / MIB, 1) for key, n in told.items()},
                "leaf_mib": shapes["w"].size * 4 / MIB,
                "reads_of_a_byte": round(read / needed, 3),
                "restore_seconds": round(seconds, 2),
                "save_seconds": round(saved, 2),
            }
            sys.stdout.write(f"{json.dumps(line)}\n")
            sys.stdout.flush()
            del found


def main() -> None:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description="Restore a large state under other plans.")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.process is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES)
        autopar.distributed(f"127.0.0.1:{asked.port}", PROCESSES, asked.process)
        work(asked.folder, asked.mib * MIB // (2 * 4 * WIDTH**2))
        return
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "benchmarks.restores", "--mib", str(asked.mib)]
        command += ["--folder", folder, "--port", str(port)]
        started = [
            subprocess.Popen([*command, "--process", str(n)], stderr=subprocess.DEVNULL)
            for n in range(PROCESSES)
        ]
        codes = [process.wait() for process in started]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
