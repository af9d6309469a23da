"""The logical mesh: named axes with sizes, and nothing about devices."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from autopar.errors import MeshError

# Slowest axis first: the last axis joins the devices that are closest to each other.
DEFAULT_NAMES: tuple[tuple[str, ...], ...] = (
    (),
    ("data",),
    ("data", "model"),
    ("replica", "data", "model"),
)


@dataclass(frozen=True)
class MeshShape:
    """Axis names and sizes, slowest axis first."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise MeshError(f"mesh has {len(self.names)} names but {len(self.sizes)} sizes")
        if len(set(self.names)) != len(self.names):
            raise MeshError(f"mesh axis names {list(self.names)} are not distinct")
        for name, size in zip(self.names, self.sizes, strict=True):
            if not _is_size(size) or not name.isidentifier():
                raise MeshError(f"mesh axis {name!r}={size} needs an identifier and a size >= 1")

    @property
    def device_count(self) -> int:
        """The number of devices that the mesh spans."""
        return math.prod(self.sizes)

    def size(self, axes: Sequence[str]) -> int:
        """The product of the sizes of some axes."""
        return math.prod(self.sizes[self.names.index(a)] for a in axes)

    def __str__(self) -> str:
        return ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) or "1"

    @classmethod
    def of(cls, given: MeshShape | str | int | Sequence[int] | Mapping[str, int]) -> MeshShape:
        """A mesh from "2,4", "data=2,model=4", 8, (2, 4), {"data": 2, "model": 4} or itself.

        Raises MeshError where the text or the sizes make no mesh.
        """
        if isinstance(given, MeshShape):
            return given
        if isinstance(given, str):
            return _from_text(given)
        if isinstance(given, Mapping):
            return cls(tuple(map(str, given)), tuple(map(_size, given.values())))
        sizes = (given,) if isinstance(given, int) else tuple(map(_size, given))
        if len(sizes) >= len(DEFAULT_NAMES):
            raise MeshError(
                f"mesh {sizes} has {len(sizes)} axes; unnamed meshes have at most "
                f"{len(DEFAULT_NAMES) - 1}. Name the axes: 'a=2,b=2,c=2,d=2'."
            )
        return cls(DEFAULT_NAMES[len(sizes)], sizes)


def _size(given: object) -> int:
    """A whole number of any type; what is none is left for the mesh to refuse."""
    is_bool = isinstance(given, bool)
    return operator.index(given) if isinstance(given, SupportsIndex) and not is_bool else given  # type: ignore[return-value]  # pyright: ignore[reportReturnType]


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def _from_text(text: str) -> MeshShape:
    parts = [p.strip() for p in text.replace("x", ",").split(",")] if "=" not in text else None
    try:
        if parts is not None:
            return MeshShape.of([int(p) for p in parts])
        pairs = [p.split("=") for p in text.split(",")]
        return MeshShape(tuple(k.strip() for k, _ in pairs), tuple(int(v) for _, v in pairs))
    except ValueError:
        raise MeshError(
            f"mesh {text!r} is not understood; write sizes '2,4' or names 'data=2,model=4'"
        ) from None
