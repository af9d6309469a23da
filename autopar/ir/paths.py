"""Paths of values: patterns that match them, and those that differ in numbers only as one."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

_BOXED = "value"
_LISTED = 3  # numbers that stand one by one


def unnumbered(path: str) -> str:
    """The path with its numbers struck out: what alike paths have in common."""
    return re.sub(r"\d+", "\0", path)


def common_path(paths: Sequence[str]) -> str:
    """The paths as one: a number that differs among them becomes a star."""
    if len(paths) == 1:
        return paths[0]
    split = [re.split(r"(\d+)", path) for path in paths]
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in zip(*split, strict=True))


def ranged_path(paths: Sequence[str]) -> str:
    """The paths as one: numbers in a row become their first and last, layers/3..5/mlp."""
    if len(set(paths)) == 1:
        return paths[0]
    split = [re.split(r"(\d+)", path) for path in paths]
    return "".join(_ranged(part) for part in zip(*split, strict=True))


def _ranged(parts: Sequence[str]) -> str:
    found = list(dict.fromkeys(parts))
    if len(found) == 1:
        return found[0]
    numbers = sorted(map(int, found))
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}..{numbers[-1]}"
    return ",".join(map(str, numbers)) if len(numbers) <= _LISTED else "*"


def enclosing_path(paths: Sequence[str]) -> str:
    """The innermost module that all are in, or are; "" where that is none."""
    split = (path.split("/") for path in paths)
    levels = takewhile(lambda level: len(set(level)) == 1, zip(*split, strict=False))
    return "/".join(level[0] for level in levels)


def module_of(path: str) -> str:
    """The module that a parameter is in: block/0 of net/block/0/kernel/value; w of params/w.

    Before it stands the argument, or the tree of parameters in it. A parameter that is in no
    module is one by itself.
    """
    parts = path.removesuffix(f"/{_BOXED}").split("/")
    inside = parts[parts.index("params") + 1 if "params" in parts else 1 :]
    return "/".join(inside[:-1] or inside or parts)


def counted_paths(paths: Iterable[str]) -> tuple[str, ...]:
    """Paths that differ in numbers only as one, with how many they are."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(unnumbered(path), []).append(path)
    return tuple(
        common_path(group) + (f" ({len(group)})" if len(group) > 1 else "")
        for group in groups.values()
    )


def meant(pattern: str, paths: Sequence[str]) -> tuple[str, ...]:
    """The paths that a pattern means: the one that it spells out, else all that it matches."""
    spelt = next((p for p in (pattern, f"{pattern}/{_BOXED}") if p in paths), None)
    if spelt is not None:
        return (spelt,)
    return tuple(path for path in paths if matches(pattern, path))


def matches(pattern: str, path: str) -> bool:
    """True if a glob pattern matches a path or what follows its first part; ** spans parts.

    A path that ends in "/value" is matched without that too: nnx's variables and linen's boxes hold
    their arrays under that name, which nobody means when speaking of "dense/kernel".
    """
    parts = path.split("/")
    wanted = pattern.split("/")
    ends = (parts, parts[:-1]) if parts[-1] == _BOXED and len(parts) > 1 else (parts,)
    return any(_parts_match(wanted, p) or _parts_match(wanted, p[1:]) for p in ends)


def _parts_match(wanted: Sequence[str], parts: Sequence[str]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_parts_match(wanted[1:], parts[i:]) for i in range(len(parts) + 1))
    return (
        bool(parts)
        and fnmatch.fnmatchcase(parts[0], wanted[0])
        and _parts_match(wanted[1:], parts[1:])
    )
