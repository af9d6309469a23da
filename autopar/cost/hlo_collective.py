"""One collective of a compiled program, as its optimized HLO has it."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.collective import CollectiveKind
from autopar.cost.hlo_groups import Groups
from autopar.cost.hlo_parts import HloPart
from autopar.cost.hlo_source import Origin


@dataclass(frozen=True)
class HloCollective:
    """One collective of a program and how often one step runs it.

    `kind` is what the op amounts to, not always its opcode. `parts` are the tensors that it moves,
    several where XLA combined them. `groups` are devices by their place in the device assignment,
    which is the mesh, row-major. `axes` are the mesh axes they run over (a permute's: those that it
    crosses), () where they are those of no axes, or no mesh was given.
    """

    kind: CollectiveKind
    name: str
    parts: tuple[HloPart, ...]
    groups: Groups
    trips: int
    origin: Origin
    axes: tuple[str, ...] = ()
    between_slices: bool = False

    @property
    def dtype(self) -> str:
        """HLO's dtype of the first tensor."""
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        """The whole local buffer of one device and one run, in the sense of Prices.collective.

        That is the result of an all-gather, the operands of any other kind, without padding.
        """
        return sum(part.nbytes for part in self.parts)

    @property
    def op_name(self) -> str:
        """JAX's name of the op with its scopes, "" where the compiler lost it."""
        return self.origin.op_name

    @property
    def source(self) -> str:
        """The user's "file:line", "" where the compiler lost it."""
        return self.origin.line

    @property
    def group_size(self) -> int:
        """Devices in the largest group."""
        return max(len(group) for group in self.groups)

    @property
    def total_bytes(self) -> int:
        """Bytes of all the runs in one step."""
        return self.nbytes * self.trips
