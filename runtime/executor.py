"""Runs a step: arguments go into registers, instructions run in order, results come out.

    leaves --feeds-->  registers of mesh0   r0 r1 r2 ...    registers of mesh1   r0 r1 ...
                         run F0 (r0, r1) -> r2   one compiled program of mesh0
                         send r2 -> mesh1: r0    a transfer, which nobody waits for
                         run F1 (r0, r1) -> r2   one compiled program of mesh1
    results <--fetches-- registers

A step of one program is the same walk with one run: nothing but that program runs on the devices.
Of several processes each walks its projection of the list: what is on its own devices.
Everything is compiled, and every instruction bound to its program, before the first step. What is
left of each is a call, as the host must stay ahead of all submeshes at once. Registers belong to a
call: nothing of one that fails, or is interrupted, is seen by the next.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from autopar.errors import JobError
from autopar.frontend import compat
from autopar.frontend.microbatch.part_trace import MicrobatchTrace
from autopar.frontend.traced import TracedStep
from autopar.ir.compiler_options import CompilerOptions
from autopar.ir.program import Program
from autopar.ir.projection import Host
from autopar.ir.spmd_program import SpmdProgram
from autopar.runtime.actions import Action, Binding
from autopar.runtime.bind import host_of, mesh_shape, with_axis
from autopar.runtime.callbacks import HostCalls, LaterCaller
from autopar.runtime.cells import as_array
from autopar.runtime.compile import Count, compile_parts, tell_nobody
from autopar.runtime.feeds import Feeder, Fetcher, Registers
from autopar.runtime.interface import Interface, register_types
from autopar.runtime.job import end_job
from autopar.runtime.joined import join_moves
from autopar.runtime.pieces import join_outputs
from autopar.runtime.place import check_closed_over
from autopar.runtime.spanning import Gatherer
from autopar.runtime.spmd_program import SpmdSource, SpmdStep, walked
from autopar.runtime.timeline import Observer, Timeline
from autopar.runtime.transport.abstract import AbstractTransport, in_flight_limit
from autopar.runtime.transport.local import LocalTransport
from autopar.runtime.watchdog import Watchdog

_Walked = TypeVar("_Walked")
_LOCAL = LocalTransport()


@dataclass(frozen=True)
class Options:
    """Options of an executor.

    `donate` lets a step consume its state. A step that makes no progress for `patience` seconds
    ends the job, with a `report` of what each submesh did last and waits for. None never looks.
    `compiled` is told how many different parts are compiled, of how many. Of the
    `compiler_options` the devices' compiler gets those for its platform.
    """

    donate: bool = True
    patience: float | None = None
    report: Callable[[str], Any] = end_job
    compiled: Count = tell_nobody
    transport: AbstractTransport = _LOCAL
    compiler_options: CompilerOptions = ()


def _later(trace: MicrobatchTrace, devices: Sequence[Any], host: Host) -> LaterCaller | None:
    """The calls that the step makes at its end; raises JobError where they have no one host."""
    if trace.calls is None:
        return None
    if not host.is_alone:
        raise JobError(
            f"{trace.whole.name} calls Python on values of the whole batch, which is cut into "
            "microbatches over several processes: no process has these values. Leave such calls "
            "(jax.debug.print and the like) out, or plan one program without microbatches."
        )
    return LaterCaller(trace.calls, devices[0])


def _arrays(inputs: Sequence[Any]) -> Sequence[Any]:
    """Inputs as arrays of their own: some are in cells where another step has left them."""
    return list(map(as_array, inputs))


def lowered_parts(
    trace: MicrobatchTrace,
    program: Program,
    meshes: Sequence[Mesh],
    donate: bool,
    compiler_options: CompilerOptions = (),
) -> Any:
    """The only part of a step, lowered for its mesh; of several a mapping from their names."""
    if not program.is_one_part:
        meshes = [with_axis(m) for m in meshes]
    platform = str(meshes[0].devices.flat[0].platform)
    calls = HostCalls.of(trace.part.program)
    shapes = tuple(map(mesh_shape, meshes))
    interface = Interface(trace, program, shapes)
    sources = interface.sources(platform, donate, calls, options=compiler_options)
    with jax.set_mesh(None):
        found = {s.name: s.lower_on(meshes[s.program.part.submesh]) for s in sources}
    return next(iter(found.values())) if program.is_one_part else found


class Executor:
    """A compiled step, called on flat arguments; `meshes` has one for each submesh.

    `compiled` is the compiled program of each part, by its name. `closed_over` are the arrays that
    every call is given though no argument brings them, each with its path.
    """

    def __init__(
        self,
        trace: MicrobatchTrace,
        program: Program | SpmdProgram,
        meshes: Sequence[Mesh],
        options: Options = Options(),
    ) -> None:
        with jax.set_mesh(None):  # the user's own is for their code, which is traced by now
            self._build(trace, program, meshes, options)

    def _build(
        self,
        trace: MicrobatchTrace,
        lowered: Program | SpmdProgram,
        meshes: Sequence[Mesh],
        options: Options,
    ) -> None:
        spmd = lowered if isinstance(lowered, SpmdProgram) else None
        program = lowered.program if isinstance(lowered, SpmdProgram) else lowered
        self._traced = trace.whole
        check_closed_over(trace.whole.closed_over, trace.whole)
        if not program.is_one_part:
            meshes = [with_axis(m) for m in meshes]
        host, transport = host_of(meshes), options.transport
        devices = [d for mesh in meshes for d in mesh.devices.flat]
        platform = str(devices[0].platform)
        self._interface = Interface(trace, program, tuple(map(mesh_shape, meshes)))
        self._calls = HostCalls.of(trace.part.program)
        self._later = _later(trace, devices, host)

        # 1. Compile the parts, or the one program that they are together, once each register is
        #    known to hold what its readers are for.
        sources = self._interface.sources(
            platform, options.donate, self._calls, options.patience is not None, host,
            options.compiler_options,
        )  # fmt: skip
        if spmd is None:
            program, sources = join_moves(program, sources, self._interface.meshes)
        feeds = self._interface.feeds
        types = register_types(program, sources, feeds, self._interface.meshes)
        limit = in_flight_limit(platform)
        own = [n for n, s in enumerate(sources) if host.owns(s.program.part.submesh)]
        together: SpmdStep | None = None
        programs: Sequence[Any] = ()
        if spmd is not None:
            lasting = self._interface.lasting(options.donate)
            together = SpmdStep(SpmdSource(spmd, sources), meshes, lasting, limit)
            options.compiled(1, 1)
            self.compile_report = together.report
            self.compiled = {trace.whole.name: together.compiled}
        else:
            programs, self.compile_report = compile_parts(
                [sources[n] for n in own], meshes, options.compiled
            )
            self.compiled = {sources[n].name: p for n, p in zip(own, programs, strict=True)}

        # 2. Bind what fills the registers, what runs on them, and what empties them.
        state = trace.part.state_inputs
        consumed = trace.part.consumed_inputs if options.donate else ()
        constants = self._interface.constants
        numbers = host.numbers(program, transport.asks_all)
        edges = itertools.count(len(program.instructions))
        split, fetches = together is None, self._interface.fetches(types)
        self._feeder = Feeder(
            feeds, meshes, state, constants, transport, host, edges, consumed, split
        )
        self._seen: Callable[[Sequence[Any]], Sequence[Any]] = _arrays
        if together is not None:
            cells = together.bind(feeds, fetches, self._interface.stacked_outputs)
            self._seen = cells.seen
            self._actions: tuple[Action, ...] = (together.action(cells),)
            self.program = walked(program)
        else:
            calls = dict(zip(own, map(compat.direct, programs), strict=True))
            binding = Binding(program, host, calls, sources, meshes, transport, limit)
            self._actions = binding.actions(numbers, types)
            self.program = program if host.is_alone else program.only(numbers)
        self._fetcher = Fetcher(fetches, meshes, transport, host, edges, split)
        self._gather = Gatherer(self._interface.places(meshes)) if not host.is_alone else None

        paths = trace.part.input_paths
        self.closed_over = [(paths[i], array) for i, array in self._feeder.constants]
        self._has_run = False
        self._watchdog = (
            Watchdog(self.program, options.patience, options.report) if options.patience else None
        )

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run the step on flat arguments; the state among them is consumed.

        Raises ArgumentError where an array that the step closes over is deleted.
        """
        walk = self._walk if self._watchdog is None else self._watchdog.walk
        with jax.set_mesh(None):
            return self._step(leaves, walk)[0]

    def serving(self, traced: TracedStep) -> Executor:
        """The same compiled programs for arguments of other objects; its results are `traced`'s."""
        found = copy.copy(self)
        found._traced = traced
        return found

    def run_traced(self, leaves: Sequence[Any]) -> tuple[Any, Timeline]:
        """Run the step and wait for it: its results, and when everything in it ran.

        It starts when its arguments are in place, so that nothing else is measured with it.
        """

        def walk(actions: Sequence[Action], registers: Registers) -> Timeline:
            jax.block_until_ready([a for held in registers for a in held])
            return Observer(self.program).walk(actions, registers)

        with jax.set_mesh(None):
            return self._step(leaves, walk)

    def _step(
        self, leaves: Sequence[Any], walk: Callable[[Sequence[Action], Registers], _Walked]
    ) -> tuple[Any, _Walked]:
        self._calls.before()
        check_closed_over(self.closed_over, self._traced)
        if self._gather is not None:
            leaves = self._gather(leaves)
        registers: Registers = [[None] * count for count in self.program.register_counts]
        try:
            # 1. Feeds: every argument into the registers of the submeshes that read it.
            self._feeder.fill(self._seen(self._interface.inputs(leaves)), registers)
            # 2. Actions: one for each instruction, in the order of the program.
            walked = walk(self._actions, registers)
            # 3. Fetches: every result out of the register in which it ends.
            outputs = self._fetcher.outputs(registers)
        finally:
            registers.clear()  # an exception's traceback would keep what they hold
        if not self._has_run:
            self._feeder.trust(outputs)  # every step's results lie by the same objects
            self._has_run = True
        self._calls.after(outputs)
        results = join_outputs(outputs, self._interface.output_sizes)
        tree = self._traced.out_tree  # of what the user is given; later calls read the rest
        if self._later is not None:
            self._later(results[tree.num_leaves :])
        return jax.tree_util.tree_unflatten(tree, results[: tree.num_leaves]), walked

    def _walk(self, actions: Sequence[Action], registers: Registers) -> None:
        for act in actions:
            act(registers)
