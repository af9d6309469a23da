"""Explains one decision of a plan: its choice, the next best with their prices, and what binds.

1. The subject is found: an argument by path or pattern, an op by kind, line or module.
2. Those that read it are followed, past casts and moves, and told in sentences.
3. The other choices of its decision are priced, with all that depends on it chosen anew.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import ArgumentError, bulleted
from autopar.inspecting.compare import sentences
from autopar.inspecting.loaded_plan import Listed, LoadedPlan
from autopar.inspecting.reshardable_unit import (
    ReshardableUnit,
    Weighed,
    too_large,
    units_of,
)
from autopar.ir.explanation import Alternative, Explanation, Price
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.listing import Block, Collective, Fence, LocalOp, Loop, Move
from autopar.ir.naming import RENAMING, Names, and_more, full_name, over, place_of, spec, split
from autopar.ir.paths import common_path, counted_paths, matches, meant, unnumbered
from autopar.ir.plan import Argument
from autopar.ir.rule import Kind
from autopar.ir.sharding import Assignment, MeshShape, Sharding, replicated
from autopar.ir.sharding_plan import OpPath
from autopar.ir.text import show_bytes, show_seconds
from autopar.ir.values import Value
from autopar.passes.shard.diagnose.why import Case, others, unbound
from autopar.passes.shard.model.decisions import Choice, Decision
from autopar.passes.shard.model.pins import CONSTRAINT, show_spec
from autopar.rules import HEAVY

_SHOWN_SUBJECTS = 8

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
        for g in order[:_SHOWN_SUBJECTS]
        for _, _, op in g[:1]
    ]
    if len(order) > _SHOWN_SUBJECTS:
        rows.append(f"and {len(order) - _SHOWN_SUBJECTS} more")
    headline = f"{asked!r} may be any of {len(order)} decisions:"
    return bulleted(
        headline, rows, "Add words until one is left, or write a value's name, such as %7."
    )


def _unknown(loaded: LoadedPlan, asked: str) -> str:
    paths = [a.path for a in loaded.plan.arguments]
    named = [path for path in paths if asked in path.split("/")]
    near = named[:3] or difflib.get_close_matches(asked, paths, n=3, cutoff=0.3)
    known = (
        f"the nearest paths are {', '.join(near)}" if near else and_more(counted_paths(paths), 5)
    )
    return (
        f"{asked!r} is no argument and no op of {loaded.plan.origin.step}: {known}. Write a path, "
        "a pattern such as '**/kernel', or an op by kind, module or line: 'dot_general model.py:12'"
    )


_SHOWN_READERS = 5
_FAR = 200  # values looked at from an argument's new value back to its gradient
_REGIONS = ("forward", "backward", "update")


@dataclass(frozen=True)
class Reader:
    """An op that reads a value in some sharding, after the collectives that brought it there."""

    op: Op
    sharding: Sharding
    via: tuple[Collective, ...]
    runs: int


def reads(listings: Sequence[Listed], name: str) -> tuple[str, ...]:
    """A sentence for each way in which a value is read, forward first, heavy ops first."""
    groups: dict[tuple[object, ...], list[Reader]] = {}
    waiting = [name]
    for form in waiting:  # what one part makes of it, another may read
        for part in listings:
            graph, block = part.graph, part.listing.block
            for reader in _readers(graph, block, form, (), part.runs):
                groups.setdefault(_alike(reader), []).append(reader)
            # Casts and the like of it that leave the graph.
            renamed = (op for op in graph.ops if op.kind in RENAMING and form in op.operands)
            names = (op.results[0].name for op in renamed)
            waiting += [n for n in names if n in graph.outputs and n not in waiting]
    order = sorted(groups.values(), key=_weight)
    sentences = [_sentence(group) for group in order[:_SHOWN_READERS]]
    rest = sum(len(g) for g in order[_SHOWN_READERS:])
    return (*sentences, *([f"{rest} more ops read it"] if rest else ()))


def _alike(reader: Reader) -> tuple[object, ...]:
    """The key that readers of one sentence share; of the update only how it is read."""
    op, via = reader.op, tuple((c.kind, c.axes, c.nbytes) for c in reader.via)
    if op.origin.region == "update" and op.kind not in HEAVY:
        return "update", reader.sharding, via
    return op.kind, op.origin.region, unnumbered(op.origin.module), reader.sharding, via


def _weight(group: Sequence[Reader]) -> tuple[int, int]:
    op = group[0].op
    region = op.origin.region
    return _REGIONS.index(region) if region in _REGIONS else len(_REGIONS), -op.flops


def _readers(
    graph: Graph, block: Block, name: str, via: tuple[Collective, ...], runs: int
) -> Iterator[Reader]:
    """Readers of a value in a block and in the loops of it; casts and the like are gone through."""
    for step in block.instructions:
        if isinstance(step, Move) and step.source == name:
            yield from _readers(graph, block, step.result, (*via, *step.collectives), runs)
        elif isinstance(step, Fence) and name in step.sources:
            result = step.results[step.sources.index(name)]
            yield from _readers(graph, block, result, via, runs)
        elif isinstance(step, LocalOp) and name in step.operands:
            op = graph.op_at(step.equation)
            if op.kind in RENAMING and op.origin.region != "update":
                yield from _readers(graph, block, step.results[0], via, runs)
            else:
                sharding = step.operand_shardings[step.operands.index(name)]
                yield Reader(op, sharding, via, runs)
        elif isinstance(step, Loop) and name in step.operands:
            op = graph.op_at(step.equation)
            assert op.control_flow is not None
            places = op.control_flow.operands[step.operands.index(name)].inputs
            if not places:  # what chooses a branch is read by the loop itself
                yield Reader(op, Sharding(()), via, runs)
            for b, i in places:
                body = step.bodies[b]
                yield from _readers(graph, body, body.inputs[i], via, runs * step.runs)


def _sentence(group: Sequence[Reader]) -> str:
    first, count = group[0], len(group)
    op = first.op
    if op.origin.region == "update" and op.kind not in HEAVY:
        who = "the update reads"
    else:
        alike = unnumbered(place_of(op))
        places = {place_of(r.op) for r in group}
        at = common_path(sorted(p for p in places if unnumbered(p) == alike))
        times = f"{count} " if count > 1 else ""
        who = f"{times}{op.origin.region} {op.kind} ({at}) read{'s' if count == 1 else ''}"
    how = "it replicated" if first.sharding.is_replicated else f"it as {spec(first.sharding)}"
    return f"{who} {how} {_after(first.via)}"


def _after(via: Sequence[Collective]) -> str:
    if not via:
        return "without communication"
    steps = (
        f"{c.kind} over {over(c.axes)} ({show_bytes(c.nbytes)}, {show_seconds(c.seconds)})"
        for c in via
    )
    return f"after {', then '.join(steps)}"


# -- gradients ---------------------------------------------------------------------------------


def arrival(listings: Sequence[Listed], name: str, names: Names) -> Iterator[str]:
    """Sentences on how a value comes to be: by sums, or as an argument's gradient."""
    for part in listings:
        graph, block = part.graph, part.listing.block
        for step in block.instructions:
            if isinstance(step, Move) and step.result == name and step.collectives:
                yield f"it is made {_after(step.collectives)}"
        index = next((k for k, i in enumerate(graph.inputs) if i.value.name == name), -1)
        output = next((o for o, i in graph.donated if i == index), None)
        made = block.outputs[output] if output is not None else None
        sent = _sent(graph, block, made) if made is not None and made != name else None
        if sent is not None:
            made = names.of(sent.value.name)
            yield f"its new value is made {_after(sent.collectives)} of {made}"


