"""Variants of the lower slot: stages as programs of their own, as one, or the faster of the two.

lower=mpmd   each part of each stage is a program; a host walks the list of runs and sends
lower=spmd   one program holds them all, and its devices take their turns by themselves
lower=auto   that of the two which takes less by the simulator, where both can be had
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from autopar.cost.reshard import Resharder
from autopar.errors import LoweringError
from autopar.ir.program import Program
from autopar.ir.spmd_program import SpmdProgram
from autopar.ir.text import show_bytes
from autopar.passes.base import AbstractPass, Setting
from autopar.passes.lower.spmd_program import lower_spmd

# One program gives up the timeline of its parts and their bits: it has to be clearly faster.
_CLEARLY = 0.8
# Where programs whose devices part ways between collectives are known to run.
_PROVEN = ("cpu",)


@dataclass(frozen=True)
class LoweredStages:
    """Stages as a list of instructions, with the seconds and bytes of that or of one program.

    `resharder` is of a submesh, `platform` the devices' kind.
    """

    program: Program
    resharder: Resharder
    platform: str
    seconds: Callable[[Program | SpmdProgram], float]
    peak_bytes: Callable[[SpmdProgram], int]


@dataclass(frozen=True)
class AbstractLowering(AbstractPass[LoweredStages, Program | SpmdProgram]):
    """Lowers stages to what the devices run."""

    @abc.abstractmethod
    def run(self, given: LoweredStages, setting: Setting) -> Program | SpmdProgram:
        """The list of instructions, or one program; raises LoweringError where there is none."""


@dataclass(frozen=True)
class Mpmd(AbstractLowering):
    """Many programs: a list of instructions."""

    name: ClassVar[str] = "mpmd"

    def run(self, given: LoweredStages, setting: Setting) -> Program:
        """The list as it is."""
        return given.program


@dataclass(frozen=True)
class Spmd(AbstractLowering):
    """A single program, in which stages take turns by ticks."""

    name: ClassVar[str] = "spmd"

    def run(self, given: LoweredStages, setting: Setting) -> SpmdProgram:
        """The list as one SPMD program. Raises LoweringError where it cannot be or does not fit."""
        spmd = lower_spmd(given.program, given.resharder)
        peak = given.peak_bytes(spmd)
        if peak > setting.memory_bytes:
            raise LoweringError(
                f"one program of all stages holds {show_bytes(peak)} on a device, of "
                f"{show_bytes(setting.memory_bytes)}: {show_bytes(spmd.unused_bytes)} of it are "
                "room for state of other stages. Leave lower=spmd out, or use more stages."
            )
        return spmd


@dataclass(frozen=True)
class Faster(AbstractLowering):
    """The clearly faster of the two, by the simulator."""

    name: ClassVar[str] = "auto"

    def run(self, given: LoweredStages, setting: Setting) -> Program | SpmdProgram:
        """The one program where it can be had, is known to run, fits, and is clearly faster."""
        if given.platform not in _PROVEN:
            return given.program
        try:
            spmd = Spmd().run(given, setting)
        except LoweringError:
            return given.program
        limit = _CLEARLY * given.seconds(given.program)
        return spmd if given.seconds(spmd) < limit else given.program


def lowering_named(name: str) -> AbstractLowering:
    """The lowering that a plan records: mpmd or spmd."""
    return Spmd() if name == Spmd.name else Mpmd()
