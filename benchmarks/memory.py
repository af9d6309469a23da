"""Predicted against compiled memory of a device: one JSON line a plan, and one for all.

`python -m benchmarks.memory` compiles for virtual CPU devices; `--target gpu` for eight H100s with
XLA's GPU compiler ahead of time, which takes no GPU but `pip install jax-cuda12-plugin
jax-cuda12-pjrt` of jaxlib's version. `--zoo` takes the tests' tiny models instead of large ones.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import autopar
from autopar.cluster.target import Target
from autopar.errors import AutoparError
from autopar.runtime.aot.devices import devices_of as ahead_devices
from autopar.runtime.bind import bind_mesh
from autopar.runtime.interface import Interface
from autopar.runtime.validation.steps import laid_out_bytes
from benchmarks import models

DEVICES = 8


@dataclass(frozen=True)
class Case:
    """A step with its arguments, and the mesh and method to plan it for."""

    name: str
    build: Callable[[], tuple[Callable[..., Any], Any, Any]]
    mesh: tuple[int, ...]
    method: str
    cluster: autopar.Cluster | str = "8xh100"

    @property
    def plan_name(self) -> str:
        """Method and mesh."""
        return f"{self.method} {'x'.join(map(str, self.mesh))}"


def large_cases() -> Iterator[Case]:
    """Four layers of models of real widths."""

    def case(
        name: str, make: Callable[[], models.Model], *plans: tuple[tuple[int, ...], str]
    ) -> Any:
        def build() -> tuple[Callable[..., Any], Any, Any]:
            create, step, batch = make()
            return step, jax.eval_shape(create, jax.random.key(0)), batch

        return (Case(name, build, mesh, method) for mesh, method in plans)

    one, two = (8,), (2, 4)
    size = (4, 1024, 16, 32768, 1024, 32)
    every = ((one, "dp"), (one, "fsdp"), (two, "megatron"), (two, "auto"))
    yield from case("gpt adamw", lambda: models.gpt(*size), *every)
    yield from case(
        "gpt sgd", lambda: models.gpt(*size, optimizer="sgd"), (one, "fsdp"), (one, "zero2")
    )
    yield from case("gpt remat", lambda: models.gpt(*size, remat=True), (one, "fsdp"), (one, "dp"))
    yield from case("gpt scan", lambda: models.gpt(*size, scan=True), (one, "fsdp"))
    yield from case(
        "gpt scan remat",
        lambda: models.gpt(*size, scan=True, remat=True),
        (one, "fsdp"),
        (two, "megatron"),
    )
    yield from case("gpt f32", lambda: models.gpt(*size, dtype="float32"), (one, "zero2"))
    yield from case(
        "llama", lambda: models.llama(4, 1024, 16, 4, 2816, 32768, sequence=1024, batch=32),
        (one, "fsdp"), (two, "megatron"),
    )  # fmt: skip
    yield from case(
        "llama remat", lambda: models.llama(4, 1024, 16, 4, 2816, 32768, sequence=1024, batch=32,
                                            remat=True),
        (one, "fsdp"), (two, "auto"),
    )  # fmt: skip
    yield from case(
        "moe", lambda: models.moe(4, 768, 12, 8, 3072, 32768, sequence=512, batch=16),
        (one, "dp"), (one, "expert"), (two, "auto"),
    )  # fmt: skip
    wide = (2, 4096, 32, 50304, 1024, 8)
    yield from case(
        "wide gpt", lambda: models.gpt(*wide), (one, "fsdp"), (two, "megatron"), (two, "auto")
    )
    yield from case(
        "wide gpt scan remat",
        lambda: models.gpt(4, *wide[1:], scan=True, remat=True),
        (one, "fsdp"),
        (two, "megatron"),
    )


def zoo_cases() -> Iterator[Case]:
    """The tests' sample of tiny models on eager devices."""
    from tests.end_to_end.combos import Combo, sampled_combos
    from tests.end_to_end.exceptions import refusal
    from tests.end_to_end.running import EAGER, zoo_case

    def built(combo: Combo) -> tuple[Callable[..., Any], Any, Any]:
        zoo = zoo_case(combo.model, combo.optimizer)
        return zoo.step, jax.eval_shape(zoo.create_state, jax.random.key(0)), zoo.batch(0)

    for combo in sorted(sampled_combos(), key=str):
        if refusal(combo) is None:
            build = functools.partial(built, combo)
            yield Case(combo.model, build, combo.mesh, combo.method, EAGER)


def devices_of(target: str) -> Sequence[Any]:
    """Eight devices to compile for; none of them need exist."""
    if target == "cpu":
        return jax.devices()[:DEVICES]
    return ahead_devices(Target.of(autopar.Cluster.parse(f"{DEVICES}xh100")))


def measured(case: Case, devices: Sequence[Any]) -> dict[str, Any]:
    """Bytes of one device, predicted and compiled.

    What a device must have free is what is allocated: one block for all temporaries, the holes in
    it as well. `compiled_peak_bytes` leaves those out.
    """
    function, *args = case.build()
    step = autopar.parallelize(function, cluster=case.cluster, mesh=case.mesh, method=case.method)
    planned = step.planned(*args)
    mesh = bind_mesh(planned.plan.mesh, range(DEVICES), devices)
    platform = str(mesh.devices.flat[0].platform)
    (source,) = Interface(planned.trace, planned.program, (planned.plan.mesh,)).sources(
        platform, True, options=planned.plan.compiler_options
    )
    lowered = source.jitted(mesh).lower(*(kind.on(mesh) for kind in source.given))
    memory = lowered.compile().memory_analysis()
    compiled = laid_out_bytes(memory)
    predicted = planned.plan.prediction
    return {
        "model": case.name,
        "plan": case.plan_name,
        "argument_bytes": predicted.argument_bytes,
        "predicted_bytes": predicted.peak_bytes,
        "compiled_bytes": compiled,
        "compiled_peak_bytes": memory.peak_memory_in_bytes,
        "ratio": round(predicted.peak_bytes / compiled, 4),
        "peak": str(predicted.peak),
    }


def main() -> None:
    """Every case in turn, then the ratios of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--zoo", action="store_true", help="the tests' tiny models")
    parser.add_argument("--only", default="", help="models whose name holds this text")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    devices = devices_of(options.target)
    ratios: list[float] = []
    for case in zoo_cases() if options.zoo else large_cases():
        if options.only not in case.name:
            continue
        try:
            row = measured(case, devices)
        except (AutoparError, jax.errors.JaxRuntimeError) as error:
            print(
                json.dumps({"model": case.name, "plan": case.plan_name, "failed": str(error)[:200]})
            )
            continue
        ratios.append(row["ratio"])
        print(json.dumps({"target": options.target, **row}), flush=True)
    if ratios:
        off = statistics.mean(abs(r - 1) for r in ratios)
        summary = {
            "plans": len(ratios),
            "mean_error": round(off, 4),
            "least": min(ratios),
            "most": max(ratios),
            "under_98_percent": sum(r < 0.98 for r in ratios),
        }
        print(json.dumps({"target": options.target, **summary}))


if __name__ == "__main__":
    main()