def _sent(graph: Graph, block: Block, name: str) -> Move | None:
    """The first move with collectives on the way back through element-wise work."""
    makers = {r: s for s in block.instructions if isinstance(s, LocalOp) for r in s.results}
    moves = {s.result: s for s in block.instructions if isinstance(s, Move)}
    waiting = [name]
    for value in waiting:
        move, run = moves.get(value), makers.get(value)
        if len(waiting) > _FAR:
            return None
        before: tuple[str | None, ...] = ()
        if move is not None:
            if move.collectives:
                return move
            before = (move.source,)
        elif run is not None and graph.op_at(run.equation).kind not in HEAVY:
            op = graph.op_at(run.equation)
            pairs = zip(run.operands, op.operands, strict=True)
            before = tuple(n for n, o in pairs if _count(graph, o) == op.results[0].item_count)
        waiting += [n for n in before if n is not None and n not in waiting]
    return None


def _count(graph: Graph, operand: Operand) -> int:
    if isinstance(operand, str):
        return graph.nested_values[operand].item_count
    return math.prod(operand.shape)


_SHOWN_CHOICES = 3
_MOST = 6  # alternatives told of, with those that do not fit
_NEGLIGIBLE = 1e-6  # of a step


def explain(loaded: LoadedPlan, asked: str) -> Explanation:
    """The decision that a path, a pattern or an op means.

    Raises ArgumentError where nothing of the plan is meant, or several ops are.
    """
    return _Explainer(*find_subject(loaded, asked)).explanation()


