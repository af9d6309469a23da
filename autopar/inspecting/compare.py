"""Differences of two plans, in decisions, in shardings and in what they cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.timeline import sent
from autopar.inspecting.reshardable_unit import ReshardableUnit, Weighed
from autopar.ir.comparison import Change, Comparison, FigureChange, Move, Place
from autopar.ir.compiler_options import options_text
from autopar.ir.explanation import TrafficChange
from autopar.ir.inspection import IN_STEP
from autopar.ir.listing import LocalOp, Loop, Traffic, kind_order
from autopar.ir.naming import Names, and_more, over, spec
from autopar.ir.paths import common_path, counted_paths, unnumbered
from autopar.ir.plan import Argument, Origin, Plan
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import Remat
from autopar.ir.text import show_bytes, show_seconds

_SHOWN = 3  # paths in one sentence
_LEAST_SHARE = 1e-3  # of the seconds of all changes, below which one is not told
_REGIONS = {
    "forward": "in the forward pass", "backward": "in the backward pass", "update": "in the update",
    "copies": "of copies",
}  # fmt: skip
_TOLD_SHARE = 0.02  # of the larger of work and waiting, below which the smaller is not told


@dataclass(frozen=True)
class Sent:
    """Collectives of a step of one kind over the same axes, and the names of what they move.

    Of their seconds, `exposed_seconds` are waited for.
    """

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    names: frozenset[str] = frozenset()

    def plus(self, other: Sent, times: int = 1) -> Sent:
        """Both together, the other so many times."""
        return Sent(
            self.count + times * other.count,
            self.nbytes + times * other.nbytes,
            self.seconds + times * other.seconds,
            self.exposed_seconds + times * other.exposed_seconds,
            self.names | other.names,
        )


Key = tuple[str, tuple[str, ...], str]  # kind, axes, what is moved with its numbers struck out


def sent_by(weighed: Weighed, names: Names) -> dict[Key, Sent]:
    """The collectives of a step on one device by kind, axes and what they move.

    Seconds are as the predicted step has them: those that are waited for add up to its own.
    """
    found: dict[Key, Sent] = {}
    for listed in weighed.listings:
        sums = [
            (move, c, Sent(c.runs * listed.runs, c.nbytes * c.runs * listed.runs))
            for move, c in listed.listing.collectives()
        ]
        for move, j, once in sent(listed.timed):
            spent = once.times(listed.runs)
            sums.append((move, move.collectives[j], Sent(0, 0, spent.communication, spent.exposed)))
        for move, c, flow in sums:
            name = names.of(move.value.name)
            key = c.kind, c.axes, unnumbered(name)
            known = found.get(key, Sent())
            found[key] = known.plus(replace(flow, names=frozenset([name])))
    return found


def traffic_changes(
    before: Sequence[Weighed], after: Sequence[Weighed]
) -> tuple[TrafficChange, ...]:
    """Collectives by kind and axes that differ, before and after, in a fixed order."""
    old, new = _by_axes(before), _by_axes(after)
    keys = sorted({*old, *new}, key=kind_order)
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
            for _, c in listing.listing.collectives():
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

    The first adds up to the difference in seconds, and so does what is exposed of the collectives
    to its exposed communication. `choice` is how the subject would lie.
    """
    names = Names(unit.graph)
    found = [*_spent(before, after)]
    found += _comings(sent_by(before, names), sent_by(after, names))
    found += _along(unit, before.sharding, after.sharding, subject, choice)
    return found


def _comings(before: dict[Key, Sent], after: dict[Key, Sent]) -> Iterator[str]:
    """Collectives that come, go or wait otherwise, what weighs most first; by what is moved."""
    groups: dict[str, list[tuple[Key, Sent]]] = {}
    for key in sorted({*before, *after}):
        change = after.get(key, Sent()).plus(before.get(key, Sent()), -1)
        if change.nbytes or change.seconds or change.exposed_seconds:
            groups.setdefault(key[2], []).append((key, change))
    least = _LEAST_SHARE * sum(_weight(group) for group in groups.values())
    order = sorted(groups.values(), key=lambda g: (-abs(_exposed(g)), -_weight(g)))
    for group in (g for g in order if _weight(g) > least):
        what = common_path(sorted({name for _, change in group for name in change.names}))
        more = [_describe_sent(key, change) for key, change in group if change.nbytes > 0]
        less = [_describe_sent(key, change) for key, change in group if change.nbytes < 0]
        waited = _exposed(group)
        so = f"{_signed(waited)} exposed" if abs(waited) > least else "none of it exposed"
        if more and less:
            yield f"{what}: {', '.join(more)} instead of {', '.join(less)}: {so}"
        elif more or less:
            yield f"{'more' if more else 'less'} for {what}: {', '.join(more or less)}: {so}"
        elif abs(waited) > least:
            kinds = ", ".join(dict.fromkeys(kind for (kind, _, _), _ in group))
            beside = "less" if waited > 0 else "more"
            yield f"the same {kinds} for {what}, {beside} of it beside work: {so}"


