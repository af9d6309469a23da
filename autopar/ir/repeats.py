"""Lists whose entries repeat with other numbers, such as the layers of a step, written once.

    "%5: f32[8] = mul(%1, %4)  a0/up"      {"times": 3,
    "%6: f32[8] = mul(%2, %5)  a1/up"  =    "of": ["%5~a: f32[8] = mul(%1~a, %4~a)  a0~a/up"],
    "%7: f32[8] = mul(%3, %6)  a2/up"       "by": {"a": 1}}

A block of entries stands there as it is the first time. A number that changes is marked with the
name of a step, `~a`: so much is added each time, or, where that differs, a list says how much is
added to the first for each other time. Numbers that change alike share a step.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from operator import ne
from typing import TYPE_CHECKING, TypeGuard, cast

if TYPE_CHECKING:
    from autopar.ir.codec import Json

_KEYS = {"times", "of", "by"}
_LEAST = 100  # entries that a repetition saves; fewer are as well read one by one
_SHARE = 0.5  # of the length, that it may have
_PERIODS, _LONGEST, _DOUBLINGS = 8, 64, 3  # lengths of a block that are tried: see `_periods`
_MOST = 2**24  # entries that a file may ask for
_LARGEST = 2**63

# The numbers that may change: of a value, of a module in a path and, in an entry that is no text,
# one that is by itself.
# The first digit comes first, so that the rest is asked of digits only, and what is before it next.
_REST = r"(?:(?<=0)|(?<!0)\d{0,17})(?!\d)"
_INSIDE = rf"(?<=%.){_REST}|(?<=[A-Za-z_/.].){_REST}(?=[/\"_.])"
_ALONE = rf"(?<=[\[ ].){_REST}(?=[,\]])|(?<![\s\S].){_REST}$"
_BEFORE = ("", "[", " ")  # a number by itself
_MARK = "~"
_MARKED = re.compile(rf'(")?([0-9]{{1,18}}){_MARK}([a-z]+)(?(1)")')


@dataclass(frozen=True)
class _Form:
    """The form of entries as text, in which their numbers are found."""

    numbers: re.Pattern[str]
    between: str  # two entries
    kinds: tuple[_Kind, ...]

    def text(self, entry: Json) -> str:
        return cast("str", entry) if self is _LINES else json.dumps(entry)

    def entry(self, text: str) -> Json:
        return text if self is _LINES else cast("Json", json.loads(text))

    def entries(self, text: str) -> list[Json]:
        """The entries of a text of several."""
        if self is _LINES:
            return [*text.split(self.between)]
        return cast("list[Json]", json.loads(f"[{text}]"))


def fold_lines(lines: Sequence[str]) -> list[Json]:
    """The lines, blocks that repeat written once."""
    return _fold(lines, _LINES)


def fold(entries: Sequence[Json]) -> list[Json]:
    """The entries of a list likewise."""
    return _fold(entries, _ENTRIES)


def unfold_lines(folded: Sequence[Json]) -> list[Json]:
    """The lines again; raises ValueError where a repetition is none."""
    return _unfold(folded, _LINES)


def unfold(folded: Sequence[Json]) -> list[Json]:
    """The entries of a list likewise."""
    return _unfold(folded, _ENTRIES)


def _fold(entries: Sequence[Json], form: _Form) -> list[Json]:
    if len(entries) <= _LEAST:
        return [*entries]
    # 1. What each entry is beside its numbers, and these.
    texts = [form.text(entry) for entry in entries]
    parts = [form.numbers.split(text) for text in texts]

    def fold_range(start: int, stop: int, kinds: Sequence[_Kind]) -> Iterator[Json]:
        if stop - start <= _LEAST or not kinds:
            yield from entries[start:stop]
            return
        # 2. Blocks that are alike but for numbers.
        shapes = _numbered(kinds[0](parts[start:stop]))
        done = start
        for first, period, times in _repetitions(shapes):
            begin, end = start + first, start + first + period * times
            numbers = [
                [*map(int, chain.from_iterable(p[1::2] for p in parts[at : at + period]))]
                for at in range(begin, end, period)
            ]
            # 3. Their numbers, each with its steps.
            first_time = texts[begin : begin + period]
            if any(_MARK in text for text in first_time):
                continue
            block = _block(first_time, numbers, form)
            is_short = len(json.dumps(block)) <= _SHARE * sum(map(len, texts[begin:end]))
            if is_short and _expanded(block, form) == [*entries[begin:end]]:
                yield from fold_range(done, begin, kinds[1:])
                yield block
                done = end
        yield from fold_range(done, stop, kinds[1:])

    return [*fold_range(0, len(entries), form.kinds)]


def _numbered(keys: Iterator[object]) -> list[int]:
    known: dict[object, int] = {}
    return [known.setdefault(key, len(known)) for key in keys]


# What entries of a block must have in common with those of the next, of the parts of all: texts and
# numbers in turn. First all but the numbers inside texts; then also that the first number grows as
# it does there; last the texts alone.
Parts = Sequence[list[str]]
_Kind = Callable[[Parts], Iterator[object]]


def _same_numbers(parts: Parts) -> Iterator[object]:
    for p in parts:
        alone = (
            n if text[-1:] in _BEFORE else "" for text, n in zip(p[::2], p[1::2], strict=False)
        )
        yield *p[::2], *alone


def _same_growth(parts: Parts) -> Iterator[object]:
    firsts = [int(p[1]) if len(p) > 1 else 0 for p in parts]
    growths = [after - before for before, after in pairwise(firsts)]
    for p, growth in zip(parts, (*growths[:1], *growths), strict=True):
        yield *p[::2], *p[3::2], growth


def _same_texts(parts: Parts) -> Iterator[object]:
    return (tuple(p[::2]) for p in parts)


_LINES = _Form(re.compile(f"([0-9](?:{_INSIDE}))"), "\n", (_same_texts,))
_ENTRIES = _Form(
    re.compile(f"([0-9](?:{_INSIDE}|{_ALONE}))"), ", ", (_same_growth, _same_numbers, _same_texts)
)


def _repetitions(shapes: Sequence[int]) -> list[tuple[int, int, int]]:
    """The blocks that repeat, each as its start, its length and the times that it stands there.

    Lengths are the commonest distances of entries to the next like it; of the stretches in which
    entries are as they are so much later, the one that saves most is taken first.

        shapes    a b c a b c a b d         c, the third, to the sixth: 3
        length 3  = = = = =                 5 entries as they are 3 later: 8 long, twice a b c
    """
    stretches = [s for period in _periods(shapes) for s in _stretches(shapes, period)]
    found: list[tuple[int, int, int]] = []
    waiting = [(0, len(shapes), stretches)]
    while waiting:
        start, stop, near = waiting.pop()
        inside = [
            (max(start, first), min(stop, last), period)
            for first, last, period in near
            if first < stop and last > start
        ]
        saved, first, period = max(
            (
                (((last - first) // period - 1) * period, -first, -period)
                for first, last, period in inside
            ),
            default=(0, 0, 0),
        )
        if saved >= _LEAST:
            first, period = -first, -period
            times = 1 + saved // period
            found.append((first, period, times))
            waiting.append((start, first, inside))
            waiting.append((first + period * times, stop, inside))
    return sorted(found)


def _periods(shapes: Sequence[int]) -> list[int]:
    """The commonest distances of an entry, and of it with some that follow, to the next alike."""
    found: dict[int, None] = {}
    runs, length = [*shapes], 1
    while length < len(runs) and length <= _LONGEST:
        last: dict[int, int] = {}
        distances = Counter[int]()
        for at, run in enumerate(runs):
            if run in last:
                distances[at - last[run]] += 1
            last[run] = at
        found |= dict.fromkeys(period for period, _ in distances.most_common(_PERIODS))
        for _ in range(_DOUBLINGS):  # a run and the one behind it are one of twice the length
            runs = _numbered(zip(runs, runs[length:], strict=False))
            length *= 2
    return [*found]


def _stretches(shapes: Sequence[int], period: int) -> Iterator[tuple[int, int, int]]:
    """The stretches of a list, each with its end, that repeat after so many entries."""
    later = map(ne, shapes, islice(shapes, period, None))
    start = 0
    for stop in (*(at for at, differs in enumerate(later) if differs), len(shapes) - period):
        if stop - start >= max(_LEAST, period):
            yield start, stop + period, period
        start = stop + 1


def _block(texts: Sequence[str], numbers: Sequence[Sequence[int]], form: _Form) -> dict[str, Json]:
    """A block with its numbers marked: `numbers` are those of each time."""
    names: dict[tuple[int, ...], str] = {}
    marks: list[str] = []
    for column in zip(*numbers, strict=True):
        first = column[0]
        steps = tuple(number - first for number in column)
        marks.append(names.setdefault(steps, _name(len(names))) if any(steps) else "")
    waiting = iter(marks)

    def marked(found: re.Match[str]) -> str:
        mark = next(waiting)
        if not mark:
            return found[0]
        text = f"{found[0]}{_MARK}{mark}"
        # A number by itself becomes a text.
        before = found.string[found.start() - 1 : found.start()]
        return f'"{text}"' if form is _ENTRIES and before in _BEFORE else text

    of = [form.entry(form.numbers.sub(marked, text)) for text in texts]
    by: dict[str, Json] = {}
    for steps, name in names.items():
        # Added each time, or a list for each time but the first.
        even = all(n == k * steps[1] for k, n in enumerate(steps))
        by[name] = steps[1] if even else [*steps[1:]]
    return {"times": len(numbers), "of": of, "by": by}


def _name(number: int) -> str:
    """The name of a step: a to z, then ba."""
    more, letter = divmod(number, 26)
    return (_name(more) if more else "") + chr(ord("a") + letter)


def _unfold(folded: Sequence[Json], form: _Form) -> list[Json]:
    if sum(map(_length, folded)) > _MOST:
        raise ValueError(f"repetitions that make more than {_MOST} entries")
    entries: list[Json] = []
    for entry in folded:
        if _is_block(entry):
            entries += _expanded(entry, form)
        else:
            entries.append(entry)
    return entries


def _is_block(entry: Json) -> TypeGuard[dict[str, Json]]:
    return isinstance(entry, dict) and entry.keys() == _KEYS


def _length(entry: Json) -> int:
    """The entries that one of a folded list stands for, before any is made.

    Raises ValueError where a repetition is none.
    """
    if not _is_block(entry):
        return 1
    times, texts = _parsed(entry)
    return times * len(texts)


def _parsed(block: Mapping[str, Json]) -> tuple[int, list[Json]]:
    """The times that a block stands there, and its entries; raises ValueError where it is none."""
    times, texts = block["times"], block["of"]
    if not _is_whole(times) or not isinstance(texts, list) or not texts:
        raise ValueError("a repetition without times or entries")
    if not 2 <= times * len(texts) <= _MOST:
        raise ValueError(f"a repetition of {len(texts)} entries {times} times")
    return times, texts


def _expanded(block: Mapping[str, Json], form: _Form) -> list[Json]:
    """The entries that a block stands for; raises ValueError where it is none."""
    times, texts = _parsed(block)
    steps = _steps(block["by"], times)
    if form is _LINES and not all(isinstance(text, str) for text in texts):
        raise ValueError("a repetition of lines that are none")
    # One text for all entries of the block, a place in it for each number that changes.
    whole = form.between.join(map(form.text, texts)).replace("%", "%%")
    firsts: list[int] = []
    names: list[str] = []

    def place(found: re.Match[str]) -> str:
        if found[3] not in steps:
            raise ValueError(f"a repetition with no step {found[3]!r}")
        firsts.append(int(found[2]))
        names.append(found[3])
        return "%d" if found[1] and form is _ENTRIES else f"{found[1] or ''}%d{found[1] or ''}"

    pattern = _MARKED.sub(place, whole)
    given = [*zip(firsts, (steps[name] for name in names), strict=True)]
    each = (pattern % tuple([first + of[k] for first, of in given]) for k in range(times))
    return form.entries(form.between.join(each))


def _steps(by: Json, times: int) -> dict[str, Sequence[int]]:
    """The steps by name, a number for each time."""
    if not isinstance(by, dict):
        raise ValueError("a repetition without steps")
    found: dict[str, Sequence[int]] = {}
    for name, step in by.items():
        if _is_whole(step):
            found[name] = [k * step for k in range(times)]
        elif isinstance(step, list) and len(step) == times - 1:
            found[name] = [0, *(n for n in step if _is_whole(n))]
        if len(found.get(name, ())) != times:
            raise ValueError(f"a repetition whose step {name!r} is not a number for each time")
    return found


def _is_whole(value: Json) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST
