"""Reads JSON objects by type: a wrong type or a missing field raises, nothing is guessed."""

from __future__ import annotations

from typing import TypeVar

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
T = TypeVar("T")


class Reader:
    """A JSON object whose fields are read by type; a wrong type raises TypeError."""

    def __init__(self, data: Json) -> None:
        self._data = an_object(data)

    def text(self, key: str) -> str:
        """The text at a key."""
        return typed(self._data[key], str)

    def whole(self, key: str) -> int:
        """The whole number at a key."""
        return typed(self._data[key], int)

    def flag(self, key: str) -> bool:
        """The true or false at a key."""
        return typed(self._data[key], bool)

    def number(self, key: str, missing: float | None = None) -> float:
        """The number at a key; where it is not there, `missing` if that is given."""
        if missing is not None and key not in self._data:
            return missing
        return _number(self._data[key])

    def has(self, key: str) -> bool:
        """Whether something other than null is at a key."""
        return self._data.get(key) is not None

    def inner(self, key: str) -> Reader:
        """The object at a key."""
        return Reader(self._data[key])

    def items(self, key: str, missing: tuple[()] | None = None) -> list[Json]:
        """The list at a key; where it is not there, none if that is allowed."""
        return [] if missing is not None and key not in self._data else a_list(self._data[key])

    def pairs(self, key: str) -> list[tuple[str, Json]]:
        """The fields of the object at a key."""
        return list(an_object(self._data[key]).items())


def typed(value: Json, kind: type[T]) -> T:
    """The value, if it is of the type."""
    if not isinstance(value, kind):
        raise TypeError(f"{str(value)[:40]!r} is not of type {kind.__name__}")
    return value


def an_object(value: Json) -> dict[str, Json]:
    """The value, if it is an object."""
    if not isinstance(value, dict):
        raise TypeError(f"{str(value)[:40]!r} is no object")
    return value


def a_list(value: Json) -> list[Json]:
    """The value, if it is a list."""
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:40]!r} is no list")
    return value


def ints(value: Json) -> tuple[int, ...]:
    """A list of whole numbers."""
    return tuple(typed(v, int) for v in a_list(value))


def numbers(value: Json) -> tuple[float, ...]:
    """A list of numbers."""
    return tuple(_number(v) for v in a_list(value))


def texts(value: Json) -> tuple[str, ...]:
    """A list of texts."""
    return tuple(typed(v, str) for v in a_list(value))


def _number(value: Json) -> float:
    return float(value) if isinstance(value, int) else typed(value, float)


def row_of(value: Json, length: int) -> list[Json]:
    """A list of so many entries; raises ValueError where it has others."""
    row = a_list(value)
    if len(row) != length:
        raise ValueError(f"a row of {len(row)} entries should have {length}")
    return row