def _weight(group: Sequence[tuple[Key, Sent]]) -> float:
    """The largest change of some collectives, in seconds that they take or are waited for."""
    return max(max(abs(c.seconds), abs(c.exposed_seconds)) for _, c in group)


def _exposed(group: Sequence[tuple[Key, Sent]]) -> float:
    return sum(change.exposed_seconds for _, change in group)


def _describe_sent(key: Key, change: Sent) -> str:
    kind, axes, _ = key
    count = f"{abs(change.count)} " if change.count else ""
    took = f"{show_bytes(abs(change.nbytes))}, {show_seconds(abs(change.seconds))}"
    return f"{count}{kind} over {over(axes)} ({took})"


def _spent(before: Weighed, after: Weighed) -> Iterator[str]:
    """Work and waiting of each device: what is told of either is worth telling beside the other."""
    old, new = before.price, after.price
    work = new.compute_seconds - old.compute_seconds
    waiting = new.exposed_seconds - old.exposed_seconds
    least = _TOLD_SHARE * max(abs(work), abs(waiting))
    parts = [
        f"{_signed(more)} of {what}"
        for more, what in ((work, "compute"), (waiting, "exposed communication"))
        if abs(more) > least
    ]
    step, paced = new.seconds - old.seconds, ""
    if abs(step - work - waiting) > least:  # hosts, other submeshes or a schedule set the pace
        takes = f"takes {_signed(step)}" if abs(step) > least else "is as long"
        paced = f", yet the step {takes}: they do not set its pace alone"
    if parts:
        yield f"{' and '.join(parts)} on each device{paced}"
    if abs(work) > least:
        yield from _work(before, after, abs(work))


def _work(before: Weighed, after: Weighed, whole: float) -> Iterator[str]:
    """The pass, or the copies, whose compute changes most, where that is most of it."""
    was, now = _compute(before), _compute(after)
    changes = {r: now.get(r, 0.0) - was.get(r, 0.0) for r in {*was, *now}}
    region = max(sorted(changes), key=lambda r: abs(changes[r]), default="")
    if region and abs(changes[region]) > whole / 2:
        yield f"compute: {_signed(changes[region])} {_REGIONS.get(region, f'in {region}')}"


def _compute(weighed: Weighed) -> dict[str, float]:
    """Seconds of work of a step by the region of the op that each kernel is, or of copies."""
    found: dict[str, float] = {}
    for listed in weighed.listings:
        for block, kernel, seconds in listed.timed.spent():
            step = kernel.instruction(block)
            region = "copies"
            if isinstance(step, LocalOp | Loop):
                region = listed.graph.op_at(step.equation).origin.region
            found[region] = found.get(region, 0.0) + seconds.compute * listed.runs
    return found


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


_TOLD_INNER = 5
_MADE = re.compile(
    r"\s*(?P<name>%\w+): (?P<type>\S+).*?= (?P<kind>[\w-]+)\(.*?(?:  # (?P<line>\S+))?$"
)

AxisNames = Mapping[str, str]  # the second plan's axis -> the first's


def compare(a: Plan, b: Plan) -> Comparison:
    """Compare plan `b` with plan `a`; axes that only differ in name are one."""
    same_graph = a.origin.graph_key == b.origin.graph_key
    names = _axis_names(a.mesh, b.mesh)
    inner = list(_inner(a, b)) if same_graph else []
    return Comparison(
        step=a.origin.step,
        same_graph=same_graph,
        asked=tuple(_changes(_asked(a.origin), _asked(b.origin))),
        made_with=tuple(_changes(_made_with(a), _made_with(b))),
        decisions=tuple(_changes(_decisions(a), _decisions(b))),
        moves=_moves(a, b),
        inner=tuple(_describe_changes(_graph_text(a, b), inner[:_TOLD_INNER])),
        inner_count=len(inner),
        traffic=tuple(_traffic(a, b, names)),
        figures=tuple(
            FigureChange(name, unit, of(a), of(b)) for name, unit, of in _FIGURES if of(a) != of(b)
        ),
        peak_kinds=_peak_kinds(a, b),
        renamed=tuple((own, other) for other, own in names.items() if own != other),
    )


