"""Prices for stages that are to be one program: they are on equal submeshes, under equal meshes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.errors import InfeasibleError, LoweringError, MemoryLimitError
from autopar.passes.base import Setting
from autopar.passes.pipeline import PassPipeline
from autopar.passes.stage.prices import StageTable
from autopar.schedule.table import SCHEDULES


def equal_stages_table(table: StageTable, passes: PassPipeline, setting: Setting) -> StageTable:
    """The table with one submesh and one logical mesh: those of the best stages that are equal.

    Raises LoweringError for a schedule that has other tasks than one forward and one backward of
    each stage; InfeasibleError or MemoryLimitError where no equal stages are as wanted or fit.
    """
    best: tuple[float, StageTable] | None = None
    refusal: InfeasibleError | None = None
    for candidate in _tables(table, passes):
        try:
            seconds = passes.search(candidate, setting).best.seconds
        except (InfeasibleError, MemoryLimitError) as error:
            refusal = refusal or error
            continue
        if best is None or seconds < best[0]:
            best = seconds, candidate
    if best is None:
        raise refusal or InfeasibleError(
            f"the {table.cluster.device_count} devices of {table.cluster.name} make no equal "
            "submeshes of as many stages as lower=spmd is asked for"
        )
    return best[1]


def _tables(table: StageTable, passes: PassPipeline) -> Iterator[StageTable]:
    """The table for every submesh that the devices are a multiple of, and every mesh of it."""
    stages, wanted = passes.stage.stages, passes.stage.schedule
    schedules = tuple(
        s.name
        for s in SCHEDULES.values()
        if s.name in table.schedules and s.usual_chunks == 1 and not s.needs_split
    )
    if wanted is not None and wanted not in schedules:
        raise LoweringError(
            f"lower=spmd runs one forward and one backward in a tick, which schedule {wanted!r} "
            f"is not made of; there are {', '.join(schedules)}"
        )
    every = table.cluster.device_count
    for u, submesh in enumerate(table.submeshes):
        count, rest = divmod(every, submesh.device_count)
        if rest or count != (stages or count):
            continue
        meshes = {option.mesh for batch in table.batches for option in batch.options[u]}
        for mesh in sorted(meshes, key=lambda m: (m.sizes, m.names)):
            batches = tuple(
                replace(b, options=(tuple(o for o in b.options[u] if o.mesh == mesh),))
                for b in table.batches
            )
            priced = tuple(b for b in batches if b.options[0])
            yield replace(table, submeshes=(submesh,), batches=priced, schedules=schedules)
