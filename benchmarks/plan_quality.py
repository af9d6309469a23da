"""Planned against hand-written shardings, both as the real compilers have them.

`python -m benchmarks.plan_quality [--target 8xh100] [--only gpt] [--plans auto,hand] [--cache DIR]`
prints a JSON line for each plan of each model: what autopar predicts beside what XLA's timeline of
Hopper GPUs or libtpu's cycles say. The table at the end has the ratios to the best hand-written
plan that fits in memory. It takes no GPU or TPU but the packages of `autopar[aot-gpu]` or
`autopar[aot-tpu]`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster import Cluster, device_order
from autopar.cluster.target import Target
from autopar.cost.prices import Prices
from autopar.errors import AutoparError, InfeasibleError
from autopar.ir.compiled import Compiled
from autopar.ir.compiler_options import LATENCY_HIDING, PIPELINED, CompilerOptions
from autopar.ir.plan import Prediction
from autopar.ir.sharding import MeshShape
from autopar.runtime.aot.program import AotProgram, abstract_mesh, export_jitted
from autopar.verifying.programs import export_whole
from benchmarks.ahead import compiled_once, program_key
from benchmarks.hand.layout import Layout, hand_step
from benchmarks.zoo.cases import CASES, Case
from benchmarks.zoo.convolutions import with_convolutions

_SLACK = 1.02  # a plan may hold so much of its limit: compilers differ

DATA = ("dp", "zero1", "zero2", "fsdp")


@dataclass(frozen=True)
class Site:
    """A cluster, what its compiler is told, and where compiled programs are kept."""

    cluster: Cluster
    cache: Path

    def compiled(self, program: AotProgram) -> Compiled:
        """What the compiler makes of a program, from the cache where it has seen the same."""
        _, compiled = compiled_once(program, self.cache)
        if program.target.platform == "tpu":
            return with_collectives(compiled, Prices(self.cluster, program.mesh))
        return with_convolutions(compiled, self.cluster.chip)


def with_collectives(compiled: Compiled, prices: Prices) -> Compiled:
    """Cycles of a TPU's kernels and, one after the other, its collectives as they are priced.

    libtpu estimates no cycles of collectives. What runs over no set of axes is left out.
    """
    if compiled.seconds is None:
        return compiled
    moved = sum(c.runs * prices.collective(c.kind, c.nbytes, c.axes) for c in compiled.collectives)
    return replace(compiled, seconds=compiled.seconds + moved, exposed_seconds=moved)


@dataclass(frozen=True)
class Trial:
    """One plan of one model: predicted (of autopar's plans) and compiled; or why there is none."""

    plan: str
    mesh: str
    compiled: Compiled | None
    limit_bytes: int
    prediction: Prediction | None = None
    failed: str = ""
    key: str = ""

    @property
    def is_hand(self) -> bool:
        """Whether a person wrote it."""
        return self.plan.startswith("hand ")

    @property
    def is_too_large(self) -> bool:
        """Whether it was compiled, and holds more than it may."""
        return self.compiled is not None and (
            self.compiled.peak_bytes > self.limit_bytes * _SLACK
            or self.compiled.out_of_memory != ""
        )

    @property
    def seconds(self) -> float | None:
        """What the compiler says of its speed, where it fits."""
        return None if self.compiled is None or self.is_too_large else self.compiled.seconds

    def row(self) -> dict[str, Any]:
        """The JSON line."""
        row: dict[str, Any] = {"plan": self.plan, "mesh": self.mesh}
        if self.failed:
            return {**row, "failed": self.failed}
        if self.prediction is not None:
            p = self.prediction
            sent = Counter[str]()
            for t in p.traffic:
                sent[t.kind] += t.nbytes
            row["predicted"] = {
                "ms": _ms(p.seconds), "communication_ms": _ms(p.communication_seconds),
                "peak_gib": _gib(p.peak_bytes), "mib": _mib(sent),
            }  # fmt: skip
        if self.compiled is not None:
            c = self.compiled
            row["compiled"] = {
                "ms": _ms(c.seconds), "exposed_ms": _ms(c.exposed_seconds),
                "peak_gib": _gib(c.peak_bytes), "mib": _mib(c.bytes_by_kind),
            }  # fmt: skip
            row["fits"] = not self.is_too_large
        return {**row, "key": self.key}


def trials(case: Case, site: Site, wanted: Sequence[str]) -> Iterator[Trial]:
    """Every plan of a model: the hand-written ones, then the recipes and auto.

    "auto remat" is auto's for scanned layers that the model's author put under `jax.checkpoint`.
    """
    devices, memory = site.cluster.device_count, site.cluster.memory_bytes
    limit = case.limit_bytes(devices, memory)
    for name, layout in case.layouts(devices):
        if _is_wanted(f"hand {name}", wanted):
            yield from _by_hand(case, site, limit, name, layout)
    model = case.model(devices, memory)
    for method, mesh in asked(case, devices):
        if _is_wanted(_name(method, mesh), wanted):
            yield _planned(model, site, limit, method, mesh)
    if case.scanned and _is_wanted("auto remat", wanted):
        again = case.model(devices, memory, remat=True)
        yield replace(_planned(again, site, limit, "auto", None), plan="auto remat")


def asked(case: Case, devices: int) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """The recipes on the meshes that suit them, and auto on any."""
    one, two = (devices,), (devices // 4, 4)
    yield from ((method, one) for method in DATA)
    yield "hsdp", two
    if case.tensor:
        meshes = (two, (devices // 2, 2)) if devices <= 8 else (two, (devices // 8, 8))
        yield "megatron", one
        for mesh in meshes:
            yield from ((method, mesh) for method in ("megatron", "sequence", "fsdp+tp"))
    if case.experts:
        yield from (("expert", mesh) for mesh in (one, two))
    yield "auto", None


def _planned(
    model: Any, site: Site, limit: int, method: str, mesh: tuple[int, ...] | None
) -> Trial:
    step = autopar.parallelize(
        model.step, cluster=site.cluster, mesh=mesh, method=method, memory_gb=limit / 2**30
    )
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    name = _name(method, mesh)
    try:
        planned = step.planned(state, model.example_batch)
    except InfeasibleError:
        return Trial(name, _sizes(mesh), None, limit, failed="does not fit")
    except AutoparError as error:
        return Trial(name, _sizes(mesh), None, limit, failed=str(error).splitlines()[0])
    shape = planned.plan.mesh
    options = planned.plan.compiler_options
    program = export_whole(planned.trace, planned.program, site.cluster, options=options)
    return _tried(
        Trial(name, _sizes(shape.sizes), None, limit, planned.plan.prediction), site, program
    )


def _by_hand(case: Case, site: Site, limit: int, name: str, layout: Layout) -> Iterator[Trial]:
    """A hand-written plan, with layers rematerialised where it does not fit as it is.

    Scanned layers are tried both ways.
    """
    cluster = site.cluster
    shape = MeshShape(*(tuple(part) for part in zip(*layout.axes, strict=True)))
    order, target = device_order(cluster, shape), Target.of(cluster)
    sizes = _sizes(shape.sizes)
    trial = Trial(f"hand {name}", sizes, None, limit, failed="its arguments do not fit")
    for remat in (False, True):
        model = case.model(cluster.device_count, cluster.memory_bytes, remat)
        step = hand_step(model, layout, abstract_mesh(shape))
        if step.argument_bytes > limit:
            yield trial
            return
        donated = tuple(range(step.state_count))
        program = export_jitted(
            step.jitted, step.arguments, shape, order, donated, target,
            by_hand_options(target.platform),
        )  # fmt: skip
        plan = f"hand {name}{' remat' if remat else ''}"
        trial = _tried(Trial(plan, sizes, None, limit), site, program)
        if case.scanned:
            yield trial
        elif trial.failed or not trial.is_too_large:
            break
    if not case.scanned:
        yield trial


def by_hand_options(platform: str) -> CompilerOptions:
    """The options that an expert sets on GPUs: collectives beside work, and in loops pipelined.

    Whether products are merged is left to XLA, as experts leave it.
    """
    names = sorted((LATENCY_HIDING, *PIPELINED.values())) if platform == "gpu" else ()
    return tuple((name, True) for name in names)


def _tried(trial: Trial, site: Site, program: AotProgram) -> Trial:
    given = {f: getattr(trial, f) for f in ("plan", "mesh", "limit_bytes", "prediction")}
    try:
        return Trial(**given, compiled=site.compiled(program), key=program_key(program))
    except AutoparError as error:
        return Trial(**given, compiled=None, failed=str(error)[-300:], key=program_key(program))


def _is_wanted(name: str, wanted: Sequence[str]) -> bool:
    return not wanted or any(name.startswith(w) for w in wanted)


def _name(method: str, mesh: tuple[int, ...] | None) -> str:
    return f"{method} {_sizes(mesh)}" if mesh else method


def _sizes(mesh: Sequence[int] | None) -> str:
    return "x".join(map(str, mesh or ()))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _gib(nbytes: int) -> float:
    return round(nbytes / 2**30, 3)


def _mib(sent: dict[str, int]) -> dict[str, float]:
    return {kind: round(nbytes / 2**20, 1) for kind, nbytes in sorted(sent.items())}


def table_of(model: str, target: str, rows: Sequence[Trial]) -> Table:
    """All plans of a model, fastest first, beside the best hand-written one that fits."""
    best = min((t.seconds for t in rows if t.is_hand and t.seconds), default=None)
    limit = rows[0].limit_bytes
    table = Table(title=f"{model} on {target}, {limit / 2**30:.2f} GiB", title_justify="left")
    for column in ("plan", "mesh", "ms", "of hand", "exposed", "GiB", "MiB sent", "predicted"):
        table.add_column(column, justify="left" if column in ("plan", "mesh") else "right")
    for t in sorted(rows, key=lambda t: (t.seconds or float("inf"), t.plan)):
        c, p = t.compiled, t.prediction
        if c is None:
            table.add_row(t.plan, t.mesh, t.failed[:60])
            continue
        ratio = f"{t.seconds / best:.3f}" if t.seconds and best else ""
        ratio = "too large" if t.is_too_large else ratio
        sent = ", ".join(f"{_SHORT.get(k, k)} {n / 2**20:.0f}" for k, n in c.bytes_by_kind.items())
        predicted = f"{p.seconds * 1e3:.2f}, {p.peak_bytes / 2**30:.2f} GiB" if p else ""
        table.add_row(
            t.plan, t.mesh, _show(c.seconds), ratio, _show(c.exposed_seconds),
            f"{c.peak_bytes / 2**30:.2f}", sent, predicted,
        )  # fmt: skip
    return table


_SHORT = {
    "all-reduce": "ar", "all-gather": "ag", "reduce-scatter": "rs", "all-to-all": "a2a",
    "collective-permute": "cp",
}  # fmt: skip


def _show(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


def main() -> None:
    """Every model and target in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", help="a cluster, such as 8xh100 (again: more)")
    parser.add_argument("--only", default="", help="models whose name holds this text")
    parser.add_argument("--plans", default="", help="plans whose names start so: auto,hand fsdp")
    parser.add_argument("--cache", type=Path, help="a folder that keeps what was compiled")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    wanted = [p for p in options.plans.split(",") if p]
    console = Console(stderr=True, width=150)
    with tempfile.TemporaryDirectory(prefix="autopar-quality-") as scratch:
        for target in options.target or ["8xh100"]:
            cache = (options.cache or Path(scratch)).resolve()
            cache.mkdir(parents=True, exist_ok=True)
            site = Site(Cluster.parse(target), cache)
            for case in CASES:
                if options.only in case.name:
                    console.print(table_of(case.name, target, _told(case, site, wanted)))


def _told(case: Case, site: Site, wanted: Sequence[str]) -> list[Trial]:
    found: list[Trial] = []
    for trial in trials(case, site, wanted):
        found.append(trial)
        head = {"model": case.name, "target": site.cluster.name}
        print(json.dumps({**head, **trial.row()}), flush=True)
    return found


if __name__ == "__main__":
    main()
