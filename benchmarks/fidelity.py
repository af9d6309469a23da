"""Predicted against compiled: time, memory and collective bytes of many plans of each model.

`python -m benchmarks.fidelity [--only gpt] [--cluster 8xh100] [--cache DIR]` compiles every plan
with XLA's GPU compiler, which takes no GPU but the packages of `autopar[aot-gpu]`. Among them are
the layouts that an expert writes by hand: their constraints in the step, their specs as pins. One
JSON line a plan, then one a model: Kendall's tau of predicted seconds against those of XLA's
timeline, over all plans and over those of hand-written layouts alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

import autopar
from autopar.api import Planned
from autopar.errors import AutoparError
from autopar.ir.compiled import Compiled
from autopar.ir.sharding import MeshShape
from autopar.runtime.aot.program import abstract_mesh
from autopar.verifying.programs import export_whole
from benchmarks import models
from benchmarks.ahead import compiled_once
from benchmarks.hand.decoder import decoder_layouts
from benchmarks.hand.layout import Layout, constrained_step, pins_of
from benchmarks.hand.named import transformer_layouts
from benchmarks.zoo.scanned_gpt import scanned_gpt

ONE, TWO, TURNED, THREE = (8,), (2, 4), (4, 2), (2, 2, 2)
METHODS: dict[tuple[int, ...], tuple[str, ...]] = {
    ONE: ("dp", "zero1", "zero2", "fsdp", "megatron", "sequence", "auto"),
    TWO: ("hsdp", "megatron", "sequence", "fsdp+tp", "zero1", "auto"),
    TURNED: ("hsdp", "megatron", "sequence", "fsdp+tp", "auto"),
    THREE: ("megatron", "auto"),
}
EXPERTS = ((ONE, "expert"), (TWO, "expert"), (TURNED, "expert"))
# Shares of what the fastest plan holds, and pins, that make `auto` plan otherwise.
SHARES = (0.75, 0.5)
PINS: dict[str, dict[str, PartitionSpec]] = {
    "up by rows": {"params/**/up/kernel": PartitionSpec("model", None)},
    "head by columns": {"params/**/head/kernel": PartitionSpec(None, "model")},
}


@dataclass(frozen=True)
class Variant:
    """One way to ask for a plan."""

    mesh: tuple[int, ...]
    method: str
    memory_gb: float | None = None
    pins: Mapping[str, PartitionSpec] = field(default_factory=dict[str, PartitionSpec])
    note: str = ""
    layout: Layout | None = None

    def __str__(self) -> str:
        if self.layout is not None:
            return f"hand {self.note}"
        where = "x".join(map(str, self.mesh))
        limit = f" under {self.memory_gb:.2f} GiB" if self.memory_gb else ""
        return f"{self.method} {where}{limit}{f' {self.note}' if self.note else ''}"


def model_of(name: str) -> models.Model:
    """Two layers of a model of real width, so that a compile takes seconds."""
    makers: dict[str, Callable[[], models.Model]] = {
        "gpt": lambda: models.gpt(2, 1024, 16, 32768, 1024, 32),
        "llama": lambda: models.llama(2, 1024, 16, 8, 2816, 32768, sequence=1024, batch=32),
        "moe": lambda: models.moe(2, 768, 16, 8, 3072, 32768, sequence=512, batch=16),
        "scan": lambda: scanned_gpt(2, 1024, 16, 32768, 1024, 32),
        "scan-remat": lambda: scanned_gpt(2, 1024, 16, 32768, 1024, 32, remat=True),
    }
    return makers[name]()


MODELS = ("gpt", "llama", "moe", "scan", "scan-remat")


def layouts_of(name: str, devices: int) -> Iterator[tuple[str, Layout]]:
    """The hand-written layouts of a model."""
    if name.startswith("scan"):
        return transformer_layouts(devices)
    return decoder_layouts(devices, experts=8 if name == "moe" else 0)


def variants(name: str, auto_gib: float, devices: int = 8) -> Iterator[Variant]:
    """What is asked for of one model; `auto_gib` is what its fastest plan holds."""
    for note, layout in layouts_of(name, devices):
        sizes = tuple(size for _, size in layout.axes)
        yield Variant(sizes, "auto", note=note, layout=layout)
    for mesh, methods in METHODS.items():
        yield from (Variant(mesh, method) for method in methods)
    if name == "moe":
        yield from (Variant(mesh, method) for mesh, method in EXPERTS)
    for mesh, share in itertools.product((ONE, TWO), SHARES):
        yield Variant(mesh, "auto", round(share * auto_gib, 2))
    for note, pins in PINS.items():
        yield Variant(TWO, "auto", pins=pins, note=note)


class Bench:
    """Plans a model, compiles the plan (once for each program) and compares the two."""

    def __init__(self, cluster: str, cache: Path) -> None:
        self._cluster, self._cache = autopar.Cluster.parse(cluster), cache

    @property
    def devices(self) -> int:
        """How many devices the cluster has."""
        return self._cluster.device_count

    def planned(self, model: models.Model, variant: Variant) -> Planned:
        """The plan of a variant, with its program."""
        if (layout := variant.layout) is not None:
            shape = MeshShape(*(tuple(part) for part in zip(*layout.axes, strict=True)))
            step = autopar.parallelize(
                constrained_step(model, layout, abstract_mesh(shape)),
                cluster=self._cluster,
                mesh=dict(layout.axes),
                pins=pins_of(model, layout),
                remat=False,
            )
        else:
            step = autopar.parallelize(
                model.step,
                cluster=self._cluster,
                mesh=self._scaled(variant.mesh),
                method=variant.method,
                memory_gb=variant.memory_gb,
                pins=variant.pins or None,
            )
        state = jax.eval_shape(model.create_state, jax.random.key(0))
        planned = step.planned(state, model.example_batch)
        assert isinstance(planned, Planned)  # one program, as nothing else is asked for
        return planned

    def _scaled(self, mesh: tuple[int, ...]) -> tuple[int, ...]:
        """A mesh of eight devices, its first axis grown to the cluster's."""
        more = self._cluster.device_count // math.prod(mesh)
        return (mesh[0] * more, *mesh[1:])

    def compiled(self, planned: Planned) -> tuple[str, Compiled]:
        """The compiler's figures, from the cache where the very program was compiled before."""
        return compiled_once(
            export_whole(
                planned.trace, planned.program, self._cluster,
                options=planned.plan.compiler_options,
            ),
            self._cache,
        )  # fmt: skip


