"""Scanned models with and without pipelined collectives, predicted and by XLA's H100 timeline.

`python -m benchmarks.pipelined [--only llama] [--cache DIR]` prints a JSON line for each plan. It
takes no GPU but the packages of `autopar[aot-gpu]`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import autopar
from autopar.cluster import Cluster
from autopar.ir.compiler_options import PIPELINED
from autopar.verifying.programs import export_whole
from benchmarks import models
from benchmarks.ahead import compiled_once

CLUSTER = "8xh100"
_GPT, _WIDE = (4, 2048, 16, 50304, 1024, 64), (4, 4096, 32, 50304, 1024, 8)
_LLAMA = (4, 4096, 32, 8, 14336, 32768)

# Name, model, method; every one has its layers in a scan.
CASES: tuple[tuple[str, Callable[[], models.Model], str], ...] = (
    ("gpt", lambda: models.gpt(*_GPT, scan=True), "fsdp"),
    ("gpt remat", lambda: models.gpt(*_GPT, scan=True, remat=True), "fsdp"),
    ("wide gpt remat", lambda: models.gpt(*_WIDE, scan=True, remat=True), "fsdp"),
    ("wide gpt remat", lambda: models.gpt(*_WIDE, scan=True, remat=True), "auto"),
    ("llama", lambda: models.llama(*_LLAMA, sequence=2048, batch=16, scan=True), "fsdp"),
    (
        "llama remat",
        lambda: models.llama(*_LLAMA, sequence=2048, batch=8, scan=True, remat=True),
        "fsdp",
    ),
)


def measured(make: Callable[[], models.Model], method: str, on: bool, cache: Path) -> Any:
    """The figures of one plan, with or without the pipelined options."""
    model = make()
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    mesh = "8" if method == "fsdp" else None
    step = autopar.parallelize(
        model.step, cluster=CLUSTER, method=method, mesh=mesh, cache=False,
        compiler_options={} if on else dict.fromkeys(PIPELINED.values(), False),
    )  # fmt: skip
    planned = step.planned(state, model.example_batch)
    predicted, options = planned.plan.prediction, planned.plan.compiler_options
    program = export_whole(planned.trace, planned.program, Cluster.parse(CLUSTER), options=options)
    _, compiled = compiled_once(program, cache)
    return {
        "mesh": str(planned.plan.mesh),
        "predicted_seconds": predicted.seconds,
        "predicted_exposed_seconds": predicted.exposed_seconds,
        "predicted_peak_bytes": predicted.peak_bytes,
        "xla_seconds": compiled.seconds,
        "xla_exposed_seconds": compiled.exposed_seconds,
        "xla_peak_bytes": compiled.peak_bytes,
    }


def main() -> None:
    """Every case without the options, then with them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--cache", type=Path, help="a folder of what was compiled before")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = args.cache or Path(folder)
        for name, make, method in CASES:
            if args.only not in name:
                continue
            for on in (False, True):
                row = measured(make, method, on, cache)
                print(json.dumps({"model": name, "plan": method, "pipelined": on} | row))


if __name__ == "__main__":
    main()
