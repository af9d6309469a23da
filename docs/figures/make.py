"""Draws the figures of the documentation: `python -m docs.figures.make` writes them beside it.

All but the flow of passes are drawn from plans made here, as `autopar report` draws them. A test
makes them again and compares, so run this where planning or drawing changes on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax

import autopar
from autopar.inspecting.inspect import inspect
from autopar.inspecting.loaded_plan import reopen
from autopar.ir.plan import Plan
from autopar.ir.stages import Submesh
from autopar.report.svg import draw
from autopar.report.svg.gantt import gantt_svg
from autopar.report.svg.memory import memory_svg
from autopar.report.svg.mesh import mesh_svg
from autopar.report.svg.streams import streams_svg
from autopar.report.svg.tiles import tiles_svg
from autopar.schedule.planned import once_seconds_of, simulation_of
from benchmarks import models
from examples import gpt

HERE = Path(__file__).parent
CLUSTER = "2x4xh100"
_TILED = {
    "tiles-embedding": "state/params/Embed_0/embedding",
    "tiles-query": "state/params/layer0/attention/query/kernel",
    "tiles-down": "state/params/layer0/mlp/down/kernel",
}

# Of each box of the flow: its name, what leaves it, and what it does in two lines.
_BOXES = (
    ("train_step", "yours", "plain JAX,", "for one device"),
    ("trace", "Graph", "ops, their rules", "and your lines"),
    ("batch", "Batching", "which rows may", "run apart"),
    ("layer", "LayerSequence", "equal blocks, and", "where ops belong"),
    ("stage", "StagePlan", "layers, devices,", "schedule"),
    ("shard", "ShardingPlan", "mesh axes of", "each tensor"),
    ("lower", "Listing", "ops and collectives", "of each device"),
    ("plan", "plan.json", "runs with no", "solving"),
)
_WIDE, _TALL, _GAP, _TOP = 98.0, 46.0, 17.0, 34.0
_KNOWN = "rules: how an op may be cut   |   cluster: chips and links   |   cost: seconds and bytes"
_SLOTS = range(2, 7)


def figures() -> Iterator[tuple[str, str]]:
    """Each figure's name and its SVG."""
    yield "flow", flow()
    yield from of_one_program(_one_program())
    yield "schedule", in_stages()


def flow() -> str:
    """The passes from left to right, and what each hands on."""
    width = len(_BOXES) * (_WIDE + _GAP) - _GAP
    label = "how a plan is made: trace, batch, layer, stage, shard, lower"
    return draw.svg(width, 196, label, _flow_parts(), standalone=True)


def _flow_parts() -> Iterator[str]:
    for i, (name, leaves, first, second) in enumerate(_BOXES):
        x, middle = _left(i), _left(i) + _WIDE / 2
        yield draw.rect("idle" if i in _SLOTS else "hollow rule", x, _TOP, _WIDE, _TALL)
        yield draw.text("mid strong", middle, _TOP + 19, name)
        yield draw.text("mid quiet", middle, _TOP + 35, leaves)
        yield draw.text("mid quiet small", middle, _TOP + _TALL + 15, first)
        yield draw.text("mid quiet small", middle, _TOP + _TALL + 27, second)
        if i:
            yield _arrow(_left(i) - _GAP, _TOP + _TALL / 2, _GAP - 2)
    yield from _prices_go_back()
    yield from _knowledge()


def _left(i: int) -> float:
    return i * (_WIDE + _GAP)


def _arrow(x: float, y: float, long: float) -> str:
    head = f"M{draw.num(x + long)} {draw.num(y)}l-6 -3.5v7z"
    return draw.line("rule", x, y, x + long, y) + draw.path("quiet", head)


def _prices_go_back() -> Iterator[str]:
    """Stages are priced by sharding them: an arrow over the boxes."""
    x, to, y = _left(5) + _WIDE / 2, _left(4) + _WIDE / 2, _TOP - 14
    yield draw.path("rule", f"M{draw.num(x)} {draw.num(_TOP)}V{draw.num(y)}H{draw.num(to)}V{_TOP}")
    yield draw.path("quiet", f"M{draw.num(to)} {draw.num(_TOP - 1)}l-3.5 -6h7z")
    yield draw.text("mid quiet small", (x + to) / 2, y - 5, "prices of stages")


def _knowledge() -> Iterator[str]:
    left, right, y = _left(2), _left(6) + _WIDE, _TOP + _TALL + 62
    yield draw.rect("hollow rule dash", left, y, right - left, 30)
    yield draw.text("mid quiet", (left + right) / 2, y + 19, _KNOWN)
    for i in _SLOTS:
        x = _left(i) + _WIDE / 2
        yield draw.line("rule", x, y, x, y - 24)
        yield draw.path("quiet", f"M{draw.num(x)} {draw.num(y - 26)}l-3.5 6h7z")
    yield draw.text("mid quiet small", (left + right) / 2, y + 46, "what the passes know")


def _one_program() -> Plan:
    """A GPT of 200 million parameters, its layers not scanned, on two hosts of four GPUs."""
    model = models.gpt(4, 2048, 16, 32768, 1024, 64, scan=False)
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    return autopar.plan(model.step, state, model.example_batch, cluster=CLUSTER, mesh=(2, 4))


def of_one_program(plan: Plan) -> Iterator[tuple[str, str]]:
    """Where its mesh lies, how three parameters are cut, and its time and memory."""
    found = inspect(reopen(plan))
    cluster = autopar.Cluster.parse(CLUSTER)
    yield "mesh", mesh_svg(cluster, [Submesh(plan.mesh)], standalone=True)
    argument = {a.path: a for a in plan.arguments}
    for name, path in _TILED.items():
        a = argument[path]
        yield name, tiles_svg(a.shape, a.sharding, plan.mesh, standalone=True)
    yield "streams", streams_svg(found.spans, plan.prediction.seconds, standalone=True)
    yield "memory", memory_svg(found.memory[0], standalone=True)


def in_stages() -> str:
    """The schedule of the GPT example in four stages."""
    plan = autopar.plan(
        gpt.train_step, *gpt.example_args(), cluster="4x8xh100", mesh=(8,), stages=4,
        microbatches=8, schedule="zb-h1",
    )  # fmt: skip
    names = [f"mesh{k}" for k in range(len(plan.submeshes))]
    once = once_seconds_of(plan)
    return gantt_svg(simulation_of(plan), once_seconds=once, names=names, standalone=True)


def main() -> None:
    """Write every figure."""
    for name, svg in figures():
        (HERE / f"{name}.svg").write_text(svg + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