@dataclass(frozen=True)
class _Explainer:
    """The explanation of one subject; `case` is as the plan's pins and method leave it."""

    unit: ReshardableUnit
    case: Case
    subject: Subject

    def explanation(self) -> Explanation:
        """The choice, its reasons and its alternatives."""
        s, kept = self.subject, self._kept.sharding
        whole = replicated(len(s.value.shape))
        sharding = kept.sharding_of.get(s.value.name, whole)
        name, listings = s.value.name, self._kept.listings
        found = () if s.node is None else tuple(sorted(self._alternatives(s.node), key=_seconds))
        return Explanation(
            subject=s.name,
            shape=s.value.shape,
            dtype=s.value.dtype,
            submesh=self.unit.submesh,
            choice=spec(sharding) if s.node is None else self._text(self.case, self._own),
            sharding=sharding,
            local_bytes=sharding.local_bytes(s.value, kept.mesh),
            reads=(*reads(listings, name), *arrival(listings, name, Names(self.unit.graph))),
            price=self._kept.price,
            alternatives=found,
            shared_by=s.alike,
            binds=(*_Reasons(self.unit, self.case, s).sentences(), *self._bound(found)),
            others=s.others,
            is_split=s.node is not None and isinstance(self._own, Assignment),
        )

    @cached_property
    def _kept(self) -> Weighed:
        return self.unit.weighed(self.unit.kept, self.case.seconds)

    @property
    def _own(self) -> Choice:
        node = self.subject.node or 0
        return self.case.choices(node)[self.case.chosen[node]]

    def _text(self, case: Case, choice: Choice) -> str:
        """A choice of the decision, as the subject's own sharding or as how its op is split."""
        node, value = self.subject.node or 0, self.subject.value
        op, place = case.decision(node).op, case.place_of(value.name)
        if isinstance(choice, Assignment) and op is not None:
            return split(op, choice, case.mesh)
        if isinstance(choice, Sharding) and place is not None and place.decision == node:
            return spec(place.sharding(choice))
        return str(choice)

    def _alternatives(self, node: int) -> Iterator[Alternative]:
        """The next best that fit, and what would have been better but does not."""
        case, unit = self.case, self.unit
        limit = unit.loaded.plan.origin.memory_bytes
        if not self._free:
            case = unbound(case, node, unit.kept, unit.tables, unit.setting(unit.own_pins))
        shown, fitting = {self._text(self.case, self._own)}, 0
        for pick, answer in others(case, node, limit):
            choice = case.choices(node)[pick]
            text = self._text(case, choice)
            if text in shown:
                continue
            if fitting == _SHOWN_CHOICES or len(shown) > _MOST:
                return
            shown.add(text)
            weighed, least = unit.fitting(case, {node: pick}, answer)
            sharding = choice if isinstance(choice, Sharding) else None
            if weighed is None:
                yield Alternative(text, sharding, None, (), too_large(least, limit))
            else:
                fitting += 1
                subject = frozenset((self.subject.path, *self.subject.alike))
                changes = sentences(unit, self._kept, weighed, subject, text)
                if self._free:
                    changes += two_counts(self._kept.price, weighed.price)
                yield Alternative(text, sharding, weighed.price, tuple(changes))

    @property
    def _free(self) -> bool:
        """True if the plan's pins and method leave more than one choice."""
        return self.subject.node is not None and len(self.case.choices(self.subject.node)) > 1

    def _bound(self, found: Sequence[Alternative]) -> Iterator[str]:
        """The alternatives that memory bars, and what asking for this choice costs."""
        barred = sum(a.price is None for a in found)
        if barred:
            limit = show_bytes(self.unit.loaded.plan.origin.memory_bytes)
            those = "one other choice does" if barred == 1 else f"{barred} other choices do"
            yield f"{those} not fit {limit} a device unless more is recomputed"
        best = min((a for a in found if a.price), key=lambda a: _seconds(a), default=None)
        if self._free or best is None:
            return
        saved = self._kept.price.seconds - _seconds(best)
        if saved > _NEGLIGIBLE * self._kept.price.seconds:
            yield f"if it were free, {best.choice} would take {show_seconds(saved)} less a step"


