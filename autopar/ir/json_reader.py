"""Reads JSON by type and tells the place of what is wrong: nothing is guessed, nothing left over.

A place is written like `pipeline.stages[2].stop`. Numbers must be finite and fit 64 bits.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import NoReturn, TypeVar

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Choice = TypeVar("Choice", bound=Enum)

_LARGEST = 2**63
_DIGITS = 400
_SHOWN = 40
# Control characters but for tab and newline, and halves of characters: a terminal obeys the first,
# and nothing can write the second.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class JsonError(ValueError):
    """JSON that is not what its reader expects; the message names the place."""


def parse_json(text: str) -> Json:
    """The value of a text; raises JsonError where it is no JSON, or JSON that no writer writes.

    That is an object with one key twice, a number that is not finite, or one of thousands of
    digits.
    """
    try:
        parsed: Json = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_not_finite, parse_int=_whole
        )
        return parsed
    except json.JSONDecodeError as error:
        raise JsonError(str(error)) from None
    except RecursionError:
        raise JsonError("its lists and objects are nested too deeply") from None


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise JsonError(f"an object has the key {shown(twice)} twice")
    return found


def _not_finite(text: str) -> NoReturn:
    raise JsonError(f"{text} is no number in JSON")


def _whole(text: str) -> int:
    if len(text) > _DIGITS:  # Python itself would refuse some thousands
        raise JsonError(f"a number of {len(text)} digits, {text[:12]}..., does not fit 64 bits")
    return int(text)


def shown(value: object) -> str:
    """A value as it stands in a message: escaped, and cut off where it is long."""
    text = repr(value[: 2 * _SHOWN] if isinstance(value, str) else value)
    return text.encode("ascii", "backslashreplace").decode() if len(text) <= _SHOWN else (
        text[:_SHOWN].encode("ascii", "backslashreplace").decode() + "..."
    )  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A JSON value and its place in the file; reading it as another type raises JsonError."""

    value: Json
    place: str = ""

    def fail(self, expected: str) -> NoReturn:
        """Raise JsonError: at this place, something else was expected."""
        where = f"{self.place}: " if self.place else ""
        raise JsonError(f"{where}expected {expected}, found {shown(self.value)}")

    def text(self) -> str:
        """A text that can be printed: lines and tabs, but no other control characters."""
        value = self.value
        if not isinstance(value, str):
            self.fail("a text")
        return value if _UNPRINTABLE.search(value) is None else self.fail("a text to be printed")

    def flag(self) -> bool:
        """True or false."""
        return self.value if isinstance(self.value, bool) else self.fail("true or false")

    def whole(self) -> int:
        """A whole number of 64 bits; true and false are none."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail("a whole number")
        return value if -_LARGEST <= value < _LARGEST else self.fail("a number of 64 bits")

    def number(self) -> float:
        """A finite number."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail("a number")
        # Larger ones are infinite as floats are read: 1e400.
        return float(value) if abs(value) <= _LARGEST**4 else self.fail("a finite number")

    def one_of(self, kind: type[Choice]) -> Choice:
        """A member of an enumeration, written as its value."""
        found = next((member for member in kind if member.value == self.text()), None)
        names = ", ".join(str(member.value) for member in kind)
        return found if found is not None else self.fail(f"one of {names}")

    def items(self) -> list[Item]:
        """The entries of a list."""
        value = self.value
        if not isinstance(value, list):
            self.fail("a list")
        return [Item(entry, f"{self.place}[{i}]") for i, entry in enumerate(value)]

    def row(self, length: int) -> list[Item]:
        """The entries of a list that has so many."""
        entries = self.items()
        return entries if len(entries) == length else self.fail(f"a list of {length} entries")

    def texts(self) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(entry.text() for entry in self.items())

    def wholes(self) -> tuple[int, ...]:
        """A list of whole numbers."""
        return tuple(entry.whole() for entry in self.items())

    def numbers(self) -> tuple[float, ...]:
        """A list of numbers."""
        return tuple(entry.number() for entry in self.items())

    def pairs(self) -> list[tuple[str, Item]]:
        """The fields of an object, whatever their names."""
        value = self.value
        if not isinstance(value, dict):
            self.fail("an object")
        if any(_UNPRINTABLE.search(key) for key in value):
            self.fail("names that can be printed")
        return [(key, Item(entry, self._inside(key))) for key, entry in value.items()]

    def fields(self) -> Fields:
        """An object whose fields are known by name."""
        return Fields(self, dict(self.pairs()))

    def _inside(self, key: str) -> str:
        name = key if key.isidentifier() else f"[{shown(key)}]"
        return f"{self.place}.{name}" if self.place and key.isidentifier() else self.place + name


@dataclass(frozen=True)
class Fields:
    """The fields of an object, asked for by name; `end` refuses those that nobody asked for."""

    whole: Item
    _held: dict[str, Item]
    _asked: set[str] = field(default_factory=set[str])

    def __getitem__(self, key: str) -> Item:
        found = self.get(key)
        return found if found is not None else self.whole.fail(f"an object with {key!r}")

    def get(self, key: str) -> Item | None:
        """The field, None where it is not there."""
        self._asked.add(key)
        return self._held.get(key)

    def given(self, key: str) -> Item | None:
        """The field, None where it is null or not there."""
        found = self.get(key)
        return found if found is not None and found.value is not None else None

    def end(self) -> None:
        """Raise JsonError where there are fields that nobody asked for."""
        unknown = [key for key in self._held if key not in self._asked]
        if unknown:
            where = f"{self.whole.place}: " if self.whole.place else ""
            names = ", ".join(map(shown, unknown[:3]))
            raise JsonError(f"{where}there should be no {names}")
