"""The rate of a step: items a second, and the share of the devices' peak that its model needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.text import show_count

_SEQUENCES = 2  # dims of a batch of tokens: rows and places in them
_INTEGERS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")


@dataclass(frozen=True)
class Rate:
    """The rate of a step that takes so many seconds, predicted or measured.

    `mfu` is the model FLOPs utilization, model FLOPs / (peak FLOP/s of all devices x seconds); None
    where a step has no products. `items` is "tokens" or "samples".
    """

    seconds: float
    mfu: float | None
    items: str
    items_per_second: float

    def __str__(self) -> str:
        mfu = f"{self.mfu:.1%} MFU, " if self.mfu is not None else ""
        return f"{mfu}{show_count(self.items_per_second)} {self.items}/s"


def items_of_batch(arrays: Sequence[tuple[tuple[int, ...], str]]) -> tuple[int, str]:
    """The items that a step's batch has, and their word, from the shape and dtype of each array.

    Integers in rows and places are tokens, where all other arrays of the batch have those rows and
    places too; else the longest first dim counts the samples.
    """
    ids = [shape for shape, dtype in arrays if len(shape) == _SEQUENCES and dtype in _INTEGERS]
    wide = [shape for shape, _ in arrays if len(shape) >= _SEQUENCES]
    if ids and all(shape[:_SEQUENCES] == ids[0] for shape in wide):
        return ids[0][0] * ids[0][1], "tokens"
    return max((shape[0] for shape, _ in arrays if shape), default=1), "samples"
