"""Other choices of one decision: the plan's own problem, posed once and solved around each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.sharding import MeshShape
from autopar.ir.sharding_plan import OpPath, ShardingPlan
from autopar.passes.base import Setting
from autopar.passes.shard.diagnose.infeasible import Posed
from autopar.passes.shard.model.assemble import assemble
from autopar.passes.shard.model.costs import ReshardCosts
from autopar.passes.shard.model.decisions import Choice, Decision, Place, Reading
from autopar.passes.shard.optimal import plan_of
from autopar.passes.shard.recipes.incumbent import known_solution
from autopar.passes.shard.solver.effort import QUICK, Effort
from autopar.passes.shard.solver.heuristic import min_memory
from autopar.passes.shard.solver.problem import Floats, Narrowed, Problem, narrow
from autopar.passes.shard.solver.solve import solve

_ENTRIES = 2_000_000  # of all the tables looked at for one question
_WORK = 300  # units of the solver's, where memory binds
_TIE = 1e-9  # of the seconds
_FEWEST = 5  # choices that are solved around, however large the problem


@dataclass(frozen=True)
class Case:
    """A plan's problem and the assignment of it that the plan is."""

    posed: Posed
    chosen: tuple[int, ...]
    mesh: MeshShape
    reuse_gathered: bool

    @property
    def seconds(self) -> float:
        """Seconds of the plan by the solver's sum."""
        return self.posed.assembled.problem.seconds(self.chosen)

    def choices(self, node: int) -> tuple[Choice, ...]:
        """The choices of a node."""
        return self.posed.assembled.choices[node]

    def place_of(self, value: str) -> Place | None:
        """The decision by which a value lies; None where it is made on demand."""
        reading = self.posed.reading
        standing = reading.standings.get(reading.merged.homes.get(value, value))
        return standing if isinstance(standing, Place) else None

    def node_of(self, path: OpPath) -> int | None:
        """The decision that splits an op of the whole graph; None where none does."""
        reading = self.posed.reading
        merged = (reading.merged.classes[path[0]], *path[1:])
        return reading.op_decisions.get(merged, reading.followers.get(merged))

    def decision(self, node: int) -> Decision:
        """The decision of a node."""
        return self.posed.reading.decisions[node]

    def plan(self, choice: tuple[int, ...]) -> ShardingPlan:
        """The sharding plan of an assignment."""
        posed = self.posed
        solution = known_solution(posed.assembled.problem, choice, "Solved around the pins.")
        return plan_of(posed.reading, posed.assembled, solution, self.mesh, (), self.reuse_gathered)


@dataclass(frozen=True)
class Answer:
    """The cheapest assignment where some nodes are fixed: () at infinity where none fits.

    `needed_bytes` are what any such assignment holds at least; it `is_bound` where what would be
    cheapest without a limit holds too much.
    """

    choice: tuple[int, ...]
    seconds: float
    needed_bytes: float
    is_bound: bool = False


def case_of(posed: Posed, plan: ShardingPlan, reuse_gathered: bool) -> Case:
    """The assignment that a plan is; what it does not tell, or what is barred, is chosen anew."""
    problem = posed.assembled.problem
    left = [np.arange(len(c)) for c in problem.costs]
    for node, wanted in _told(posed, plan):
        options = posed.assembled.choices[node]
        # What enters a loop has each choice twice, as it lies or a copy: a plan does not tell.
        told = [i for i, option in enumerate(options) if option == wanted]
        left[node] = np.array(told) if told else left[node]
    open_nodes = any(len(few) > 1 for few in left)
    narrowed = narrow(replace(problem, usages=()), left)
    inside = solve(narrowed.problem, None, QUICK).choice if open_nodes else (0,) * len(left)
    return Case(posed, narrowed.restore(inside), plan.mesh, reuse_gathered)


