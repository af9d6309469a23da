"""The codec: the form of every hint, both ways, and the place that an error names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import pytest

from autopar.errors import InputError
from autopar.ir.codec import ByName, Codec, Item, Json, JsonError, Text, format_json, parse_json


class Colour(Enum):
    """One of two."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    """Written without names, where it is one of the rows."""

    x: int
    y: float = 0.0


@dataclass(frozen=True)
class Size:
    """Has a field only: written as that field, where it is one of the rows."""

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise InputError("a size has steps")


@dataclass(frozen=True)
class Whole:
    """Has a field of every form."""

    name: str
    text: Text
    colour: Colour
    word: Literal["up", "down"]
    maybe: Point | None
    points: tuple[Point, ...]
    pair: tuple[str, int]
    named: ByName[Point]
    size: Size
    flag: bool
    option: bool | int | str
    options: ByName[bool | int | str]


ROWS = (Point, Size)
WHOLE = Whole(
    "a", "one\ntwo", Colour.BLUE, "up", None, (Point(1, 0.5), Point(2)), ("b", 3),
    (("p", Point(1, 0.5)), ("q", Point(4))), Size((1, 2)), True,
    2, (("q", True), ("r", "x")),
)  # fmt: skip
DATA: dict[str, Json] = {
    "name": "a", "text": ["one", "two"], "colour": "blue", "word": "up", "maybe": None,
    "points": [[1, 0.5], [2, 0.0]], "pair": ["b", 3], "named": {"p": [1, 0.5], "q": [4, 0.0]},
    "size": [1, 2], "flag": True, "option": 2, "options": {"q": True, "r": "x"},
}  # fmt: skip


def test_every_form_is_written_and_read_back() -> None:
    assert Codec(ROWS).write(Whole, WHOLE) == DATA
    assert Codec(ROWS).read(Whole, Item(parse_json(format_json(DATA)))) == WHOLE


def test_shared_values_stand_once_in_a_table() -> None:
    written = Codec(ROWS, shared=Point)
    body = written.write(Whole, WHOLE)
    assert isinstance(body, dict)
    assert (body["points"], body["named"]) == ([0, 1], {"p": 0, "q": 2})
    table = written.write_table()
    assert table == [[1, 0.5], [2, 0.0], [4, 0.0]]
    read = Codec(ROWS, shared=Point)
    read.read_table(Item(table, "table"))
    assert read.read(Whole, Item(body)) == WHOLE
    with pytest.raises(JsonError, match=r"points\[1\]: expected the number of one of 3"):
        read.read(Whole, Item({**body, "points": [0, 3]}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": 1}, "name: expected a text, found 1"),
        ({"name": "\x1b[2J"}, "name: expected a text to be printed"),
        ({"text": "one"}, "text: expected a list, found 'one'"),
        ({"colour": "green"}, "colour: expected one of red, blue, found 'green'"),
        ({"word": "left"}, r"word: expected one of \('up', 'down'\), found 'left'"),
        ({"points": [[1]]}, r"points\[0\]: expected a list of 2 entries"),
        ({"points": [[True, 1.0]]}, r"points\[0\]\[0\]: expected a whole number, found True"),
        ({"points": [[2**63, 1.0]]}, r"points\[0\]\[0\]: expected a number of 64 bits"),
        ({"points": [[1, 10**100]]}, r"points\[0\]\[1\]: expected a finite number"),
        ({"named": {"%0": [1]}}, r"named\['%0'\]: expected a list of 2 entries"),
        ({"size": []}, "size: a size has steps"),
        ({"flag": 0}, "flag: expected true or false, found 0"),
        ({"option": 0.5}, "option: expected true, false, a whole number or a text, found 0.5"),
        ({"option": None}, "option: expected true, false, a whole number or a text, found None"),
        ({"options": {"q": [1]}}, "options.q: expected true, false, a whole number or a text"),
        ({"options": {"q": 2**63}}, "options.q: expected a number of 64 bits"),
        ({"other": 0}, "there should be no 'other'"),
    ],
)
def test_what_is_not_of_its_hint_is_refused_at_its_place(
    change: dict[str, Json], told: str
) -> None:
    with pytest.raises(JsonError, match=told):
        Codec(ROWS).read(Whole, Item({**DATA, **change}))


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(JsonError, match="expected an object with 'flag'"):
        Codec(ROWS).read(Whole, Item({k: v for k, v in DATA.items() if k != "flag"}))


def test_two_entries_of_one_name_are_not_written() -> None:
    with pytest.raises(TypeError, match="the same name"):
        Codec(ROWS).write(ByName[int], (("a", 1), ("a", 2)))


def test_what_fits_stands_on_a_line() -> None:
    assert format_json({"short": [1, [2, 3]], "long": ["x" * 60, "y" * 60], "none": []}) == (
        '{\n "short": [1, [2, 3]],\n "long": [\n'
        f'  "{"x" * 60}",\n  "{"y" * 60}"\n ],\n "none": []\n}}'
    )
