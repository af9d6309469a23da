"""The programs of a plan, each with what was predicted of it and ready for a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from autopar.cluster import Cluster, device_order
from autopar.cluster.submesh import cut_out, submeshes
from autopar.cluster.target import Target
from autopar.cost.memory import held_bytes
from autopar.cost.overlap import listing_seconds
from autopar.cost.prices import Prices
from autopar.ir.spmd import Collective, Move
from autopar.planner.plan import Planned
from autopar.planner.planned_stages import PlannedStages
from autopar.runtime.aot.job import Job, job_of_step
from autopar.runtime.aot.stages import alike_parts, job_of_part
from autopar.runtime.bind import shape_with_axis
from autopar.runtime.interface import Interface
from autopar.runtime.parts import PartSource
from autopar.runtime.trial.compiled import CpuProgram, cpu_program_of_part, cpu_program_of_step


@dataclass(frozen=True)
class PlannedProgram:
    """A program and its predictions, of one device and one run.

    `export` makes the job of a compiler: it raises VerifyError where that is not installed, and
    ClusterError where it knows no such chip. `alike` are further parts of a plan of stages that
    are the same program.
    """

    name: str
    export: Callable[[], Job] | CpuProgram
    collectives: tuple[tuple[Move, Collective], ...]
    argument_bytes: int
    peak_bytes: int
    seconds: float
    exposed_seconds: float
    alike: tuple[str, ...] = ()

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the device does not wait for collectives."""
        return max(0.0, self.seconds - self.exposed_seconds)


def programs_of(
    planned: Planned | PlannedStages, cluster: Cluster, target: Target
) -> Iterator[PlannedProgram]:
    """The step, or every different part of its stages, to be compiled for a cluster's target."""
    if isinstance(planned, Planned):
        yield _whole(planned, cluster, target)
    else:
        yield from _parts(planned, cluster, target)


def _whole(planned: Planned, cluster: Cluster, target: Target) -> PlannedProgram:
    plan, predicted = planned.plan, planned.plan.prediction
    traced, program, mesh = planned.traced, planned.program, plan.mesh
    order = tuple(device_order(cluster, mesh))
    return PlannedProgram(
        name="",
        export=cpu_program_of_step(traced, program, mesh)
        if target.platform == "cpu"
        else partial(job_of_step, traced, program, mesh, order, target),
        collectives=program.collectives(),
        argument_bytes=predicted.argument_bytes,
        peak_bytes=predicted.peak_bytes,
        seconds=predicted.seconds,
        exposed_seconds=predicted.exposed_seconds,
    )


def _parts(planned: PlannedStages, cluster: Cluster, target: Target) -> Iterator[PlannedProgram]:
    program = planned.staged.program
    meshes = tuple(shape_with_axis(s.mesh) for s in program.submeshes)
    interface = Interface(planned.staged.sliced.trace, program, meshes)
    for sources in alike_parts(interface.sources(target.platform, donate_state=True)):
        submesh = program.submeshes[sources[0].program.part.submesh]
        shape = next(s for s in submeshes(cluster) if s.device_count == len(submesh.devices))
        ahead = partial(job_of_part, sources[0], program.submeshes, cluster)
        is_cpu = target.platform == "cpu"
        export = cpu_program_of_part(sources[0]) if is_cpu else ahead
        yield _part(sources, export, cut_out(cluster, shape))


def _part(
    sources: Sequence[PartSource], export: Callable[[], Job] | CpuProgram, block: Cluster
) -> PlannedProgram:
    """Equal parts on a block of the cluster, as one program."""
    source, *others = sources
    graph, listing, mesh = source.program.part.graph, source.program.listing, source.mesh
    seconds = listing_seconds(graph, listing, Prices(block, mesh))
    held = held_bytes(graph, listing, mesh, block.chip.platform)
    sums = sum(t.local_bytes(mesh) for t in source.accumulators)
    return PlannedProgram(
        name=source.name,
        export=export,
        collectives=listing.collectives(),
        argument_bytes=held.argument_bytes + sums,
        peak_bytes=held.peak_bytes + sums,
        seconds=seconds.total,
        exposed_seconds=seconds.exposed,
        alike=tuple(s.name for s in others),
    )
