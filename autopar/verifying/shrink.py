"""A plan on fewer devices: every mesh axis cut down, shardings kept by name, fewer batch rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import AutoparError, VerifyError
from autopar.frontend import StepSpec, TracedStep, trace
from autopar.frontend.microbatch.batch_inputs import batch_inputs, with_rows
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.sharding import MeshShape
from autopar.passes.base import Setting
from autopar.planner.placed_stages import place_whole
from autopar.planner.planned import Planned
from autopar.planner.remat import Form, form_of
from autopar.planner.stage_programs import lower_stages
from autopar.rules import RuleBook, attach_rules


@dataclass(frozen=True)
class Called:
    """A step and what it is called with: arrays, or their types."""

    spec: StepSpec
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Shrunk:
    """A planned step on a smaller mesh and, where they could be cut, with fewer batch rows."""

    called: Called
    plain: TracedStep
    traced: TracedStep
    program: Program
    note: str


def shrunk(planned: Planned, called: Called, devices: int) -> Shrunk:
    """The plan's shardings on at most so many devices.

    Parameters keep their shapes, so a device holds more of them; rows of the batch go down with
    the devices where the step traces alike on fewer. Raises VerifyError where no mesh is as small.
    """
    plan = planned.plan
    mesh = smaller_mesh(plan.mesh, devices)
    rules = planned.request.rules
    for rows, attempt in _attempts(planned.source.traced, called, plan.mesh, mesh):
        try:
            return _on(plan, rules, attempt, mesh, rows)
        except AutoparError:
            continue  # so few rows do not divide, or the step is another one on them
    return _on(plan, rules, called, mesh, None)


def smaller_mesh(mesh: MeshShape, devices: int) -> MeshShape:
    """The mesh with axes cut down until it fits: the most devices, evenly over the axes.

    Axes stay axes, and sizes divide those before: one device would hide what is sent over an axis.
    Raises VerifyError where no mesh is as small.
    """
    able = list(itertools.product(*map(_divisors, mesh.sizes)))
    fitting = [sizes for sizes in able if math.prod(sizes) <= devices]
    if not fitting:
        least = MeshShape(mesh.names, min(able, key=math.prod))
        raise VerifyError(
            f"mesh ({mesh}) shrinks to ({least}) and no further: allow {least.device_count} devices"
        )
    best = min(fitting, key=lambda sizes: (-math.prod(sizes), max(sizes, default=1), sizes))
    return MeshShape(mesh.names, best)


def _divisors(size: int) -> list[int]:
    """Divisors of an axis that leave it one."""
    return [n for n in range(2, size + 1) if size % n == 0] or [size]


def _attempts(
    traced: TracedStep, called: Called, whole: MeshShape, small: MeshShape
) -> Iterator[tuple[int, Called]]:
    """The step's arguments with fewer rows, as few as there are fewer devices first."""
    try:
        batch = batch_inputs(traced)
    except AutoparError:
        return  # nothing has rows
    most = whole.device_count // small.device_count
    for share in range(most, 1, -1):
        rows, rest = divmod(batch.extent, share)
        if rest or most % share:
            continue
        args, kwargs = with_rows(called.spec, called.args, called.kwargs, batch, rows)
        yield rows, Called(called.spec, args, kwargs)


def _on(plan: Plan, rules: RuleBook, called: Called, mesh: MeshShape, rows: int | None) -> Shrunk:
    """The plan's shardings for some arguments on a mesh; raises where they do not fit."""
    traced = trace(called.spec, called.args, called.kwargs)
    form = form_of(Form(traced, attach_rules(traced.graph, rules)), plan.recomputation, rules)
    sharding = replace(plan.sharding, mesh=mesh)
    sharding.verify(form.graph)
    cluster = Cluster.parse(f"{mesh.device_count}xcpu")
    setting = Setting(cluster, mesh, plan.origin.memory_bytes)
    placed = place_whole(form.graph, cluster, setting)
    program = lower_stages(placed, (sharding,), setting).program
    batch = f" with {rows} rows of the batch" if rows is not None else ""
    note = f"shrunk from mesh ({plan.mesh}) to ({mesh}){batch}; shardings are kept by axis name"
    return Shrunk(called, traced, form.traced, program, note)
