"""Dataclasses as JSON and back, by their type hints: nothing is guessed, and nothing left over.

The form in JSON follows from the hint:

    str, int, float, bool     as in JSON; numbers are finite and of 64 bits, texts can be printed
    Text                      a text of many lines: the list of its lines, repetitions folded
    an Enum, Literal[...]     the value of the member, one of the words
    X | None                  X, or null
    bool | int | str          the one of them that the value is
    tuple[X, ...]             a list, repetitions folded (`autopar.ir.repeats`)
    tuple[X, Y]               a list of two
    ByName[X], dict[str, X]   an object of X by name; where these repeat, a folded list of pairs
    a dataclass               an object of its fields; one of `rows` a list of them, without names,
                              and where it has one field only, that field alone
    the class `shared`        a number: each distinct one stands once in a table of the document

What is read is checked in the same order: types, then `__post_init__`. What the values mean
together is for the `verify` of the classes. An error names the place, as `submeshes[2].stop`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from autopar.errors import AutoparError
from autopar.ir.repeats import fold, fold_lines, unfold, unfold_lines

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Choice = TypeVar("Choice", bound=Enum)
T = TypeVar("T")

Text = Annotated[str, "lines"]
ByName = Annotated[tuple[tuple[str, T], ...], "by name"]

_LARGEST = 2**63
_DIGITS = 400
_SHOWN = 40
_WIDTH = 100
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

    def unfolded(self) -> list[Item]:
        """The entries of a list in which those that repeat are written once."""
        return self._unfolded(unfold).items()

    def lines(self) -> list[Item]:
        """The lines of a text that is written so."""
        return self._unfolded(unfold_lines).items()

    def named(self) -> list[tuple[str, Item]]:
        """The fields of an object, or of a list of pairs that is written so; no name twice."""
        if not isinstance(self.value, list) or not any(isinstance(e, dict) for e in self.value):
            return self.pairs()
        pairs = [entry.row(2) for entry in self.unfolded()]
        if len({name.text() for name, _ in pairs}) < len(pairs):
            self.fail("entries whose names differ")
        return [(name.text(), entry) for name, entry in pairs]

    def _unfolded(self, unfolding: Callable[[list[Json]], list[Json]]) -> Item:
        value = self.value
        if not isinstance(value, list):
            self.fail("a list")
        try:
            return Item(unfolding(value), self.place)
        except ValueError as error:
            raise JsonError(f"{self.place}: {error}") from None

    def row(self, length: int) -> list[Item]:
        """The entries of a list that has so many."""
        entries = self.items()
        return entries if len(entries) == length else self.fail(f"a list of {length} entries")

    def texts(self) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(entry.text() for entry in self.items())

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

    def end(self) -> None:
        """Raise JsonError where there are fields that nobody asked for."""
        unknown = [key for key in self._held if key not in self._asked]
        if unknown:
            where = f"{self.whole.place}: " if self.whole.place else ""
            names = ", ".join(map(shown, unknown[:3]))
            raise JsonError(f"{where}there should be no {names}")


# -- by type hints ---------------------------------------------------------------------------------


class Codec:
    """Writes or reads one document, whose table of shared values it fills on the way."""

    def __init__(self, rows: tuple[type, ...] = (), shared: type | None = None) -> None:
        self._rows: Collection[object] = rows
        self._shared = shared
        self._numbers: dict[object, int] = {}
        self._table: list[object] = []

    # Both directions go through the same cases in the same order.

    def write(self, hint: object, value: object) -> Json:
        """The value of a hint as JSON."""
        if hint is self._shared:
            return self._numbers.setdefault(value, len(self._numbers))
        return self._write(hint, value)

    def read(self, hint: type[T], item: Item) -> T:
        """The value of a hint that an item is; raises JsonError that names the place else."""
        return cast("T", self._read_any(hint, item))

    def write_table(self) -> Json:
        """The shared values that were written, in the order of their numbers."""
        return [self._write(self._shared, value) for value in self._numbers]

    def read_table(self, item: Item) -> None:
        """Read the shared values, before anything that refers to them by number."""
        self._table = [self._read(self._shared, entry) for entry in item.items()]

    def _write(self, hint: object, value: object) -> Json:
        form, inside = _form(hint)
        if form in (_Form.PLAIN, _Form.EITHER, _Form.WORD):
            return cast("Json", value)
        if form is _Form.LINES:
            return fold_lines(cast("str", value).split("\n")) if value else []
        if form is _Form.CHOICE:
            return cast("Json", cast("Enum", value).value)
        if form is _Form.MAYBE:
            return self.write(inside[0], value) if value is not None else None
        if form is _Form.LIST:
            return fold([self.write(inside[0], entry) for entry in cast("Sequence[object]", value)])
        if form is _Form.PAIR:
            entries = cast("Sequence[object]", value)
            return [self.write(h, entry) for h, entry in zip(inside, entries, strict=True)]
        if form is _Form.NAMED:
            pairs = cast("Sequence[tuple[str, object]]", value)
            named = {name: self.write(inside[0], entry) for name, entry in pairs}
            if len(named) != len(pairs):
                raise TypeError(f"two of {len(pairs)} entries have the same name")
            folded = fold([[name, entry] for name, entry in named.items()])
            return folded if len(folded) < len(named) else named
        written = {name: self.write(h, getattr(value, name)) for name, h in _hints(hint).items()}
        if hint not in self._rows:
            return written
        return [*written.values()] if len(written) > 1 else next(iter(written.values()))

    def _read_any(self, hint: object, item: Item) -> object:
        if hint is not self._shared:
            return self._read(hint, item)
        number = item.whole()
        if not 0 <= number < len(self._table):
            item.fail(f"the number of one of {len(self._table)} in the table")
        return self._table[number]

    def _read(self, hint: object, item: Item) -> object:
        form, inside = _form(hint)
        if form is _Form.PLAIN:
            return _PLAIN[hint](item)
        if form is _Form.EITHER:
            kind = type(item.value)
            return _PLAIN[kind](item) if kind in inside else item.fail(_either(inside))
        if form is _Form.LINES:
            return "\n".join(entry.text() for entry in item.lines())
        if form is _Form.CHOICE:
            return item.one_of(cast("type[Enum]", hint))
        if form is _Form.WORD:
            return item.value if item.value in inside else item.fail(f"one of {inside}")
        if form is _Form.MAYBE:
            return self._read_any(inside[0], item) if item.value is not None else None
        if form is _Form.LIST:
            return tuple(self._read_any(inside[0], entry) for entry in item.unfolded())
        if form is _Form.PAIR:
            entries = item.row(len(inside))
            return tuple(self._read_any(h, e) for h, e in zip(inside, entries, strict=True))
        if form is _Form.NAMED:
            return tuple((name, self._read_any(inside[0], entry)) for name, entry in item.named())
        hints = _hints(hint)
        if hint not in self._rows:
            data = item.fields()
            held = [data[name] for name in hints]
            data.end()
        else:
            held = item.row(len(hints)) if len(hints) > 1 else [item]
        given = [self._read_any(h, entry) for h, entry in zip(hints.values(), held, strict=True)]
        try:
            return cast("type", hint)(**dict(zip(hints, given, strict=True)))
        except AutoparError as error:
            raise JsonError(f"{item.place}: {error}") from None


class _Form(Enum):
    """The cases of a hint."""

    PLAIN = "plain"
    EITHER = "either"
    LINES = "lines"
    CHOICE = "choice"
    WORD = "word"
    MAYBE = "maybe"
    LIST = "list"
    PAIR = "pair"
    NAMED = "named"
    RECORD = "record"


_PLAIN: Mapping[object, Callable[[Item], object]] = {
    str: Item.text, int: Item.whole, float: Item.number, bool: Item.flag,
}  # fmt: skip

_WORDS: Mapping[object, str] = {
    str: "a text", int: "a whole number", float: "a number", bool: "true, false",
}  # fmt: skip


@cache
def _form(hint: object) -> tuple[_Form, tuple[object, ...]]:
    """The case of a hint, and the hints inside it; raises TypeError where it has no form."""
    if hint in _PLAIN:
        return _Form.PLAIN, ()
    inside = get_args(hint)
    if get_origin(hint) is Annotated:
        if hint == Text:
            return _Form.LINES, ()
        return _Form.NAMED, (get_args(get_args(inside[0])[0])[1],)
    if get_origin(hint) is Literal:
        return _Form.WORD, inside
    if get_origin(hint) is UnionType and set(inside) <= set(_PLAIN):
        return _Form.EITHER, inside
    if NoneType in inside:
        return _Form.MAYBE, tuple(h for h in inside if h is not NoneType)
    if get_origin(hint) is tuple:
        is_list = inside[-1] is Ellipsis
        return (_Form.LIST, inside[:1]) if is_list else (_Form.PAIR, inside)
    kind = cast("type[object]", hint) if isinstance(hint, type) else object
    if issubclass(kind, Enum):
        return _Form.CHOICE, ()
    if is_dataclass(kind):
        return _Form.RECORD, ()
    raise TypeError(f"{hint} has no form in JSON")


def _either(kinds: Collection[object]) -> str:
    """The words for a value of one of several plain types."""
    *most, last = (_WORDS[kind] for kind in kinds)
    return f"{', '.join(most)} or {last}"


@cache
def _hints(kind: object) -> dict[str, object]:
    """The hints of a dataclass's fields by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cast("type", kind))}


def format_json(value: Json, depth: int = 0) -> str:
    """JSON on as few lines of at most a hundred characters as its structure allows."""
    if not isinstance(value, dict | list) or not value:
        return json.dumps(value, ensure_ascii=True)
    # From the inside out: what has an entry of several lines does not stand on one either.
    if isinstance(value, dict):
        inner = [f"{json.dumps(k)}: {format_json(v, depth + 1)}" for k, v in value.items()]
    else:
        inner = [format_json(entry, depth + 1) for entry in value]
    begin, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    line = f"{begin}{', '.join(inner)}{end}"
    if len(line) + depth < _WIDTH and "\n" not in line:
        return line
    margin = "\n" + " " * (depth + 1)
    return f"{begin}{margin}{f',{margin}'.join(inner)}{margin[:-1]}{end}"
