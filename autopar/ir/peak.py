"""The peak of a step: when a device holds the most, and what it holds then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from autopar.errors import GraphError
from autopar.ir.sharding import MeshShape, Sharding

SHOWN_ITEMS = 10


class HeldKind(Enum):
    """The kind of a held value, to the step."""

    PARAMETER = "parameter"  # state that the forward or backward pass reads
    OPTIMIZER = "optimizer state"  # state that only the update reads
    BATCH = "batch"
    CONSTANT = "constant"
    ACTIVATION = "activation"  # made in the forward pass, kept for the backward pass
    GRADIENT = "gradient"  # made in the backward pass for the update
    COLLECTIVE = "collective"  # what a collective gathered or has yet to scatter
    TEMPORARY = "temporary"


@dataclass(frozen=True)
class HeldItem:
    """A value that is held at the peak: an argument by its path, any other by module and op."""

    name: str
    kind: HeldKind
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    local_bytes: int
    line: str  # the user's file:line that makes it; "" for an argument


@dataclass(frozen=True)
class Peak:
    """The moment of a step at which a device holds the most.

    `step_share` says how far through the step it is, in kernels run; `items` are the largest
    values held, the largest first, and `totals` the bytes of all of them by kind.
    """

    op: str
    module: str
    region: str
    line: str
    step_share: float
    items: tuple[HeldItem, ...]
    totals: tuple[tuple[HeldKind, int], ...]

    def verify(self, meshes: Iterable[MeshShape]) -> None:
        """Raise GraphError unless everything that is held fits one of the meshes."""
        if not 0 <= self.step_share <= 1 or min((n for _, n in self.totals), default=0) < 0:
            raise GraphError(f"the peak is at {self.step_share} of the step")
        for item in self.items:
            fits = any(item.sharding.fits(item.shape, mesh) for mesh in meshes)
            if min(item.local_bytes, *item.shape, 0) < 0 or not fits:
                raise GraphError(
                    f"{item.name} {item.dtype}{list(item.shape)} is not held as {item.sharding}"
                )

    def __str__(self) -> str:
        return f"{self.where}, after {self.step_share:.0%} of its kernels"

    @property
    def where(self) -> str:
        """The op, its region, module and line; of an op with no line, a value held then that has.

        Such an op is of a library or of JAX itself, and its region tells its user nothing.
        """
        if self.line or not (lines := [i for i in self.items if i.line]):
            return " ".join(p for p in (self.region, self.op, self.module, self.line) if p)
        near = lines[0]
        return f"{' '.join(p for p in (self.op, self.module) if p)} beside {near.name} {near.line}"