def _told(posed: Posed, plan: ShardingPlan) -> Iterator[tuple[int, Choice | None]]:
    """Nodes with what a plan says of them."""
    reading = posed.reading
    first = {c: i for i, c in reversed(list(enumerate(reading.merged.classes)))}
    for path, node in reading.op_decisions.items():
        yield node, plan.assignment_of.get((first[path[0]], *path[1:]))
    for node, decision in enumerate(reading.decisions):
        if decision.value is not None:
            yield node, plan.sharding_of.get(decision.value.name)
    for key, node in posed.assembled.uses.items():
        yield node, plan.use_of.get((key.value, key.phase))


def unbound(
    case: Case, node: int, plan: ShardingPlan, tables: ReshardCosts, setting: Setting
) -> Case:
    """The same case with every choice of one node that its dims allow, pinned or not."""
    reading = case.posed.reading
    freed = replace(reading.decisions[node], fixed=None)
    decisions = (*reading.decisions[:node], freed, *reading.decisions[node + 1 :])
    wider: Reading = replace(reading, decisions=decisions)
    count = len(decisions)
    choices = [tuple(dict.fromkeys(few)) for few in case.posed.assembled.choices[:count]]
    choices[node] = tuple(dict.fromkeys((*choices[node], *tables.choices.of(wider)[node])))
    assembled = assemble(
        wider, choices, tables, setting.memory_bytes, setting.held, case.reuse_gathered
    )
    return case_of(Posed(wider, assembled), plan, case.reuse_gathered)


