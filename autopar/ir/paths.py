"""Paths of values: patterns that match them, and those that differ in numbers only as one."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence


def unnumbered(path: str) -> str:
    """The path with its numbers struck out: what alike paths have in common."""
    return re.sub(r"\d+", "\0", path)


def common_path(paths: Sequence[str]) -> str:
    """The paths as one: a number that differs among them becomes a star."""
    if len(paths) == 1:
        return paths[0]
    split = [re.split(r"(\d+)", path) for path in paths]
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in zip(*split, strict=True))


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
    if pattern in paths:
        return (pattern,)
    return tuple(path for path in paths if matches(pattern, path))


def matches(pattern: str, path: str) -> bool:
    """Whether a glob pattern matches a path or what follows its first part; ** spans parts."""
    parts = path.split("/")
    wanted = pattern.split("/")
    return _parts_match(wanted, parts) or _parts_match(wanted, parts[1:])


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
