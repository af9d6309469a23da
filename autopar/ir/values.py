"""Values: the tensors that flow through a graph, and what they weigh."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

_ITEM_BYTES = {
    "bool": 1, "i4": 1, "u4": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4,
    "i64": 8, "u64": 8, "f8": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
_KEY_BYTES = 8
_UNKNOWN_BYTES = 1


class Role(Enum):
    """The role of a graph input in the step."""

    STATE = "state"  # comes back among the outputs: parameters, optimizer state, counters
    BATCH = "batch"  # given anew at every step
    CONSTANT = "constant"  # closed over by the step


def item_bytes(dtype: str) -> int:
    """Bytes of one item; typed random keys weigh their two words, fp8 kinds one byte."""
    known = _ITEM_BYTES.get(dtype)
    if known is not None:
        return known
    if dtype.startswith("key"):
        return _KEY_BYTES
    return 1 if dtype.startswith("f8") else _UNKNOWN_BYTES


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: its name in the graph, shape and dtype ("f32", "bf16", "i32", "key", ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def item_count(self) -> int:
        """The number of items of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.item_count * item_bytes(self.dtype)

    @property
    def is_floating(self) -> bool:
        """True if sums over shards make sense to leave for later (inexact types only)."""
        return self.dtype[0] in "fc" or self.dtype == "bf16"

    def __str__(self) -> str:
        return f"{self.name}: {self.type_text}"

    @property
    def type_text(self) -> str:
        """The type as it prints: f32[64,512]."""
        return _type_text(self.dtype, self.shape)


@lru_cache(maxsize=4096)
def _type_text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant written into an op's operand list; an array's text is "opaque"."""

    text: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def is_zero(self) -> bool:
        """True if it is known to add nothing to a sum."""
        try:
            return float(self.text) == 0.0
        except ValueError:
            return False

    def __str__(self) -> str:
        dims = f"[{','.join(map(str, self.shape))}]" if self.shape else ""
        return f"{self.text}:{self.dtype}{dims}"


@dataclass(frozen=True)
class Input:
    """A graph input: a value, what it is to the step, and its path in the user's trees."""

    value: Value
    role: Role = Role.BATCH
    path: str = ""

    @property
    def note_text(self) -> str:
        """Role and path as they print; a batch value with no path has neither."""
        if not self.path:
            return "" if self.role is Role.BATCH else self.role.value
        return f"{self.role.value} {json.dumps(self.path, ensure_ascii=False)}"

    def __str__(self) -> str:
        return f"{self.value} {self.note_text}".rstrip()