def compared(planned: Planned, compiled: Compiled) -> dict[str, Any]:
    """Predicted and compiled figures of one plan, side by side."""
    predicted = planned.plan.prediction
    sent: dict[str, int] = {}
    for row in predicted.traffic:
        sent[row.kind] = sent.get(row.kind, 0) + row.nbytes
    real = compiled.bytes_by_kind
    both = {kind: (sent.get(kind, 0), real.get(kind, 0)) for kind in sorted({*sent, *real})}
    seconds, exposed = compiled.seconds or math.nan, compiled.exposed_seconds or 0.0
    return {
        "predicted_us": round(predicted.seconds * 1e6, 1),
        "compiled_us": round(seconds * 1e6, 1),
        "time_ratio": round(predicted.seconds / seconds, 4),
        "predicted_communication_us": round(predicted.communication_seconds * 1e6, 1),
        "predicted_exposed_us": round(predicted.exposed_seconds * 1e6, 1),
        "exposed_us": round(exposed * 1e6, 1),
        "predicted_peak": predicted.peak_bytes,
        "compiled_peak": compiled.peak_bytes,
        "memory_ratio": round(predicted.peak_bytes / compiled.peak_bytes, 4),
        "bytes": both,
        "bytes_off": {k: pair for k, pair in both.items() if off(*pair)},
    }


def off(planned: int, compiled: int) -> bool:
    """Whether the bytes of a kind differ by more than 5 %."""
    return abs(planned - compiled) > 0.05 * max(planned, compiled)


def kendall_tau(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Kendall's tau-b: how alike two rankings are, 1 for the same and -1 for the reverse."""
    pairs = list(itertools.combinations(zip(xs, ys, strict=True), 2))
    signs = [(_sign(a[0] - b[0]), _sign(a[1] - b[1])) for a, b in pairs]
    untied = math.sqrt(sum(x != 0 for x, _ in signs) * sum(y != 0 for _, y in signs))
    return sum(x * y for x, y in signs) / untied if untied else 1.0


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def summary(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The agreement over all plans of a model."""
    ratios = [row["memory_ratio"] for row in rows]
    times = [row["time_ratio"] for row in rows]
    return {
        "model": name,
        "plans": len(rows),
        "kendall_tau": _tau(rows),
        "kendall_tau_by_hand": _tau([r for r in rows if r["plan"].startswith("hand ")]),
        "time_ratio": {
            "least": min(times),
            "median": round(statistics.median(times), 4),
            "most": max(times),
        },
        "memory_error": round(statistics.mean(abs(r - 1) for r in ratios), 4),
        "memory_ratio": {"least": min(ratios), "most": max(ratios)},
        "plans_with_bytes_off": sum(bool(row["bytes_off"]) for row in rows),
    }


def _tau(rows: Sequence[Mapping[str, Any]]) -> float:
    """Kendall's tau of predicted times against the compiler's."""
    times = [[r[name] for r in rows] for name in ("predicted_us", "compiled_us")]
    return round(kendall_tau(*times), 4)


def measured(name: str, bench: Bench, chosen: str) -> Iterator[dict[str, Any]]:
    """A row for each different program among the variants of a model that hold a text."""
    model = model_of(name)
    known: dict[str, str] = {}
    auto_gib = bench.planned(model, Variant(ONE, "auto")).plan.prediction.peak_bytes / 2**30
    for variant in variants(name, auto_gib, bench.devices):
        if chosen not in str(variant):
            continue
        head = {"model": name, "plan": str(variant)}
        try:
            planned = bench.planned(model, variant)
        except AutoparError as error:
            yield {**head, "failed": str(error)[:300]}
            continue
        key, compiled = bench.compiled(planned)
        if key in known:
            yield {**head, "same_as": known[key]}
            continue
        known[key] = str(variant)
        yield {**head, "key": key, **compared(planned, compiled)}


def main() -> None:
    """Every model in turn, and what its plans say together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name holds this text")
    parser.add_argument("--plan", default="", help="plans whose name holds this text")
    parser.add_argument("--cluster", default="8xh100")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/autopar-fidelity"))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    bench = Bench(options.cluster, options.cache)
    for name in MODELS:
        if options.only not in name:
            continue
        rows: list[dict[str, Any]] = []
        for row in measured(name, bench, options.plan):
            print(json.dumps(row), flush=True)
            rows += [row] if "key" in row else []
        if rows:
            print(json.dumps(summary(name, rows)), flush=True)


if __name__ == "__main__":
    main()
