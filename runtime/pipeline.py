"""Runs a step whose parts are programs of several submeshes: one walk over a list of instructions.

Everything is compiled, and every instruction bound to its program, before the first step. What is
left of each is a call, as the host must stay ahead of all submeshes at once. Registers belong to a
call: nothing of one that fails, or is interrupted, is seen by the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from autopar.frontend.microbatch.part_trace import MicrobatchTrace
from autopar.ir.program import Program
from autopar.runtime.actions import Action, Binding
from autopar.runtime.bind import mesh_shape, with_axis
from autopar.runtime.callbacks import HostCalls
from autopar.runtime.compile import compile_parts
from autopar.runtime.feeds import Feeder, Registers
from autopar.runtime.fetches import Fetcher
from autopar.runtime.interface import Interface
from autopar.runtime.later_calls import LaterCaller
from autopar.runtime.observe import Observer
from autopar.runtime.pieces import join_outputs
from autopar.runtime.registers import register_types
from autopar.runtime.send import AbstractTransport, LocalTransport
from autopar.runtime.timeline import Timeline
from autopar.runtime.watchdog import Watchdog
from autopar.runtime.window import window_limit

_Walked = TypeVar("_Walked")
_LOCAL = LocalTransport()


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)


@dataclass(frozen=True)
class PipelineOptions:
    """How a program of stages is run.

    `donate` lets a step consume its state. A step that makes no progress for `patience` seconds
    is reported: what each submesh did last, and what it waits for. None never looks.
    """

    donate: bool = True
    patience: float | None = None
    report: Callable[[str], Any] = _to_stderr
    transport: AbstractTransport = _LOCAL


class PipelineExecutor:
    """A step on several submeshes, called on flat arguments; `meshes` has one for each submesh."""

    def __init__(
        self,
        trace: MicrobatchTrace,
        program: Program,
        meshes: Sequence[Mesh],
        options: PipelineOptions = PipelineOptions(),
    ) -> None:
        self._program, self._options = program, options
        self._out_tree = trace.whole.out_tree
        meshes = [with_axis(m) for m in meshes]
        interface = Interface(trace, program, tuple(map(mesh_shape, meshes)))
        platform = str(meshes[0].devices.flat[0].platform)
        self._calls = HostCalls.of(trace.part.program)
        self._later = (
            LaterCaller(trace.calls, meshes[0].devices.flat[0]) if trace.calls is not None else None
        )
        sources = interface.sources(platform, options.donate, self._calls)
        feeds = interface.feeds
        types = register_types(program, sources, feeds, interface.meshes)
        compiled, self.compile_report = compile_parts(sources, meshes)
        self._compiled = {s.name: c for s, c in zip(sources, compiled, strict=True)}
        state = trace.part.state_inputs
        self._feeder = Feeder(
            feeds,
            meshes,
            state,
            interface.constants,
            options.transport,
            state if options.donate else (),
        )
        paths = trace.part.input_paths
        self._closed_over = [(paths[i], array) for i, array in self._feeder.constants]
        self._fetcher = Fetcher(interface.fetches(types), meshes)
        self._interface = interface
        self._has_run = False
        self._actions = Binding(
            program,
            compiled,
            meshes,
            options.transport,
            window_limit(platform),
        ).actions(types)
        self._watchdog = (
            Watchdog(program, options.patience, options.report) if options.patience else None
        )

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run the step on flat arguments; the state among them is consumed."""
        walk = self._walk if self._watchdog is None else self._watchdog.walk
        return self._step(leaves, walk)[0]

    @property
    def closed_over(self) -> list[tuple[str, Any]]:
        """The closed-over arrays as every call is given them, each with its path."""
        return self._closed_over

    def compile(self) -> dict[str, Any]:
        """The compiled program of each part, by its name; all there before the first step."""
        return dict(self._compiled)

    def run_traced(self, leaves: Sequence[Any]) -> tuple[Any, Timeline]:
        """Run the step and wait for it: its results, and when everything in it ran.

        It starts when its arguments are in place, so that nothing else is measured with it.
        """

        def walk(actions: Sequence[Action], registers: Registers) -> Timeline:
            jax.block_until_ready([a for held in registers for a in held])
            return Observer(self._program).walk(actions, registers)

        return self._step(leaves, walk)

    def _step(
        self, leaves: Sequence[Any], walk: Callable[[Sequence[Action], Registers], _Walked]
    ) -> tuple[Any, _Walked]:
        self._calls.before()
        inputs = self._interface.inputs(leaves)
        registers: Registers = [[None] * count for count in self._program.register_counts]
        try:
            self._feeder.fill(inputs, registers)
            walked = walk(self._actions, registers)
            outputs = self._fetcher.outputs(registers)
            if not self._has_run:
                self._feeder.trust(outputs)  # every step's results lie by the same objects
                self._has_run = True
        finally:
            registers.clear()  # an exception's traceback would keep what they hold
        self._calls.after(outputs)
        results = join_outputs(outputs, self._interface.output_sizes)
        count = self._out_tree.num_leaves  # the user's; the others are what later calls read
        if self._later is not None:
            self._later(results[count:])
        return jax.tree_util.tree_unflatten(self._out_tree, results[:count]), walked

    def _walk(self, actions: Sequence[Action], registers: Registers) -> None:
        for act in actions:
            act(registers)