def _axis_names(a: MeshShape, b: MeshShape) -> dict[str, str]:
    """Axes of the second mesh by those of the first: of the same name, else of the same size."""
    names = {n: n for n in b.names if n in a.names}
    free = [n for n in a.names if n not in names]
    for name in (n for n in b.names if n not in names):
        own = next((n for n in free if a.size([n]) == b.size([name])), None)
        names[name] = own if own is not None else name
        free = [n for n in free if n != own]
    return names


def _by(names: AxisNames, sharding: Sharding) -> Sharding:
    """A sharding of the second plan by the first's names."""
    dims = tuple(tuple(names.get(x, x) for x in dim) for dim in sharding.dims)
    return Sharding(dims, tuple(names.get(x, x) for x in sharding.partial))


# -- what is said in a word --------------------------------------------------------------------


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    for name in dict.fromkeys([*before, *after]):
        if before.get(name, "") != after.get(name, ""):
            yield Change(name, before.get(name, ""), after.get(name, ""))


def _asked(origin: Origin) -> dict[str, str]:
    pins = {
        f"pin {pattern}": spec(Sharding(tuple(tuple(axes) for axes in dims)))
        for pattern, dims in origin.pins
    }
    return {
        "step": origin.step,
        "cluster": origin.cluster_name,
        "method": origin.method,
        "memory limit": show_bytes(origin.memory_bytes),
        **pins,
    }


def _made_with(plan: Plan) -> dict[str, str]:
    o, outcome = plan.origin, plan.outcome
    return {
        "graph": o.graph_key[:12],
        "cluster figures": o.cluster_fingerprint[:12],
        "JAX": o.jax_minor,
        "outcome": f"{outcome.status.value}, gap {outcome.gap:.2%}",
    }


def _decisions(plan: Plan) -> dict[str, str]:
    """The decisions on stages, microbatches, recomputation and the compiler."""
    submeshes = " + ".join(f"({s.mesh})" for s in plan.submeshes)
    found = {
        "mesh": str(plan.mesh) if plan.is_one_program else submeshes,
        "stages": str(len(plan.stages)),
        "microbatches": str(plan.microbatches),
        "recomputed": f"{len(plan.recomputed)} values",
        "compiler options": options_text(plan.compiler_options) or "none",
    }
    if plan.is_one_program:
        return found
    found["schedule"] = plan.schedule
    for i, s in enumerate(plan.stages):
        remat = f", {s.remat} remat" if s.remat is not Remat.NONE else ""
        found[f"stage S{i}"] = f"{s.name or IN_STEP}: {s.layers} layers on mesh{s.submesh}{remat}"
    return found


# -- arguments ---------------------------------------------------------------------------------


def _moves(a: Plan, b: Plan) -> tuple[Move, ...]:
    """Arguments that lie otherwise, or are in one plan only; alike ones as one, largest first."""
    before, after = ({x.path: x for x in plan.arguments} for plan in (a, b))
    groups: dict[object, list[Move]] = {}
    for path in dict.fromkeys([*before, *after]):
        old, new = before.get(path), after.get(path)
        names: AxisNames = {}
        if new is not None:
            names = _axis_names(a.mesh_of(old) if old is not None else a.mesh, b.mesh_of(new))
        move = Move(
            path,
            1,
            (old or after[path]).role,
            _place(a, old, {}),
            _place(b, new, names),
        )
        if move.before != move.after:
            key = (unnumbered(path), move.role, _unplaced(move.before), _unplaced(move.after))
            groups.setdefault(key, []).append(move)
    found = [
        replace(
            group[0],
            path=common_path([m.path for m in group]),
            count=len(group),
            before=_join(group[0].before, [m.before for m in group]),
            after=_join(group[0].after, [m.after for m in group]),
        )
        for group in groups.values()
    ]
    return tuple(sorted(found, key=lambda m: (-m.nbytes, len(m.path), m.path)))


def _place(plan: Plan, given: Argument | None, names: AxisNames) -> Place | None:
    if given is None:
        return None
    held = given.local_bytes(plan.mesh_of(given))
    return Place(given.shape, given.dtype, _by(names, given.sharding), held, (given.submesh,))


def _unplaced(place: Place | None) -> Place | None:
    return replace(place, submeshes=()) if place is not None else None


def _join(first: Place | None, places: list[Place | None]) -> Place | None:
    if first is None:
        return None
    every = {s for p in places if p is not None for s in p.submeshes}
    return replace(first, submeshes=tuple(sorted(every)))


# -- values within the step --------------------------------------------------------------------