def _seconds(alternative: Alternative) -> float:
    return alternative.price.seconds if alternative.price is not None else float("inf")


def two_counts(kept: Price, other: Price) -> Iterator[str]:
    """A note where the two ways to count a plan's seconds disagree, or both have this cheaper."""
    dearer = other.solver_seconds - kept.solver_seconds
    longer = other.seconds - kept.seconds
    if abs(dearer) <= _NEGLIGIBLE * kept.solver_seconds:
        return
    cost = f"the cost that the solver minimizes, without overlap, is {show_seconds(abs(dearer))}"
    if abs(longer) <= _NEGLIGIBLE * kept.seconds:
        if dearer < 0:
            yield f"{cost} lower; the predicted step, with overlap and fusion, is as long"
    elif longer < 0 < dearer:
        yield f"{cost} higher, though the predicted step, with overlap and fusion, is shorter"
    elif dearer < 0 < longer:
        yield f"{cost} lower, though the predicted step, with overlap and fusion, is longer"
    elif dearer < 0:
        yield f"{cost} lower, too: a better plan, which the solver has not found"


# -- what binds ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reasons:
    """A subject in its unit, and the case as the plan's own pins and method leave it."""

    unit: ReshardableUnit
    case: Case
    subject: Subject

    def sentences(self) -> tuple[str, ...]:
        """The reasons that bind, what the user asked for first."""
        node = self.subject.node
        if node is None:
            return ("nothing to decide: it is computed where it is read",)
        decision = self.case.decision(node)
        found = [*self._asked(decision, len(self.case.choices(node)))]
        found += self._memory()
        found += _indivisible(self.subject.value.shape, decision, self.case.mesh)
        graph = self.unit.graph
        if self.subject.path in {graph.inputs[i].path for _, i in graph.donated}:
            found.append("it is state: its new value keeps the sharding, in the same buffer")
        found += self._rule(decision)
        if decision.count > 1:
            what = "ops" if decision.op is not None else "values"
            found.append(f"{decision.count} {what} that are alike share this decision")
        return tuple(found)

    def _asked(self, decision: Decision, choices: int) -> Iterator[str]:
        origin = self.unit.loaded.plan.origin
        paths = [a.path for a in self.unit.loaded.plan.arguments]
        for pattern, dims in origin.pins:
            if self.subject.path in meant(pattern, paths):
                yield f"the pin {pattern!r} = {show_spec(dims)} fixes it"
        if decision.label == CONSTRAINT and decision.fixed is not None:
            yield f"the step's own {CONSTRAINT} at {decision.line} fixes it"
        if decision.fixed is None and choices == 1 and origin.method != "auto":
            yield f"method={origin.method!r} allows only this choice"

    def _memory(self) -> Iterator[str]:
        plan = self.unit.loaded.plan
        price = self.unit.kept.outcome.memory_price_seconds_per_byte * 2**30
        if price > 0:
            yield (
                f"memory: {show_bytes(plan.prediction.peak_bytes)} of the "
                f"{show_bytes(plan.origin.memory_bytes)} a device are used; one more GiB would "
                f"save {show_seconds(price)} a step"
            )

    def _rule(self, decision: Decision) -> Iterator[str]:
        op = decision.op
        if op is None or op.rule is None:
            return
        if not op.rule.known:
            yield f"{op.kind} has no sharding rule: it runs replicated on every device"
        whole = sum(f.kind in (Kind.REPLICATE, Kind.PERMUTE) for f in op.rule.factors if f.size > 1)
        if whole:
            yield f"{whole} of its dims cannot be sharded, by the sharding rule of {op.kind}"


def _indivisible(shape: tuple[int, ...], decision: Decision, mesh: MeshShape) -> Iterator[str]:
    """Dims that some axes do not divide, in the value itself or in one that follows it."""
    if not any(n > 1 for n in shape):
        if mesh.device_count > 1:
            yield "it is a scalar, which cannot be sharded"
        return
    follows = len(decision.sizes) == len(shape) and decision.op is None
    for d, n in enumerate(shape):
        least = decision.sizes[d] if follows else n
        for axis, size in zip(mesh.names, mesh.sizes, strict=True):
            if n > 1 and n % size:
                yield f"dim {d} of size {n} is not divisible by {axis}={size}"
            elif n > 1 and least % size:
                yield (
                    f"dim {d} of size {n} is divisible by {axis}={size}, but values that follow it "
                    f"split it into parts of {least}"
                )