def others(case: Case, node: int, limit_bytes: float) -> list[tuple[int, Answer]]:
    """The other choices of a node, around each anew what depends on it; the cheapest first.

    All else stays as in the plan, which may not be the cheapest by this sum: of choices that have
    nothing to do with this one a listing may have told that others take less. Where memory binds,
    all choices have to do with each other.

    Of a problem so large that it would take long, only the choices that look best when the nodes
    around them give way are solved.
    """
    problem = case.posed.assembled.problem
    picks = [c for c in range(len(problem.costs[node])) if c != case.chosen[node]]
    entries = sum(e.table.size for e in problem.edges)
    most = max(_FEWEST, _ENTRIES // max(entries, 1))
    if len(picks) > most:
        seconds = _given_way(case, node)
        picks = sorted(picks, key=lambda c: (float(seconds[c]), c))[:most]
    found = [(c, anew(case, {node: c}, limit_bytes)) for c in picks]
    if not anew(case, {}, limit_bytes).is_bound:
        found = [(c, a if a.is_bound else _nearest(case, a, node)) for c, a in found]
    return sorted(found, key=lambda o: (o[1].seconds, o[0]))


def anew(case: Case, fixed: Mapping[int, int], limit_bytes: float) -> Answer:
    """The cheapest assignment with some nodes fixed, and no further from the plan than that asks.

    Memory counts where the cheapest of all is too large.
    """
    return brought_near(case, cheapest_with(case, fixed, limit_bytes), fixed, limit_bytes)


def brought_near(case: Case, found: Answer, fixed: Mapping[int, int], limit_bytes: float) -> Answer:
    """The cheapest assignment with some nodes fixed, no further from the plan than that asks."""
    if not found.choice:
        return found
    choice = homed(case, found.choice, fixed, limit_bytes)
    return replace(found, choice=choice, seconds=case.posed.assembled.problem.seconds(choice))


def cheapest_with(case: Case, fixed: Mapping[int, int], limit_bytes: float) -> Answer:
    """The cheapest assignment with some nodes fixed, however far from the plan."""
    narrowed, start = _fixed(case, fixed)
    within = replace(narrowed.problem, limit_bytes=limit_bytes)
    choice = solve(replace(narrowed.problem, usages=()), lambda: start, QUICK).choice
    is_bound = bool(choice) and not within.fits(choice)
    if is_bound:
        choice = _within(within, start)
    needed = within.needed_bytes
    if not choice:
        return Answer((), float("inf"), needed, is_bound)
    choice = narrowed.restore(choice)
    return Answer(choice, case.posed.assembled.problem.seconds(choice), needed, is_bound)


def _nearest(case: Case, found: Answer, node: int) -> Answer:
    """An answer with all put back that has nothing to do with a node.

              node
    changed   x x x   x x        the island around the node stays changed,
    answer    x x x   . .        the other is as in the plan
    """
    if not found.choice:
        return found
    problem = case.posed.assembled.problem
    changed = {v for v, c in enumerate(found.choice) if c != case.chosen[v]}
    (own,) = (island for island in _islands(problem, changed | {node}) if node in island)
    near = tuple(c if v in own else case.chosen[v] for v, c in enumerate(found.choice))
    return replace(found, choice=near, seconds=problem.seconds(near))


def _within(problem: Problem, start: tuple[int, ...]) -> tuple[int, ...]:
    """A good assignment that fits, () where none is found."""
    if problem.fits_nowhere:
        return ()
    with np.errstate(over="ignore"):  # prices rise without end where nothing fits
        found = solve(problem, lambda: start, Effort(work=_WORK)).choice
    least = () if found else min_memory(problem).choice
    return least if least and problem.fits(least) else found


def _given_way(case: Case, node: int) -> Floats:
    """The seconds of each choice of a node when every node next to it gives way as it likes."""
    problem, chosen = case.posed.assembled.problem, case.chosen
    near: dict[int, Floats] = {}
    for e in problem.edges:
        if node in (e.left, e.right):
            other, table = (e.right, e.table) if e.left == node else (e.left, e.table.T)
            near[other] = near[other] + table if other in near else table
    stays = {v: problem.costs[v] for v in near}
    for e in problem.edges:
        for v, w, table in ((e.left, e.right, e.table), (e.right, e.left, e.table.T)):
            if v in stays and w != node:
                stays[v] = stays[v] + table[:, chosen[w]]
    total = problem.costs[node]
    for v, table in near.items():
        total = total + (table + stays[v]).min(axis=1)
    return total


def _fixed(case: Case, fixed: Mapping[int, int]) -> tuple[Narrowed, tuple[int, ...]]:
    """The problem with some nodes fixed, and the plan's assignment of the rest."""
    problem = case.posed.assembled.problem
    left = [
        np.array([fixed[v]]) if v in fixed else np.arange(len(c))
        for v, c in enumerate(problem.costs)
    ]
    return narrow(problem, left), tuple(0 if v in fixed else c for v, c in enumerate(case.chosen))


def homed(
    case: Case, choice: tuple[int, ...], fixed: Collection[int], limit_bytes: float
) -> tuple[int, ...]:
    """An assignment with all that differs from the plan at no gain put back, island by island."""
    problem = replace(case.posed.assembled.problem, limit_bytes=limit_bytes)
    best, seconds = choice, problem.seconds(choice)
    changed = {v for v, c in enumerate(choice) if c != case.chosen[v]}
    for island in _islands(problem, changed.difference(fixed)):
        tried = tuple(case.chosen[v] if v in island else c for v, c in enumerate(best))
        now = problem.seconds(tried)
        if now <= seconds * (1 + _TIE) and problem.fits(tried):
            best, seconds = tried, now
    return best


def _islands(problem: Problem, nodes: set[int]) -> Iterator[set[int]]:
    """Some nodes by how edges among them join them."""
    near: dict[int, list[int]] = {v: [] for v in nodes}
    for e in problem.edges:
        if e.left in nodes and e.right in nodes:
            near[e.left].append(e.right)
            near[e.right].append(e.left)
    left = set(nodes)
    while left:
        island, waiting = set[int](), [min(left)]
        while waiting:
            v = waiting.pop()
            if v not in island:
                island.add(v)
                waiting += near[v]
        left -= island
        yield island
