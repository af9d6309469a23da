"""A device that is present, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceFacts:
    """A device as JAX reports it; `memory_bytes` is 0 where it does not say.

    `coords` (x, y, z of its chip) is empty and `slice_index` 0 for anything but a TPU.
    """

    platform: str
    kind: str
    memory_bytes: int
    process_index: int
    coords: tuple[int, ...] = ()
    slice_index: int = 0
