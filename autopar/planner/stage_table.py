"""Prices every layer on every submesh and logical mesh: the table that the stage search reads.

A class of layers is sharded once on each mesh, as a stage of its own: forward, backward and
update together. Its prices at other sizes of microbatch lie on the line through two of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cluster import Cluster, mesh_shapes
from autopar.cluster.submesh import Submesh as Shape
from autopar.cluster.submesh import cut_out, submeshes
from autopar.errors import InfeasibleError
from autopar.ir.mesh import MeshShape
from autopar.passes.base import Setting
from autopar.passes.stage.prices import BatchPrices, Option, StageTable
from autopar.planner.layer_profile import LayerProfiler
from autopar.planner.layer_programs import LayerPrograms
from autopar.planner.request import Request
from autopar.schedule.table import SCHEDULES


def stage_table(
    apart: LayerPrograms, counts: Sequence[int], request: Request, setting: Setting
) -> StageTable:
    """Prices for some numbers of microbatches."""
    shapes = [s for s in submeshes(request.cluster) if _meshes(s, request)]
    priced = [_options(apart, s, counts, request, setting) for s in shapes]
    able = [m for m in counts if any(found[m] for found in priced)]
    if not able:
        numbers = ", ".join(map(str, counts))
        raise InfeasibleError(
            f"no stage of {request.cluster.name} can be sharded by {request.method!r} with "
            f"{numbers} microbatches of {apart.batching.batch} rows. Use fewer microbatches, "
            "another method, or a mesh of a submesh's size."
        )
    return StageTable(
        cluster=request.cluster,
        memory_bytes=request.budget_bytes,
        submeshes=tuple(shapes),
        batches=tuple(
            BatchPrices(m, _cut_bytes(apart, m), tuple(found[m] for found in priced)) for m in able
        ),
        schedules=_allowed(apart.batching.barrier, request),
        task_seconds=request.cluster.chip.launch_seconds,
    )


def _allowed(barrier: bool, request: Request) -> tuple[str, ...]:
    """The schedules under which the step is exact; plain loops only where they are asked for."""
    return tuple(
        s.name
        for s in SCHEDULES.values()
        if s.has_backward
        and (s.allows_barrier or not barrier)
        and (not s.is_plain_loop or s.name == request.schedule)
    )


def _meshes(shape: Shape, request: Request) -> tuple[MeshShape, ...]:
    """The logical meshes to try on a submesh: the request's own, or those with the pinned axes."""
    if request.mesh is not None:
        return (request.mesh,) if request.mesh.device_count == shape.device_count else ()
    found = _near(mesh_shapes(shape.device_count, request.mesh_axes), request.cluster)
    named = {a for _, dims in request.pins for axes in dims for a in axes}
    able = tuple(mesh for mesh in found if named <= set(mesh.names))
    return able or found


def _near(meshes: Sequence[MeshShape], cluster: Cluster) -> tuple[MeshShape, ...]:
    """Meshes whose last axis, of those with several, stays within a host: there tensors are cut."""
    most = cluster.device_count // cluster.hosts
    able = tuple(m for m in meshes if len(m.sizes) < 2 or m.sizes[-1] <= most)
    return able or tuple(meshes)


def _options(
    apart: LayerPrograms, shape: Shape, counts: Sequence[int], request: Request, setting: Setting
) -> Mapping[int, tuple[Option, ...]]:
    """The options of a submesh for each number of microbatches."""
    found: dict[int, list[Option]] = {m: [] for m in counts}
    batch, cluster = apart.batching.batch, cut_out(request.cluster, shape)
    share = shape.device_count / request.cluster.device_count
    budget = request.budget_bytes / max(1.0, len(apart.layers) * share)
    rows = [batch // m for m in counts]
    sizes = sorted({min(rows), _for_large(rows, request)})
    for mesh in _meshes(shape, request):
        bench = LayerProfiler(apart, cluster, mesh, request, setting)
        for way in bench.ways(sizes, budget):
            for m in counts:
                if way.divides(batch // m):
                    found[m] += way.options(mesh, batch // m, request.remat)
    return {m: tuple(options) for m, options in found.items()}


def _for_large(rows: Sequence[int], request: Request) -> int:
    """The rows that stand for large microbatches: one for every device, if any has as many."""
    enough = [n for n in rows if n >= request.cluster.device_count]
    return min(enough, default=max(rows))


def _cut_bytes(apart: LayerPrograms, microbatches: int) -> tuple[int, ...]:
    """Bytes that cross between layers, for one microbatch: in proportion to its rows."""
    more = apart.batching.microbatches / microbatches
    return tuple(round(layer.cut_bytes * more) for layer in apart.layers[:-1])
