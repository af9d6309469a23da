"""How a random program is run in parallel: by search, recipe, pins, a memory limit, or in parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from autopar.cluster import Cluster
from tests.fuzz.draw import Draw

# Links so fast and chips so slow that a search cuts up even tiny models.
QUICK_LINKS = Cluster.from_toml_text(
    """
like = "8xcpu"
name = "8 slow devices on quick links"
[chip]
launch_seconds = 0.0
half_flops = 1.0
memory_bytes_per_second = 1e9
[chip.peak_flops]
f32 = 1e9
f64 = 1e9
bf16 = 1e9
[[switch.levels]]
name = "switch"
size = 8
bytes_per_second = 1e10
latency_seconds = 1e-9
start_seconds = 1e-8
"""
)
RECIPES = ("dp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "sequence", "fsdp+tp", "expert")
MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
AXES: tuple[str, ...] = ("data", "model", "other")
SCHEDULES = (
    "gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v",
    "zb-interleaved", "auto",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """One way to run a step in parallel.

    `pins` and `random_plan` are seeds of what is drawn; `memory_share` is the memory of a device as
    a share of what data parallelism needs.
    """

    quick_links: bool = True
    mesh: tuple[int, ...] | None = None
    method: str = "auto"
    stages: int = 1
    microbatches: int | None = None
    schedule: str = "auto"
    memory_share: float | None = None
    pins: int | None = None
    random_plan: int | None = None

    @property
    def name(self) -> str:
        """The group that it is counted in."""
        for name in ("random_plan", "pins", "memory_share"):
            if getattr(self, name) is not None:
                return name
        if self.stages > 1:
            return f"stages {self.stages}"
        if self.microbatches:
            return f"microbatches {self.microbatches}"
        return self.method if self.method != "auto" or self.mesh is None else "auto on a mesh"

    @property
    def cluster(self) -> Cluster | str:
        """The cluster to plan for."""
        return QUICK_LINKS if self.quick_links else "8xcpu"

    def options(self, state: Any) -> dict[str, Any]:
        """The options of `parallelize`, but for a memory limit."""
        made: dict[str, Any] = {"cluster": self.cluster, "method": self.method}
        if self.mesh is not None:
            made["mesh"] = dict(zip(AXES, self.mesh, strict=False))
        if self.stages > 1 or self.microbatches:
            made |= {"stages": self.stages, "microbatches": self.microbatches}
            made["schedule"] = self.schedule
        if self.pins is not None:
            made["pins"] = drawn_pins(state, dict(made["mesh"]), self.pins)
        return made

    def simpler(self) -> Iterable[Config]:
        """Plainer ways that may fail alike."""
        if self.stages > 2:
            yield replace(self, stages=2)
        if self.stages > 1:
            yield replace(self, stages=1, schedule="auto", microbatches=self.microbatches or 2)
            if self.schedule != "gpipe":
                yield replace(self, schedule="gpipe")
        if self.microbatches == 4:
            yield replace(self, microbatches=2)
        if self.microbatches and self.stages == 1:
            yield replace(self, microbatches=None)
        if (self.memory_share, self.pins, self.random_plan) != (None, None, None):
            yield replace(self, memory_share=None, pins=None, random_plan=None)
        if self.mesh is not None and len(self.mesh) > 1:
            yield replace(self, mesh=(8,))

    def as_json(self) -> dict[str, Any]:
        """It as plain data."""
        return asdict(self)


def config_from(data: Mapping[str, Any]) -> Config:
    """The config that was written as plain data."""
    mesh: Sequence[int] | None = data["mesh"]
    made: dict[str, Any] = {**data, "mesh": None if mesh is None else tuple(mesh)}
    return Config(**made)


def draw_config(seed: int, number: int, mixes: bool) -> Config:
    """The config of that number for a program; one whose rows meet is seldom cut up by rows.

    Seldom drawn is what takes long and runs no other programs than the rest: a search over meshes,
    and one under a limit.
    """
    draw = Draw(seed, 3, number)
    mesh, quick = draw.one(MESHES), draw.chance(0.85)
    plain = ("mesh", "mesh", "recipe", "recipe", "recipe", "random", "random", "pins", "pins")
    cut = ("microbatches", "microbatches", "stages", "stages", "stages")
    kind = draw.one((*plain, *cut) if not mixes else (*plain, *plain, "microbatches", "stages"))
    if draw.chance(0.04):
        kind = draw.one(("auto", "memory"))
    method = draw.one(RECIPES)
    if kind == "mesh":
        return Config(quick, mesh)
    if kind == "recipe":
        return Config(quick, mesh, method)
    if kind == "random":
        return Config(quick, mesh, random_plan=draw.seed())
    if kind == "pins":
        return Config(quick, mesh, pins=draw.seed())
    if kind == "memory":
        return Config(quick, mesh, memory_share=draw.one((0.4, 0.6, 0.8)))
    if kind == "microbatches":
        way = Config(quick, mesh, draw.one(("auto", method)), microbatches=draw.one((2, 4)))
        return replace(way, mesh=draw.one((None, mesh)))
    if kind == "stages":
        stages = draw.one((2, 2, 2, 4))
        return Config(
            quick, method=draw.one(("auto", method)), stages=stages,
            microbatches=draw.one((2, 4)), schedule=draw.one(SCHEDULES),
        )  # fmt: skip
    return Config(quick)


def drawn_pins(state: Any, mesh: Mapping[str, int], seed: int) -> dict[str, PartitionSpec]:
    """Shardings for up to three arrays of the parameters, of those that divide evenly."""
    draw = Draw(seed, 4)
    fit: list[tuple[str, int, str]] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state["params"]):
        name = "/".join(["params", *(str(key.key) for key in path)])
        for dim, size in enumerate(np.shape(leaf)):
            fit += [(name, dim, axis) for axis, count in mesh.items() if size % count == 0]
    chosen = draw.some(fit, 1 + draw.below(3)) if fit else ()
    pins = {name: PartitionSpec(*[None] * dim, axis) for name, dim, axis in chosen}
    if fit and draw.chance(0.3):
        pins[draw.one(fit)[0]] = PartitionSpec()
    return pins
