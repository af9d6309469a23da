"""The subject of a question: an argument by path or pattern, an op by kind, line or module."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import ArgumentError, listing
from autopar.inspecting.loaded_plan import LoadedPlan
from autopar.inspecting.reshardable_unit import ReshardableUnit, units_of
from autopar.ir.graph import Graph, Op
from autopar.ir.naming import and_more, full_name, place_of
from autopar.ir.paths import counted_paths, matches, meant
from autopar.ir.plan import Argument
from autopar.ir.sharding_plan import OpPath
from autopar.ir.values import Value
from autopar.passes.shard.diagnose.why import Case

_SHOWN = 8

Meant = tuple[ReshardableUnit, OpPath, Op]


@dataclass(frozen=True)
class Subject:
    """A value of a unit and the decision that it lies by, or that its op is split by.

    `path` is an argument's, `at` is where an op stands in the unit's graph. `alike` share the
    decision, by path; `others` were meant as well and do not.
    """

    name: str
    value: Value
    node: int | None
    at: OpPath | None = None
    path: str = ""
    alike: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def find_subject(loaded: LoadedPlan, asked: str) -> tuple[ReshardableUnit, Case, Subject]:
    """The subject with its unit and case; raises ArgumentError where none, or any, is meant."""
    given = _arguments(loaded, asked)
    if given:
        return _argument(loaded, given)
    # Ops of which every word is the kind, region, result, line, or a part of the module path.
    words = asked.split()
    ops = [
        (unit, at, op)
        for unit in units_of(loaded)
        for at, op in _walk(unit.graph, ())
        if op.results and all(_names(op, word) for word in words)
    ]
    if not ops:
        raise ArgumentError(_unknown(loaded, asked))
    return _op(asked, ops)


# -- arguments ---------------------------------------------------------------------------------


def _arguments(loaded: LoadedPlan, asked: str) -> list[Argument]:
    """Arguments whose path, or the end of whose path, is meant; the largest first."""
    arguments = loaded.plan.arguments
    for pattern in (asked, f"**/{asked}"):
        chosen = meant(pattern, [a.path for a in arguments])
        if given := [a for a in arguments if a.path in chosen]:
            return sorted(given, key=lambda a: -Value("", a.shape, a.dtype).nbytes)
    return []


def _argument(
    loaded: LoadedPlan, given: Sequence[Argument]
) -> tuple[ReshardableUnit, Case, Subject]:
    first = given[0]
    unit = units_of(loaded)[first.submesh]
    case = unit.own_case()
    homes = case.posed.reading.merged.homes
    values = {i.path: i.value for i in unit.graph.inputs}
    if first.path not in values:
        raise ArgumentError(f"no op of the step reads {first.path}: it is replicated, at no cost")
    home = homes[values[first.path].name]
    alike = [p for p, v in values.items() if p and p != first.path and homes[v.name] == home]
    others = [a.path for a in given[1:] if a.path not in alike]
    place = case.place_of(home)
    subject = Subject(
        first.path, values[first.path], place.decision if place else None, None, first.path,
        tuple(alike), tuple(others),
    )  # fmt: skip
    return unit, case, subject


# -- ops ---------------------------------------------------------------------------------------


def _walk(graph: Graph, before: OpPath) -> Iterator[tuple[OpPath, Op]]:
    for i, op in enumerate(graph.ops):
        yield (*before, i), op
        for k, body in enumerate(op.graphs):
            yield from _walk(body, (*before, i, k))


def _names(op: Op, word: str) -> bool:
    origin = op.origin
    if word in (op.kind, origin.region, origin.line) or word == op.results[0].name:
        return True
    if origin.line.endswith(f"/{word}"):
        return True
    return bool(origin.module) and matches(f"**/{word.strip('/')}/**", origin.module)


def _op(asked: str, ops: Sequence[Meant]) -> tuple[ReshardableUnit, Case, Subject]:
    """The one op that is meant: those of one decision are one, and forward comes first."""
    cases = {k: unit.own_case() for k, unit in {s.submesh: s for s, _, _ in ops}.items()}
    groups: dict[tuple[int, int | None, str], list[Meant]] = {}
    for unit, at, op in ops:
        node = cases[unit.submesh].node_of(at)
        if node is not None:
            groups.setdefault((unit.submesh, node, op.kind), []).append((unit, at, op))
    if not groups:
        op = ops[0][2]
        raise ArgumentError(
            f"{op.kind} ({place_of(op)}) has no decision of its own: it is computed where it is "
            "read, or it is a loop whose body's ops have theirs"
        )
    # Of several decisions the one of an op with FLOPs is meant, and of these the forward one.
    heavy = {k: g for k, g in groups.items() if g[0][2].flops} or groups
    forward = {k: g for k, g in heavy.items() if g[0][2].origin.region == "forward"}
    chosen = heavy if len(heavy) == 1 else forward
    if len(chosen) != 1:
        raise ArgumentError(_ambiguous(asked, list(groups.values())))
    (((_, node, _), members),) = chosen.items()
    unit, at, op = members[0]
    others = [full_name(g[0][2]) for g in groups.values() if g is not members]
    alike = tuple(full_name(o) for _, _, o in members[1:])
    return (
        unit,
        cases[unit.submesh],
        Subject(full_name(op), op.results[0], node, at, "", alike, tuple(others)),
    )


def _ambiguous(asked: str, groups: list[list[Meant]]) -> str:
    order = sorted(groups, key=lambda g: -sum(op.flops for _, _, op in g))
    rows = [
        f"{full_name(op)} {op.results[0].name}" + (f" and {len(g) - 1} alike" if len(g) > 1 else "")
        for g in order[:_SHOWN]
        for _, _, op in g[:1]
    ]
    if len(order) > _SHOWN:
        rows.append(f"and {len(order) - _SHOWN} more")
    headline = f"{asked!r} may be any of {len(order)} decisions:"
    return listing(
        headline, rows, "Add words until one is left, or write a value's name, such as %7."
    )


def _unknown(loaded: LoadedPlan, asked: str) -> str:
    paths = [a.path for a in loaded.plan.arguments]
    near = difflib.get_close_matches(asked, paths, n=3, cutoff=0.3)
    known = (
        f"the nearest paths are {', '.join(near)}" if near else and_more(counted_paths(paths), 5)
    )
    return (
        f"{asked!r} is no argument and no op of {loaded.plan.origin.step}: {known}. Write a path, "
        "a pattern such as '**/kernel', or an op by kind, module or line: 'dot_general model.py:12'"
    )
