"""A task of one device at one time: a kind of work, of one stage, for one microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The part of its stage that a task computes.

    A BACKWARD is an INPUT_GRADIENT and a WEIGHT_GRADIENT in one: a grid has either it or those two.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


@dataclass(frozen=True, order=True, slots=True)
class Task:
    """A kind of work of one stage for one microbatch; prints as F2.0, stage before microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"
