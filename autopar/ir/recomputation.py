"""The values that a plan computes again for the backward pass instead of keeping them."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.text import show_bytes, show_seconds


@dataclass(frozen=True)
class Recomputation:
    """Names of forward values of the step as it was traced; what that takes and saves a device.

    Values of a scan's body are made again in the body of the backward scan.
    """

    values: tuple[str, ...] = ()
    seconds: float = 0.0
    saved_bytes: int = 0

    def __str__(self) -> str:
        if not self.values:
            return "recomputes nothing"
        count = f"{len(self.values)} values" if len(self.values) > 1 else "1 value"
        return (
            f"recomputes {count}: +{show_seconds(self.seconds)} a step, saves "
            f"{show_bytes(self.saved_bytes)} a device"
        )
