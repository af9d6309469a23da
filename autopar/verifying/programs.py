"""The programs of a plan, each with what was predicted of it and ready for a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from autopar.cluster import Cluster
from autopar.cluster.placement import cut_out, submesh_shapes
from autopar.cluster.target import Target
from autopar.cost.memory import held_bytes
from autopar.cost.prices import Prices
from autopar.cost.sizes import Sizes
from autopar.cost.timeline import timed_listing
from autopar.frontend.microbatch.part_trace import MicrobatchTrace
from autopar.ir.compiler_options import CompilerOptions
from autopar.ir.listing import Collective, Move
from autopar.ir.plan import Prediction
from autopar.ir.program import PartKind, Program
from autopar.ir.values import Role, item_bytes
from autopar.planner.planned import Planned
from autopar.runtime.aot.program import AotProgram, export_part, export_spmd
from autopar.runtime.bind import shape_with_axis
from autopar.runtime.compile import group_equal_parts
from autopar.runtime.interface import Interface
from autopar.runtime.parts import PartSource
from autopar.runtime.spmd_program import SpmdSource
from autopar.runtime.validation.steps import CpuProgram, cpu_program_of_part, cpu_program_of_stages


@dataclass(frozen=True)
class PlannedProgram:
    """A program and its predictions, of one device and one run.

    Where `collectives` are None they are not compared. `export` makes the program for a compiler:
    it raises VerifyError where that is not installed, and ClusterError where it knows no such chip.
    `alike` are further parts of a plan of stages that are the same program.
    """

    name: str
    export: Callable[[], AotProgram] | CpuProgram
    collectives: tuple[tuple[Move, Collective], ...] | None
    argument_bytes: int
    peak_bytes: int
    seconds: float
    exposed_seconds: float
    alike: tuple[str, ...] = ()

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the device does not wait for collectives."""
        return max(0.0, self.seconds - self.exposed_seconds)


def export_whole(
    trace: MicrobatchTrace,
    program: Program,
    cluster: Cluster,
    donate: bool = True,
    options: CompilerOptions = (),
) -> AotProgram:
    """The export of a step of one program with a plan's options; raises what `export_part` does."""
    meshes = tuple(shape_with_axis(s.mesh) for s in program.submeshes)
    interface = Interface(trace, program, meshes)
    (source,) = interface.sources(cluster.chip.platform, donate, options=options)
    return export_part(source, program.submeshes, cluster)


def programs_of(planned: Planned, cluster: Cluster, target: Target) -> Iterator[PlannedProgram]:
    """The different programs of a step, to be compiled for a cluster's target."""
    trace, program = planned.trace, planned.program
    meshes = tuple(shape_with_axis(s.mesh) for s in program.submeshes)
    interface = Interface(trace, program, meshes)
    is_cpu = target.platform == "cpu"
    options = planned.plan.compiler_options
    made = interface.sources(target.platform, donate_state=True, options=options)
    if (spmd := planned.programs.spmd) is not None:
        yield _spmd(interface, SpmdSource(spmd, made), planned.plan.prediction, cluster, target)
        return
    for sources in group_equal_parts(made):
        part = sources[0].program.part
        ahead = partial(export_part, sources[0], program.submeshes, cluster)
        export = cpu_program_of_part(sources[0]) if is_cpu else ahead
        if part.kind is PartKind.WHOLE:
            yield _whole(sources[0], export, planned.plan.prediction)
        else:
            count = len(program.submeshes[part.submesh].devices)
            shape = next(s for s in submesh_shapes(cluster) if s.device_count == count)
            yield _part(sources, export, cut_out(cluster, shape))


def _whole(
    source: PartSource, export: Callable[[], AotProgram] | CpuProgram, predicted: Prediction
) -> PlannedProgram:
    """The only program of a step, of which its plan has told all."""
    return PlannedProgram(
        name="",
        export=export,
        collectives=source.program.listing.collectives(),
        argument_bytes=predicted.argument_bytes,
        peak_bytes=predicted.peak_bytes,
        seconds=predicted.seconds,
        exposed_seconds=predicted.exposed_seconds,
    )


def _spmd(
    interface: Interface,
    source: SpmdSource,
    predicted: Prediction,
    cluster: Cluster,
    target: Target,
) -> PlannedProgram:
    """The one program of all stages."""
    spmd, kept = source.spmd, interface.lasting(donate_state=True)
    if target.platform == "cpu":
        export: Callable[[], AotProgram] | CpuProgram = cpu_program_of_stages(source, kept)
    else:
        export = partial(export_spmd, source, kept, spmd.program.submeshes, cluster)
    return PlannedProgram(
        name="",
        export=export,
        collectives=None,
        argument_bytes=spmd.state_bytes,
        peak_bytes=predicted.peak_bytes,
        seconds=predicted.seconds,
        exposed_seconds=predicted.exposed_seconds,
    )


def _part(
    sources: Sequence[PartSource], export: Callable[[], AotProgram] | CpuProgram, block: Cluster
) -> PlannedProgram:
    """Equal parts on a block of the cluster, as one program."""
    source, *others = sources
    graph, listing, mesh = source.program.part.graph, source.program.listing, source.mesh
    platform = block.chip.platform
    sizes = Sizes(graph, mesh, platform)
    added_to = source.program.part.accumulators
    timed = timed_listing(graph, listing, Prices(block, mesh, source.options), sizes, added_to)
    held = held_bytes(graph, listing, sizes, timed, added_to)
    # Sums come in dtypes of their own; those that it reads last give their buffers to outputs.
    given, sums = source.inputs, sum(t.local_bytes(mesh) for t in source.accumulators)
    for i, dtype in source.sums.items():
        share = item_bytes(graph.inputs[i].value.dtype) / item_bytes(dtype)
        sums += round(given[i].local_bytes(mesh) * (1 - share))
    free = (i for i in source.donated if i < len(given))
    taken = sum(given[i].local_bytes(mesh) for i in free if graph.inputs[i].role is not Role.STATE)
    return PlannedProgram(
        name=source.name,
        export=export,
        collectives=listing.collectives(),
        argument_bytes=held.argument_bytes + sums,
        peak_bytes=held.peak_bytes + sums - taken,
        seconds=timed.seconds.total,
        exposed_seconds=timed.seconds.exposed,
        alike=tuple(s.name for s in others),
    )
