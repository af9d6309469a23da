"""Numbers with their units, types and columns, as they print everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

_DIGITS = 4  # of a limit, rounded up so that it is enough as it stands
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_COUNTS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def show_bytes(count: float) -> str:
    """Bytes with a binary unit: 1536 -> '1.50 KiB'."""
    size, unit = float(count), 0
    while abs(size) >= 1024 and unit < len(_BYTES) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{_three_digits(size)} {_BYTES[unit]}"


def limit_gib(nbytes: float) -> float:
    """A memory limit in GiB that so many bytes keep, of a few digits: 1.2e9 -> 1.118."""
    gib = nbytes / 2**30
    scale = 10.0 ** (_DIGITS - 1 - math.floor(math.log10(max(gib, 1e-12))))
    return (math.floor(gib * scale) + 1) / scale


def show_seconds(seconds: float) -> str:
    """A duration with a fitting unit: 0.0015 -> '1.50 ms'."""
    if seconds == 0:
        return "0 s"
    for scale, unit in _SECONDS:
        if abs(seconds) >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{seconds / 1e-9:.3f} ns"


def show_count(count: float, unit: str = "") -> str:
    """A count with a decimal prefix: 134217728, 'FLOP' -> '134 MFLOP'."""
    for scale, prefix in _COUNTS:
        if abs(count) >= scale:
            return f"{_three_digits(count / scale)} {prefix}{unit}".rstrip()
    return f"{count:.0f} {unit}".rstrip()


def show_type(dtype: str, shape: Sequence[int]) -> str:
    """A tensor's type: f32[64,128]."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def _three_digits(number: float) -> str:
    size = abs(number)
    if size >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if size >= 9.995 else f"{number:.2f}"


def columns(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Rows as lines whose cells line up; the last cell of a row is not padded."""
    if not rows:
        return []
    count = max(len(r) for r in rows)
    widths = [max((len(r[i]) for r in rows if i < len(r)), default=0) for i in range(count)]
    return [
        indent
        + "  ".join(
            cell if i == len(row) - 1 else cell.ljust(widths[i]) for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def brief(text: object, most: int = 600) -> str:
    """A text as an error may quote it: what a file holds may be endless."""
    told = str(text)
    return told if len(told) <= most else f"{told[:most]}..."
