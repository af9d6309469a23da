"""Figures of the page: a number of the data with its unit, its exact value and where it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from autopar.ir.codec import Json
from autopar.ir.text import show_bytes, show_count, show_seconds
from autopar.report.html.data import Data
from autopar.report.rows import numbers_text

_NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Figures:
    """Draws figures by their path in the data: "plan.predicted.seconds" is "212 ms"."""

    data: Data

    def figure(self, path: str, unit: str = "") -> Markup:
        """The figure at a path, hovering for its exact value and path; null is a dash.

        Its unit is told by the last key that is no number, or by another such key as `unit`.
        """
        value = self._at(path)
        if value is None:
            return Markup('<span class="none">&ndash;</span>')
        assert isinstance(value, int | float)
        key = unit or next(key for key in reversed(path.split(".")) if not key.isdecimal())
        show, counted = next((_UNITS[end] for end in _UNITS if key.endswith(end)), _COUNT)
        title = f"{f'{value:,} {counted}'.rstrip()} \N{MIDDLE DOT} {path}"
        return Markup('<data class="fig" value="{!r}" title="{}">{}</data>').format(
            value, title, unbroken(show(value))
        )

    def _at(self, path: str) -> Json:
        found: Json = self.data
        for key in path.split("."):
            if isinstance(found, dict):
                found = found[key]
            else:
                assert isinstance(found, list)
                found = found[int(key)]
        return found


def seconds(value: float) -> str:
    """A duration, its unit with it on one line: 85.2 µs; less than a picosecond is rounding."""
    return unbroken(show_seconds(value if abs(value) > 1e-12 else 0).replace(" us", " µs"))


def percent(share: float) -> str:
    """A share in per cent; what is there but rounds to nothing says so."""
    text = "<0.1%" if 0 < share < 0.0005 else f"{share:.0%}" if share in (0, 1) else f"{share:.1%}"
    return text.replace("%", f"{_NO_BREAK}%")


def more(share: float) -> str:
    """A difference in per cent, with its sign."""
    if abs(share) < 0.0005:
        return f"\N{PLUS-MINUS SIGN}0{_NO_BREAK}%"
    return f"{share * 100:+.1f}{_NO_BREAK}%".replace("-", "\N{MINUS SIGN}")


def unbroken(text: str) -> str:
    """Text that stays on one line."""
    return text.replace(" ", _NO_BREAK)


def _flop_rate(rate: float) -> str:
    """FLOP/s with a decimal prefix."""
    return unbroken(show_count(rate, "FLOP/s"))


def _type_text(dtype: str, shape: list[int]) -> str:
    """A type as the field writes it: f32[2048, 8192]."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _broken(path: str) -> Markup:
    """A path that may break after each slash."""
    return Markup("/<wbr>").join(path.split("/") if path else ["whole step"])


def _plural(count: int, one: str, many: str = "") -> str:
    """A count with its noun: 1 device, 8 devices."""
    return f"{count:,}{_NO_BREAK}{one if count == 1 else many or one + 's'}"


# By the end of a key: how such a figure is shown, and the unit of its exact value.
_UNITS: dict[str, tuple[Callable[[float], str], str]] = {
    "bytes_per_second": (partial(show_count, unit="B/s"), "B/s"),
    "items_per_second": (show_count, "a second"),
    "bytes": (show_bytes, "bytes"),
    "seconds": (seconds, "s"),
    "flops": (partial(show_count, unit="FLOP"), "FLOP"),
    "more_share": (more, "of 1"),
    "share": (percent, "of 1"),
    "gap": (percent, "of 1"),
    "ratio": ("{:.3f}".format, ""),
}
_COUNT = ("{:,}".format, "")
FILTERS: dict[str, Callable[..., str]] = {
    "seconds": seconds,
    "percent": percent,
    "more": more,
    "flop_rate": _flop_rate,
    "type_text": _type_text,
    "broken": _broken,
    "plural": _plural,
    "numbers": numbers_text,
}
