"""Plans as rules that others have: logical axis names to mesh axes, and path patterns to specs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.plan import Argument
from autopar.ir.values import item_bytes

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]
Names = tuple[str | None, ...]  # a logical name for each dim, None for one that has none
LogicalRule = tuple[str, Axes]
PathRule = tuple[str, Dims]


@dataclass(frozen=True)
class Conflict:
    """A tensor that logical rules lay out otherwise than the plan."""

    path: str
    names: Names
    planned: Dims
    ruled: Dims


@dataclass(frozen=True)
class LogicalRules:
    """Rules for logical names, in the order in which they count, and where they are wrong."""

    rules: tuple[LogicalRule, ...]
    conflicts: tuple[Conflict, ...]


def axes_by_rules(rules: Iterable[LogicalRule], names: Names) -> Dims:
    """Axes that flax gives to logical names: the first rule of a name whose axes are free."""
    found: dict[int, Axes] = {}
    for name, axes in rules:
        if name in names and names.index(name) not in found:
            used = {a for held in found.values() for a in held}
            if not used.intersection(axes):
                found[names.index(name)] = axes
    return tuple(found.get(dim, ()) for dim in range(len(names)))


def logical_rules(arguments: Sequence[Argument], names_of: Mapping[str, Names]) -> LogicalRules:
    """Rules that lay out the named arguments as planned, or most of their bytes.

    Each name goes first where most bytes of it lie. Where it lies elsewhere in other tensors, a
    further rule for it counts if the first one's axes are taken there; it stays if that makes
    fewer bytes wrong.
    """
    named = [a for a in arguments if a.path in names_of]
    votes: dict[str, Counter[Axes]] = {}
    for a in named:
        for name, axes in zip(names_of[a.path], a.sharding.dims, strict=True):
            if name is not None:
                votes.setdefault(name, Counter())[axes] += _bytes(a)
    firsts = {name: found.most_common() for name, found in votes.items()}
    rules: list[LogicalRule] = [(name, ranked[0][0]) for name, ranked in firsts.items()]
    spare = [(name, axes) for name, ranked in firsts.items() for axes, _ in ranked[1:]]
    rules.sort(key=lambda rule: not rule[1])  # those that shard nothing take nothing
    for rule in spare:
        rules = min(_with(rules, rule), key=lambda tried: _wrong(tried, named, names_of))
    return LogicalRules(tuple(rules), tuple(_conflicts(rules, named, names_of)))


def _with(rules: Sequence[LogicalRule], rule: LogicalRule) -> Iterator[list[LogicalRule]]:
    """Without one more rule for a name, with it anywhere, with all of the name behind the rest."""
    yield list(rules)
    yield from ([*rules[:at], rule, *rules[at:]] for at in range(len(rules) + 1))
    own = [r for r in rules if r[0] == rule[0]]
    yield [*(r for r in rules if r[0] != rule[0]), *own, rule]


def path_rules(arguments: Sequence[Argument]) -> tuple[PathRule, ...]:
    """Regular expressions with what they lay out, of which the first that is found counts.

    A pattern is the shortest end of a path whose every owner lies alike, numbers left open where
    they may be; whatever nothing else matches is whole.
    """
    found: dict[str, Dims] = {}
    tails = _tails(arguments)
    for a in arguments:
        dims = _trimmed(a.sharding.dims)
        # Keys 1 and "1" of a dict make one path, of which the first leaf counts.
        *_, whole = _ends(a.path)
        tail = next((t for t in _ends(a.path) if tails[t] == {dims}), whole)
        if dims:
            found.setdefault(f"(^|/){tail}$", dims)
    return (*sorted(found.items()), (".*", ()))


def _tails(arguments: Sequence[Argument]) -> dict[str, set[Dims]]:
    tails: dict[str, set[Dims]] = {}
    for a in arguments:
        for tail in _ends(a.path):
            tails.setdefault(tail, set()).add(_trimmed(a.sharding.dims))
    return tails


def _ends(path: str) -> Iterator[str]:
    """Ends of a path as patterns, short ones first, each with numbers open and as they are."""
    parts = path.split("/")
    for depth in range(1, len(parts) + 1):
        tail = re.escape("/".join(parts[-depth:]))
        yield from (re.sub(r"\d+", r"\\d+", tail), tail)


def _trimmed(dims: Dims) -> Dims:
    while dims and not dims[-1]:
        dims = dims[:-1]
    return dims


def _wrong(
    rules: Sequence[LogicalRule], named: Sequence[Argument], names_of: Mapping[str, Names]
) -> int:
    return sum(
        _bytes(a) for a in named if axes_by_rules(rules, names_of[a.path]) != a.sharding.dims
    )


def _conflicts(
    rules: Sequence[LogicalRule], named: Sequence[Argument], names_of: Mapping[str, Names]
) -> Iterator[Conflict]:
    for a in named:
        ruled = axes_by_rules(rules, names_of[a.path])
        if ruled != a.sharding.dims:
            yield Conflict(a.path, names_of[a.path], a.sharding.dims, ruled)


def _bytes(a: Argument) -> int:
    """Bytes of the whole array; one that is empty counts, too."""
    return 1 + math.prod(a.shape) * item_bytes(a.dtype)
