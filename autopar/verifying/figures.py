"""Puts what was predicted of a program beside what a compiler made of it, and judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.compiled import CheckLevel, Compiled
from autopar.ir.spmd import COLLECTIVES
from autopar.ir.verification import CompiledPart, Figure, Unit
from autopar.verifying.programs import PlannedProgram
from autopar.verifying.realised import Realised, compare_collectives

BYTES_SHARE = 0.05  # by which bytes of collectives and arguments may be off
UNDER_SHARE = 0.02  # of the compiler's peak, by which a prediction may be below it
# Of a device's memory, as compilers pad small arrays, and of all that a program sends: what is less
# decides nothing.
NEGLIGIBLE_SHARE = 0.001


@dataclass(frozen=True)
class Judge:
    """The rules of agreement, for devices of so many bytes and of a platform."""

    level: CheckLevel
    platform: str
    device_bytes: int

    def part(self, program: PlannedProgram, compiled: Compiled) -> CompiledPart:
        """The figures of the level: collectives, arguments and the peak decide.

        Of a program that does not fit a TPU its compiler tells no more than that.
        """
        found = compare_collectives(program.collectives, compiled.collectives)
        is_whole = not compiled.out_of_memory or bool(compiled.hlo)
        figures = list(_traffic(found)) if is_whole else []
        if self.level is not CheckLevel.COLLECTIVES:
            figures += [*self._memory(program, compiled), *self._seconds(program, compiled)]
        return CompiledPart(
            name=program.name,
            figures=tuple(figures),
            compiled=compiled,
            device_bytes=self.device_bytes,
            differences=tuple(map(str, found.differences)) if is_whole else (),
            alike=program.alike,
        )

    def _memory(self, program: PlannedProgram, compiled: Compiled) -> Iterator[Figure]:
        mine, theirs = program.argument_bytes, compiled.argument_bytes
        if theirs:
            near = abs(mine - theirs) <= BYTES_SHARE * theirs
            yield self._held("arguments", mine, theirs, near)
        mine, theirs = program.peak_bytes, compiled.peak_bytes
        if self.platform == "cpu":
            yield Figure("peak", Unit.BYTES, mine, theirs)
        else:
            yield self._held("peak", mine, theirs, mine >= theirs * (1 - UNDER_SHARE))

    def _held(self, name: str, mine: int, theirs: int, near: bool) -> Figure:
        negligible = not near and abs(mine - theirs) <= NEGLIGIBLE_SHARE * self.device_bytes
        return Figure(name, Unit.BYTES, mine, theirs, near or negligible, negligible)

    def _seconds(self, program: PlannedProgram, compiled: Compiled) -> Iterator[Figure]:
        # XLA's GPU compiler takes about 10 us for a convolution, whatever it does: that is no time.
        if compiled.seconds is None or "__cudnn$conv" in compiled.hlo:
            return
        if self.platform == "tpu":  # kernels alone: its collectives have no cycles
            yield Figure(
                "work, collectives left out", Unit.SECONDS, program.busy_seconds, compiled.seconds
            )
            return
        yield Figure("all of it", Unit.SECONDS, program.seconds, compiled.seconds)
        if compiled.exposed_seconds is not None:
            yield Figure(
                "waiting for collectives", Unit.SECONDS, program.exposed_seconds,
                compiled.exposed_seconds,
            )  # fmt: skip


def _traffic(found: Realised) -> Iterator[Figure]:
    """Bytes by kind and axes, those of collectives that the compiler added or dropped as well.

    Of a kind of which some groups of devices are those of no axes only the sum can be compared.
    """
    unplaced = {r.kind for r in found.rows if not r.axes and r.compiled_bytes}
    planned, real = Counter[tuple[str, tuple[str, ...]]](), Counter[tuple[str, tuple[str, ...]]]()
    for row in found.rows:
        key = row.kind, () if row.kind in unplaced else row.axes
        planned[key] += row.planned_bytes
        real[key] += row.compiled_bytes
    order = {kind: i for i, kind in enumerate(COLLECTIVES)}
    all_bytes = max(planned.total(), real.total())
    for kind, axes in sorted({*planned, *real}, key=lambda k: (order[k[0]], k[1])):
        mine, theirs = planned[kind, axes], real[kind, axes]
        where = f" over {' + '.join(axes)}" if axes else ""
        near = abs(mine - theirs) <= BYTES_SHARE * theirs
        negligible = not near and abs(mine - theirs) <= NEGLIGIBLE_SHARE * all_bytes
        yield Figure(
            f"{kind}{where}", Unit.BYTES, mine, theirs, near or negligible, negligible, kind, axes
        )
