"""PipeDream's partition of a profiled model, with links in words: 4x100Gbit/s,8x10Gbit/s."""

from __future__ import annotations

import re

from autopar.errors import InputError
from autopar.passes.stage.pipedream import Level as Level
from autopar.passes.stage.pipedream import Partition as Partition
from autopar.passes.stage.pipedream import PipelineStage as PipelineStage
from autopar.passes.stage.pipedream import Sync as Sync
from autopar.passes.stage.pipedream import partition as partition

_BANDWIDTH = re.compile(r"(?P<number>.+?)\s*(?P<prefix>[kKMGT]?)(?P<unit>i?B|i?bytes?|bits?)/s")
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"k": 2.0**10, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}


def read_level(text: str) -> Level:
    """A level as 4x100Gbit/s; raises InputError."""
    count, times, bandwidth = text.partition("x")
    if not times or not count.strip().isdecimal():
        raise InputError(
            f"level {text!r} is not understood; write a count and a bandwidth, as 4x100Gbit/s"
        )
    return Level(int(count), bytes_per_ms(bandwidth))


def bytes_per_ms(text: str) -> float:
    """A bandwidth as 10Gbit/s, 100Mbit/s, 1.25GB/s, 1GiB/s or 1e9bytes/s; raises InputError."""
    read = _BANDWIDTH.fullmatch(text.strip())
    number = _number(read["number"]) if read is not None else None
    if read is None or number is None:
        raise InputError(
            f"bandwidth {text!r} is not understood; write a number and a unit, as 10Gbit/s, "
            "100Mbit/s, 1.25GB/s, 1GiB/s or 1e9bytes/s"
        )
    prefix, unit = read["prefix"], read["unit"]
    if unit.startswith("i") and not prefix:
        raise InputError(f"bandwidth {text!r} has an i with no K, M, G or T before it")
    scale = _BINARY[prefix] if unit.startswith("i") else _DECIMAL[prefix]
    found = number * scale / (8 if unit.startswith("bit") else 1) / 1e3
    if not 0 < found < float("inf"):
        raise InputError(f"bandwidth {text!r} cannot be used: give a positive one, as 10Gbit/s")
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
