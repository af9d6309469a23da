"""Differences of two shardings: collectives, and arguments that move, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.inspecting.reshardable_unit import ReshardableUnit, Weighed
from autopar.ir.explanation import Price, TrafficChange
from autopar.ir.naming import Names, and_more, over, spec
from autopar.ir.paths import common_path, counted_paths, unnumbered
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.spmd import COLLECTIVES
from autopar.ir.text import show_bytes, show_seconds

_SHOWN = 3  # paths in one sentence
_LEAST_SHARE = 1e-3  # of the seconds of all changes, below which one is not told
_TOLD_SHARE = 0.02  # of the larger of work and waiting, below which the smaller is not told


@dataclass(frozen=True)
class Sent:
    """Collectives of a step of one kind over the same axes, and the names of what they move."""

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    names: frozenset[str] = frozenset()

    def plus(self, other: Sent, times: int = 1) -> Sent:
        """Both together, the other so many times."""
        return Sent(
            self.count + times * other.count,
            self.nbytes + times * other.nbytes,
            self.seconds + times * other.seconds,
            self.names | other.names,
        )


Key = tuple[str, tuple[str, ...], str]  # kind, axes, what is moved with its numbers struck out


def sent_by(weighed: Weighed, names: Names) -> dict[Key, Sent]:
    """The collectives of a step on one device by kind, axes and what they move."""
    found: dict[Key, Sent] = {}
    for listing in weighed.listings:
        for move, c in listing.program.collectives():
            name = names.of(move.value.name)
            key, runs = (c.kind, c.axes, unnumbered(name)), c.runs * listing.runs
            flow = Sent(runs, c.nbytes * runs, c.seconds * runs, frozenset([name]))
            found[key] = found.get(key, Sent()).plus(flow)
    return found


def traffic_changes(
    before: Sequence[Weighed], after: Sequence[Weighed]
) -> tuple[TrafficChange, ...]:
    """Collectives by kind and axes that differ, before and after, in a fixed order."""
    old, new = _by_axes(before), _by_axes(after)
    keys = sorted({*old, *new}, key=lambda k: (COLLECTIVES.index(k[0]), k[1]))
    pairs = ((key, old.get(key, Sent()), new.get(key, Sent())) for key in keys)
    return tuple(
        TrafficChange(*key, (a.count, b.count), (a.nbytes, b.nbytes), (a.seconds, b.seconds))
        for key, a, b in pairs
        if a != b
    )


def _by_axes(weighed: Sequence[Weighed]) -> dict[tuple[str, tuple[str, ...]], Sent]:
    found: dict[tuple[str, tuple[str, ...]], Sent] = {}
    for one in weighed:
        for listing in one.listings:
            for _, c in listing.program.collectives():
                runs = c.runs * listing.runs
                flow = Sent(runs, c.nbytes * runs, c.seconds * runs)
                found[c.kind, c.axes] = found.get((c.kind, c.axes), Sent()).plus(flow)
    return found


def moved(
    unit: ReshardableUnit, before: ShardingPlan, after: ShardingPlan
) -> Iterator[tuple[str, str, str]]:
    """Arguments that lie otherwise: path, sharding before, sharding after; the largest first."""
    inputs = (i for i in unit.graph.inputs if i.path)
    for given in sorted(inputs, key=lambda i: -i.value.nbytes):
        old = before.sharding_of.get(given.value.name)
        new = after.sharding_of.get(given.value.name)
        if old is not None and new is not None and old != new:
            yield given.path, spec(old), spec(new)


def sentences(
    unit: ReshardableUnit, before: Weighed, after: Weighed, subject: frozenset[str], choice: str
) -> list[str]:
    """The changes of a step's time, of what is sent, and of what moves along with the subject.

    The first adds up to the difference in seconds. `choice` is how the subject would lie.
    """
    names = Names(unit.graph)
    found = [*_spent(before.price, after.price)]
    found += _comings(sent_by(before, names), sent_by(after, names))
    found += _along(unit, before.sharding, after.sharding, subject, choice)
    return found


def _comings(before: dict[Key, Sent], after: dict[Key, Sent]) -> Iterator[str]:
    """Collectives that come and go, what weighs most first; those of a value together."""
    groups: dict[str, list[tuple[Key, Sent]]] = {}
    for key in sorted({*before, *after}):
        change = after.get(key, Sent()).plus(before.get(key, Sent()), -1)
        if change.seconds:
            groups.setdefault(key[2], []).append((key, change))
    total = sum(abs(change.seconds) for group in groups.values() for _, change in group)
    for group in sorted(groups.values(), key=lambda g: -abs(_net(g))):
        if max(abs(change.seconds) for _, change in group) > _LEAST_SHARE * total:
            yield _coming(group)


def _net(group: Sequence[tuple[Key, Sent]]) -> float:
    return sum(change.seconds for _, change in group)


def _coming(group: Sequence[tuple[Key, Sent]]) -> str:
    what = common_path(sorted({name for _, change in group for name in change.names}))
    more = [_describe(key, change) for key, change in group if change.seconds > 0]
    less = [_describe(key, change) for key, change in group if change.seconds < 0]
    net = _net(group)
    if more and less:
        change = f"{', '.join(more)} instead of {', '.join(less)}"
        return f"{what}: {change}: {_signed(net)}"
    return f"{'more' if more else 'less'} for {what}: {', '.join(more or less)}"


def _describe(key: Key, change: Sent) -> str:
    kind, axes, _ = key
    count = f"{abs(change.count)} " if change.count else ""
    took = f"{show_bytes(abs(change.nbytes))}, {show_seconds(abs(change.seconds))}"
    return f"{count}{kind} over {over(axes)} ({took})"


def _spent(before: Price, after: Price) -> Iterator[str]:
    """Work and waiting of each device: what is told of either is worth telling beside the other."""
    work = after.compute_seconds - before.compute_seconds
    waiting = after.exposed_seconds - before.exposed_seconds
    least = _TOLD_SHARE * max(abs(work), abs(waiting))
    parts = [
        f"{_signed(more)} of {what}"
        for more, what in ((work, "compute"), (waiting, "exposed communication"))
        if abs(more) > least
    ]
    if parts:
        yield f"{' and '.join(parts)} on each device"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '-'}{show_seconds(abs(seconds))}"


def _along(
    unit: ReshardableUnit,
    before: ShardingPlan,
    after: ShardingPlan,
    subject: frozenset[str],
    choice: str,
) -> Iterator[str]:
    """Who moves along, by where they go; ops that are split otherwise."""
    groups: dict[str, list[str]] = {}
    for path, _, new in moved(unit, before, after):
        if path not in subject:
            groups.setdefault(new, []).append(path)
    for new, paths in groups.items():
        so = "the same way" if new == choice else f"as {new}"
        yield f"{and_more(counted_paths(paths), _SHOWN)} would be sharded {so}"
    old = before.assignment_of
    split = sum(given != old.get(path) for path, given in after.assignments)
    if split:
        yield f"{split} {'op' if split == 1 else 'ops'} would be sharded differently"
