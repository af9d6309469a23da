"""Instructions as functions of a call's registers, bound to their programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
from jax.sharding import Mesh

from autopar.frontend import compat
from autopar.ir.program import Free, Instruction, Program, Run, Send, Start
from autopar.ir.projection import Host
from autopar.runtime.bind import ArrayType
from autopar.runtime.feeds import Registers
from autopar.runtime.interface import RegisterTypes
from autopar.runtime.parts import PartSource, neutral
from autopar.runtime.spanning import of_copies
from autopar.runtime.transport.abstract import (
    AbstractTransport,
    Admit,
    Copier,
    Endpoint,
    limit_in_flight,
)

# What it gives is ready when the instruction is done; None where that is at once.
Action = Callable[[Registers], Any]


@dataclass(frozen=True)
class Binding:
    """The meshes and the transport of instructions, and what calls each compiled part."""

    program: Program
    host: Host
    calls: Mapping[int, Callable[..., Any]]
    sources: Sequence[PartSource]
    meshes: Sequence[Mesh]
    transport: AbstractTransport
    limit: int  # of programs under way on a submesh; 0 for none

    def actions(self, numbers: Sequence[int], types: RegisterTypes) -> tuple[Action, ...]:
        """An action for each of these instructions, in order."""
        ends = [Endpoint(mesh, limit_in_flight(self.limit)) for mesh in self.meshes]
        listed = self.program.instructions
        return tuple(self._action(n, listed[n], types, ends) for n in numbers)

    def _action(
        self, number: int, step: Instruction, types: RegisterTypes, ends: Sequence[Endpoint]
    ) -> Action:
        if isinstance(step, Run):
            submesh = self.program.submesh_of(step)
            call, admit = self.calls[step.part], ends[submesh].admit
            if self.sources[step.part].has_token:
                return _run(step, call, submesh, admit)
            return _run_alone(step, call, submesh)
        if isinstance(step, Send):
            carry = self.transport.copier(
                types.routes[number], ends[step.source], ends[step.target], number
            )
            return _send(step, of_copies(carry, self._lasting(step)))
        if isinstance(step, Start):
            return _start(step, _starter(step, types.starts[number], self.meshes[step.submesh]))
        return _free(step)

    def _lasting(self, send: Send) -> list[int]:
        """The numbers of transfers of what the step gives back: the next step may consume it.

        Within a process the runtime keeps what is under way; a process may fetch it later.
        """
        if not (self.host.is_crossing(send.source, send.target) and self.host.owns(send.source)):
            return []
        fetched = {(f.submesh, r) for f in self.program.fetches for r in f.registers}
        return [i for i, t in enumerate(send.transfers) if (send.source, t.source) in fetched]


def _run(run: Run, call: Callable[..., Any], submesh: int, admit: Admit) -> Action:
    read = _reader((*run.inputs, *run.accumulators))
    writes = (*run.outputs, *run.accumulators)

    def act(registers: Registers) -> Any:
        held = registers[submesh]
        *made, token = call(*read(held))
        for register, array in zip(writes, made, strict=True):
            held[register] = array
        admit(token)
        return token

    return act


def _run_alone(run: Run, call: Callable[..., Any], submesh: int) -> Action:
    """The run of a step's only program, which gives no token."""
    read, write = _reader(run.inputs), _writer(run.outputs)

    def act(registers: Registers) -> Any:
        held = registers[submesh]
        made = call(*read(held))
        write(held, made)
        return made[0] if made else None

    return act


def _send(send: Send, copy: Copier) -> Action:
    read = _reader([p.source for p in send.transfers])
    targets = [p.target for p in send.transfers]

    def act(registers: Registers) -> Any:
        arrived, there = copy(read(registers[send.source])), registers[send.target]
        for register, array in zip(targets, arrived, strict=True):
            there[register] = array
        return arrived[0]

    return act


def _starter(start: Start, kinds: Sequence[ArrayType], mesh: Mesh) -> Callable[[], Sequence[Any]]:
    """A program that makes every accumulator of a submesh."""

    def begin() -> list[Any]:
        pairs = zip(start.accumulators, kinds, strict=True)
        return [neutral(a.combiner, kind) for a, kind in pairs]

    out = [k.sharding(mesh) for k in kinds]
    return compat.direct(jax.jit(begin, out_shardings=out).lower().compile())


def _start(start: Start, make: Callable[[], Sequence[Any]]) -> Action:
    def act(registers: Registers) -> None:
        held = registers[start.submesh]
        for register, array in zip(start.registers, make(), strict=True):
            held[register] = array

    return act


def _free(free: Free) -> Action:
    freed = free.registers

    def act(registers: Registers) -> None:
        held = registers[free.submesh]
        for register in freed:
            held[register] = None

    return act


def _writer(registers: Sequence[int]) -> Callable[[list[Any], Sequence[Any]], None]:
    """Writes values to some registers, which mostly follow one another."""
    first, stop = registers[0] if registers else 0, registers[-1] + 1 if registers else 0
    if tuple(registers) == tuple(range(first, stop)):

        def write(held: list[Any], values: Sequence[Any]) -> None:
            held[first:stop] = values

        return write

    def scatter(held: list[Any], values: Sequence[Any]) -> None:
        for register, value in zip(registers, values, strict=True):
            held[register] = value

    return scatter


def _reader(registers: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """The values of some registers, always as a tuple."""
    if len(registers) > 1:
        return itemgetter(*registers)
    if not registers:
        return lambda held: ()
    only = registers[0]
    return lambda held: (held[only],)
