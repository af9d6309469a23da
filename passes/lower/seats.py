"""When and where a part runs, and which of several parts that make a value another reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.ir.program import Part, PartKind

_RANK = {
    PartKind.FORWARD: 0,
    PartKind.BACKWARD: 1,
    PartKind.INPUT_GRADIENT: 1,
    PartKind.WEIGHT_GRADIENT: 2,
}
BACKWARD_KINDS = (PartKind.BACKWARD, PartKind.INPUT_GRADIENT, PartKind.WEIGHT_GRADIENT)


@dataclass(frozen=True)
class Seat:
    """The place of a part in the step: no two parts have the same."""

    kind: PartKind
    stage: int
    submesh: int
    loop: int = 0
    round: int = 0

    @classmethod
    def of(cls, part: Part) -> Seat:
        """The seat of a part."""
        return cls(part.kind, part.stage, part.submesh, part.loop, part.round)

    @property
    def is_looped(self) -> bool:
        """Whether it runs once for each microbatch."""
        return self.kind in _RANK

    @property
    def order(self) -> tuple[int, int]:
        """Its place in time; parts of one place run side by side or in the order of stages."""
        if self.kind is PartKind.HOIST:
            return (-2, 0)
        if self.kind is PartKind.SETUP:
            return (-1, self.round)
        if self.kind is PartKind.UPDATE:
            return (2 * self.loop + 1, self.round)
        return (2 * self.loop, _RANK[self.kind])

    @property
    def row(self) -> tuple[int, int, int]:
        """Where it stands among the parts: in time, then by stage, backwards from the last."""
        first, second = self.order
        return (first, second, -self.stage if self.kind in BACKWARD_KINDS else self.stage)

    def comes_before(self, reader: Seat) -> bool:
        """Whether another part may read what this one makes."""
        if self.order == reader.order:
            return self.is_looped and self.stage != reader.stage
        return self.order < reader.order


def end_of_step(submesh: int) -> Seat:
    """A seat after all parts, for what a submesh returns; -1 for whichever submesh has it."""
    return Seat(PartKind.UPDATE, -1, submesh, loop=1 << 30)


def chosen(makers: Iterable[Seat], reader: Seat) -> Seat | None:
    """Which maker of a value a part reads; None where none of them comes before it.

    One of its own submesh; of these one of its own stage, the last before it; else the earliest.
    """
    before = [m for m in makers if m.comes_before(reader)]
    return min(before, key=lambda maker: (*_distance(maker, reader), maker.stage), default=None)


def _distance(maker: Seat, reader: Seat) -> tuple[int, ...]:
    first, second = maker.order
    if (maker.submesh, maker.stage) == (reader.submesh, reader.stage):
        return (0, 0, -maker.loop, -first, -second)
    # What another stage recomputes for its backward pass, it keeps for itself.
    is_again = int(maker.kind in BACKWARD_KINDS)
    return (int(maker.submesh != reader.submesh), 1 + is_again, -maker.loop, first, second)