def _inner(a: Plan, b: Plan) -> Iterator[Change]:
    """Results of ops, by name, that one plan recomputes, or that lie or are read otherwise."""
    kept = "kept", "recomputed"
    for name in dict.fromkeys([*a.recomputed, *b.recomputed]):
        if (name in a.recomputed) != (name in b.recomputed):
            yield Change(name, kept[name in a.recomputed], kept[name in b.recomputed])
    ours, theirs = _shardings(a), _shardings(b)
    if len(ours) != len(theirs) or a.microbatches != b.microbatches:
        return  # other programs: nothing to set side by side
    # The step's inputs are told of as arguments.
    given = frozenset(re.findall(r"(%\w+): ", _graph_text(a, b).partition(") {")[0]))
    for one, other in zip(ours, theirs, strict=True):
        before, after = _lies(one, {}), _lies(other, _axis_names(one.mesh, other.mesh))
        for name in dict.fromkeys([*before, *after]):
            if name not in given and before.get(name) != after.get(name):
                yield Change(name, before.get(name, "on demand"), after.get(name, "on demand"))


def _shardings(plan: Plan) -> tuple[ShardingPlan, ...]:
    return tuple(s.sharding for s in plan.submeshes)


def _lies(plan: ShardingPlan, names: AxisNames) -> dict[str, str]:
    """Value -> how it lies, and how it is read where that is otherwise."""
    found = {name: spec(_by(names, s)) for name, s in plan.values}
    for name, region, sharding in plan.uses:
        own, read = found.get(name, "on demand"), spec(_by(names, sharding))
        found[name] = own if own == read else f"{own}, read in {region} as {read}"
    return found


def _graph_text(a: Plan, b: Plan) -> str:
    """The graph of both, from the plan that keeps its step."""
    record = a.record or b.record
    return record.graph if record is not None else ""


def _describe_changes(graph: str, changes: Sequence[Change]) -> Iterator[Change]:
    """The changes with what makes each value, where the step is kept."""
    wanted = {c.name for c in changes}
    lines = graph.splitlines() if wanted else ()
    made = {m["name"]: m for m in map(_MADE.match, lines) if m is not None and m["name"] in wanted}
    for change in changes:
        m = made.get(change.name)
        line = f" ({m['line']})" if m is not None and m["line"] else ""
        name = change.name if m is None else f"{m['kind']} {change.name}: {m['type']}{line}"
        yield replace(change, name=name)


# -- collectives and figures -------------------------------------------------------------------


def _traffic(a: Plan, b: Plan, names: AxisNames) -> Iterator[TrafficChange]:
    before = {(t.kind, t.axes): t for t in a.prediction.traffic}
    after = {(t.kind, tuple(names.get(x, x) for x in t.axes)): t for t in b.prediction.traffic}
    for kind, axes in sorted({*before, *after}, key=kind_order):
        none = Traffic(kind, axes, 0, 0, 0.0)
        old, new = before.get((kind, axes), none), after.get((kind, axes), none)
        change = TrafficChange(
            kind, axes, (old.count, new.count), (old.nbytes, new.nbytes), (old.seconds, new.seconds)
        )
        if any(pair[0] != pair[1] for pair in (change.count, change.nbytes, change.seconds)):
            yield change


def _peak_kinds(a: Plan, b: Plan) -> tuple[FigureChange, ...]:
    """The bytes at each plan's own peak by kind, those that differ."""
    before, after = (dict(p.prediction.peak.totals) if p.prediction.peak else {} for p in (a, b))
    if not before or not after or a.prediction.peak_bytes == b.prediction.peak_bytes:
        return ()
    kinds = dict.fromkeys([*before, *after])
    found = [FigureChange(k.value, "bytes", before.get(k, 0), after.get(k, 0)) for k in kinds]
    apart = (f for f in found if f.before != f.after)
    return tuple(sorted(apart, key=lambda f: -abs(f.after - f.before)))


_FIGURES: tuple[tuple[str, str, Callable[[Plan], float]], ...] = (
    ("step", "seconds", lambda p: p.prediction.seconds),
    ("compute", "seconds", lambda p: p.prediction.compute_seconds),
    ("exposed communication", "seconds", lambda p: p.prediction.exposed_seconds),
    ("communication", "seconds", lambda p: p.prediction.communication_seconds),
    ("recomputing", "seconds", lambda p: p.recomputation.seconds),
    ("bubble", "seconds", lambda p: p.prediction.bubble_seconds),
    ("memory peak", "bytes", lambda p: p.prediction.peak_bytes),
    ("arguments", "bytes", lambda p: p.prediction.argument_bytes),
)
