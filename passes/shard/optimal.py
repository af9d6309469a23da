"""The sharding pass: reads the graph, prices every choice, and takes the cheapest that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, TypeVar

from autopar.cost.prices import Prices
from autopar.errors import AutoparError, MemoryLimitError
from autopar.ir.graph import Graph
from autopar.ir.sharding import Assignment, MeshShape, Sharding
from autopar.ir.sharding_plan import Margin, OpPath, Outcome, ShardingPlan, Status
from autopar.passes.base import NO_OPTION, AbstractSharding, Setting
from autopar.passes.shard.diagnose.infeasible import Posed, Refused, WeighChoice, lightest
from autopar.passes.shard.model.assemble import Assembled, Assembler
from autopar.passes.shard.model.costs import ReshardCosts
from autopar.passes.shard.model.decisions import Choice, Place, Reading
from autopar.passes.shard.model.merge_isomorphic import Merged, merge_isomorphic, unmerged
from autopar.passes.shard.model.pins import Pins, apply_pins, loosened, resolve_pins
from autopar.passes.shard.model.read import Readings, read_graph
from autopar.passes.shard.recipes import AbstractRecipe, Free
from autopar.passes.shard.recipes.incumbent import (
    Incumbent,
    Restriction,
    better_of,
    known_solution,
    recipe_incumbent,
    restrictions,
)
from autopar.passes.shard.solver.effort import FULL, Effort
from autopar.passes.shard.solver.heuristic import min_memory
from autopar.passes.shard.solver.problem import Problem
from autopar.passes.shard.solver.solve import Solution, Start, solve

T = TypeVar("T")

EVERY_BYTE = 1.0  # a limit that nothing keeps, under which every byte is counted
_ALIKE = 1 + 1e-9  # times the seconds, what is no other answer


@dataclass(frozen=True)
class Priced:
    """A step read and priced on a mesh, to be posed under any limit, and the answers found so far.

    An answer is kept by its limit in bytes and whether all moves were exposed, with the problem;
    and so are the recipes beside it.
    """

    reading: Reading
    assembler: Assembler
    answers: dict[tuple[float, bool], tuple[Problem, Solution]] = field(
        default_factory=lambda: dict[tuple[float, bool], tuple[Problem, Solution]]()
    )
    incumbents: dict[tuple[float, bool], Incumbent] = field(
        default_factory=lambda: dict[tuple[float, bool], Incumbent]()
    )
    like: Priced | None = None  # another one of the same reading and choices

    def reusing_gathered(self) -> Priced:
        """The same step where what the forward pass gathered is kept for the backward pass."""
        return Priced(self.reading, self.assembler.reusing_gathered(), like=self)

    @cached_property
    def restricted(self) -> Mapping[str, Restriction]:
        """The choices that each recipe leaves."""
        if self.like is not None:
            return self.like.restricted
        return restrictions(self.reading, self.assembler.given, self.assembler.mesh)

    def within(self, limit_bytes: float, all_exposed: bool = False) -> Posed:
        """The problem under a limit; with `all_exposed` no move is taken to run beside work."""
        return Posed(self.reading, self.assembler.within(limit_bytes, all_exposed))

    def incumbent(self, posed: Posed, all_exposed: bool) -> Incumbent:
        """The recipes within the limit of a problem that was posed."""
        key = posed.assembled.problem.limit_bytes, all_exposed
        if key not in self.incumbents:
            self.incumbents[key] = recipe_incumbent(posed.assembled, self.restricted)
        return self.incumbents[key]

    def counted_bytes(self, limit_bytes: float, all_exposed: bool) -> float:
        """The bytes that the rows count of an answer: no limit down to them has another."""
        problem, solution = self.answers[limit_bytes, all_exposed]
        return problem.peak_bytes(solution.choice)

    def waits_for_all(self, limit_bytes: float) -> bool:
        """True if the answer within a limit would be the best too if every move was waited for.

        No assignment costs less so than beside work: where this one costs what it is proven that
        every one costs at least, there is no better one.
        """
        answer = self.answers.get((limit_bytes, False))
        if answer is None or answer[1].status is not Status.OPTIMAL:
            return False
        problem, solution = answer
        exposed = self.within(limit_bytes, True).assembled.problem
        return exposed.seconds(solution.choice) <= problem.seconds(solution.choice) * _ALIKE


@dataclass(frozen=True)
class Optimal(AbstractSharding):
    """The cheapest sharding within a recipe's restrictions: the answer of `solve`.

    A QUICK effort gives a good answer that need not be the best, with no recipe looked at beside
    it. Where nothing fits, `explain` finds out why, which takes time; without it the error is
    brief and `refusal` tells the rest. Recipes that need not be told are looked at only where the
    search needs an answer to start from. `reuse_gathered` keeps what the forward pass gathered for
    the backward pass; `all_exposed` waits for every move, as a step with little work does. In
    graphs of more than `merge_above` ops those that look alike within `hops` share a decision. Runs
    on one cluster and mesh may be given the same `reshard_costs`, and those of one graph there,
    recipe and `reuse_gathered` the same `priced` step; `readings` are for any cluster and mesh.
    """

    name: ClassVar[str] = "optimal"
    recipe: AbstractRecipe = field(default_factory=Free)
    effort: Effort = field(default=FULL, metadata=NO_OPTION)
    explain: bool = field(default=True, metadata=NO_OPTION)
    tell_recipes: bool = field(default=True, metadata=NO_OPTION)
    reuse_gathered: bool = field(default=False, metadata=NO_OPTION)
    all_exposed: bool = field(default=False, metadata=NO_OPTION)
    merge_above: int = 1500
    hops: int = 4
    reshard_costs: ReshardCosts | None = field(default=None, compare=False, metadata=NO_OPTION)
    priced: Callable[[], Priced] | None = field(default=None, compare=False, metadata=NO_OPTION)
    readings: Readings | None = field(default=None, compare=False, metadata=NO_OPTION)

    def run(self, given: Graph, setting: Setting) -> ShardingPlan:
        """The plan; raises PinError, MemoryLimitError or InfeasibleError where there is none."""
        return next(self.run_within(given, setting, (setting.memory_bytes,)))

    def run_within(
        self, given: Graph, setting: Setting, limits: Sequence[int]
    ) -> Iterator[ShardingPlan]:
        """The plan within each of some limits, of a problem posed once; raises as `run`.

        What is proven the cheapest within a limit, and keeps a tighter one, is its plan too. The
        problem is posed at once; without `explain` MemoryLimitError is raised then, if not even the
        widest limit leaves a choice.
        """

        def build() -> tuple[Priced, Posed]:
            priced = self.priced_step(given, setting)
            return priced, priced.within(min(limits), self.all_exposed)

        priced, posed = setting.watched("build", given, build)
        widest = replace(posed.assembled.problem, limit_bytes=max(limits))
        if not self.explain and widest.fits_nowhere:
            raise self._in_brief(setting)
        return self._plans(given, setting, priced, posed, limits)

    def _plans(
        self, given: Graph, setting: Setting, priced: Priced, posed: Posed, limits: Sequence[int]
    ) -> Iterator[ShardingPlan]:
        known: tuple[float, Solution, ShardingPlan] | None = None  # the first is the limit
        for limit in limits:
            problem = replace(posed.assembled.problem, limit_bytes=limit)
            if known is None or not _answers(known[0], known[1], problem):
                within = replace(posed, assembled=replace(posed.assembled, problem=problem))
                recipes, solution = self._solution(given, setting, priced, within)
                plan = plan_of(
                    within.reading, within.assembled, solution, setting.mesh, recipes,
                    self.reuse_gathered,
                )  # fmt: skip
                known = limit, solution, plan
            _, solution, plan = known
            priced.answers[limit, self.all_exposed] = problem, solution
            yield plan

    def _solution(
        self, given: Graph, setting: Setting, priced: Priced, posed: Posed
    ) -> tuple[tuple[Margin, ...], Solution]:
        """The recipes and the answer of a problem that is posed; raises where there is none."""
        recipes, solution = setting.watched("solve", posed, lambda: self._answer(priced, posed))
        if not (solution.feasible or self.explain):
            raise self._in_brief(setting)
        if not solution.feasible:
            raise self._refused(given, setting, posed).error()
        return recipes, solution

    def _in_brief(self, setting: Setting) -> MemoryLimitError:
        return MemoryLimitError(f"{self.recipe.name} found no plan on ({setting.mesh})")

    def _answer(self, priced: Priced, posed: Posed) -> tuple[tuple[Margin, ...], Solution]:
        """The recipes, where they are not what is asked for, and an answer no dearer than they."""
        problem = posed.assembled.problem
        free = not self.effort.quick and isinstance(self.recipe, Free) and not problem.fits_nowhere

        def incumbent() -> Incumbent:
            return priced.incumbent(posed, self.all_exposed) if free else Incumbent()

        solution = _solved(problem, lambda: incumbent().choice, self.effort)
        if solution.status is not Status.OPTIMAL:
            solution = better_of(solution, incumbent())
        return incumbent().margins if self.tell_recipes else (), solution

    def recipes(self, given: Graph, setting: Setting) -> tuple[Margin, ...]:
        """The costs of the recipes, where they are not what is asked for."""
        found = self._incumbent(given, setting)
        return found[1].margins if found is not None else ()

    def recipe_plans(
        self, given: Graph, setting: Setting, most_seconds: float
    ) -> Iterator[tuple[str, ShardingPlan]]:
        """Each recipe's name and plan, of those within the limit that cost no more than so much."""
        found = self._incumbent(given, setting)
        if found is None:
            return
        posed, incumbent = found
        for margin, choice in zip(incumbent.margins, incumbent.choices, strict=True):
            if margin.seconds is not None and margin.seconds <= most_seconds:
                solution = known_solution(posed.assembled.problem, choice, margin.note)
                yield (
                    margin.name,
                    plan_of(posed.reading, posed.assembled, solution, setting.mesh),
                )

    def _incumbent(self, given: Graph, setting: Setting) -> tuple[Posed, Incumbent] | None:
        if not isinstance(self.recipe, Free):
            return None
        priced = self.priced_step(given, setting)
        posed = priced.within(setting.memory_bytes, self.all_exposed)
        if posed.assembled.problem.fits_nowhere:
            return None
        return posed, priced.incumbent(posed, self.all_exposed)

    def price(
        self,
        given: Graph,
        setting: Setting,
        pins: Pins,
        recipe: AbstractRecipe,
        loose: frozenset[str] = frozenset(),
    ) -> Priced:
        """The step under pins and a recipe, its constraints at `loose` lines let go.

        `Priced.within` poses it as a problem for any limit.
        """
        fixed = resolve_pins(given, pins, setting.mesh)

        def merged() -> Merged:
            deep = given.op_count > self.merge_above
            return merge_isomorphic(given, self.hops, fixed) if deep else unmerged(given)

        if self.readings is not None and not fixed:
            read = self.readings.of(given, setting.partial_sums, merged)
        else:
            read = read_graph(merged(), setting.partial_sums)
        reading = loosened(apply_pins(read, fixed, setting.mesh), loose)
        tables = self.reshard_costs or ReshardCosts(Prices(setting.cluster, setting.mesh))
        choices = tables.choices.of(reading)
        if setting.mesh.names:  # on one device all recipes are alike
            choices = recipe.restrict(reading, choices, setting.mesh)
        assembler = Assembler(reading, choices, tables, setting.held, self.reuse_gathered)
        return Priced(reading, assembler)

    def priced_step(self, given: Graph, setting: Setting) -> Priced:
        """The step with its prices, as it was given or made now."""
        if self.priced is not None:
            return self.priced()
        return self.price(given, setting, setting.pins, self.recipe)

    def refusal(self, given: Graph, setting: Setting, recomputes: bool = False) -> AutoparError:
        """Why there is no plan: what cannot be kept together, and which limit would do.

        It says so where the step already `recomputes` all that saves memory.
        """
        priced = self.priced_step(given, setting)
        return self._refused(given, setting, priced.within(EVERY_BYTE), recomputes).error()

    def _refused(
        self, given: Graph, setting: Setting, posed: Posed, recomputes: bool = False
    ) -> Refused:
        def pose(pins: Pins, recipe: AbstractRecipe, loose: frozenset[str]) -> Posed:
            return self.price(given, setting, pins, recipe, loose).within(EVERY_BYTE)

        return Refused(setting, self.recipe, posed, pose, weigher(given, setting), recomputes)


@dataclass(frozen=True)
class MinMemory(AbstractSharding):
    """The least peak that was found within a recipe's restrictions; the limit is not looked at."""

    name: ClassVar[str] = "min_memory"
    recipe: AbstractRecipe = field(default_factory=Free)
    reshard_costs: ReshardCosts | None = field(default=None, compare=False)
    priced: Callable[[], Priced] | None = field(default=None, compare=False)

    def run(self, given: Graph, setting: Setting) -> ShardingPlan:
        """The plan; raises PinError or InfeasibleError where there is none at all."""
        optimal = Optimal(recipe=self.recipe, reshard_costs=self.reshard_costs, priced=self.priced)
        priced = optimal.priced_step(given, setting)
        posed = priced.within(EVERY_BYTE)
        problem = posed.assembled.problem
        choice, _ = lightest(posed, weigher(given, setting))
        if problem.costs and not choice:
            raise replace(optimal, priced=lambda: priced).refusal(given, setting)
        solution = known_solution(problem, choice, "The least memory found.")
        return plan_of(posed.reading, posed.assembled, solution, setting.mesh)


def weigher(given: Graph, setting: Setting) -> WeighChoice:
    """The bytes that an assignment is known to need, as the setting weighs its plan."""

    def weigh(posed: Posed, choice: tuple[int, ...]) -> float:
        solution = known_solution(posed.assembled.problem, choice, "")
        plan = plan_of(posed.reading, posed.assembled, solution, setting.mesh)
        return setting.weigh(given, plan)

    return weigh


def _answers(limit_bytes: float, solution: Solution, problem: Problem) -> bool:
    """True if what was found within a limit is the answer within a problem's own, tighter one."""
    is_tighter = problem.limit_bytes <= limit_bytes
    is_proven = solution.status is Status.OPTIMAL
    return is_tighter and is_proven and problem.fits(solution.choice)


def _solved(problem: Problem, start: Start, effort: Effort) -> Solution:
    """The cheapest assignment that fits, or what holds the least if nothing else was found."""
    if problem.fits_nowhere:
        nothing = known_solution(problem, (), "No assignment fits.")
        return replace(nothing, proven_infeasible=True)
    solution = solve(problem, start, effort)
    if solution.feasible:
        return solution
    least = min_memory(problem)
    fits = bool(least.choice) and problem.fits(least.choice)
    return known_solution(problem, least.choice if fits else (), "The least memory found.")


def plan_of(
    reading: Reading,
    assembled: Assembled,
    solution: Solution,
    mesh: MeshShape,
    recipes: tuple[Margin, ...] = (),
    reuse_gathered: bool = False,
) -> ShardingPlan:
    """The sharding plan of the whole step that an assignment of a problem means."""
    picked: Sequence[Choice] = [
        options[i] for options, i in zip(assembled.choices, solution.choice, strict=True)
    ]
    uses = {
        (key.value, key.phase): chosen
        for key, node in assembled.uses.items()
        if isinstance(chosen := picked[node], Sharding)
    }
    return ShardingPlan(
        mesh,
        tuple(_values(reading, picked)),
        tuple(
            (path, chosen)
            for path, node in _everywhere(reading.merged, reading.op_decisions)
            if isinstance(chosen := picked[node], Assignment)
        ),
        tuple(_uses(reading.merged, uses)),
        tuple(_everywhere(reading.merged, reading.partial_operands)),
        Outcome(
            solution.status,
            solution.seconds,
            solution.bound_seconds,
            solution.sentence,
            recipes,
            solution.memory_price_seconds_per_byte,
        ),
        reuse_gathered,
    )


def _values(reading: Reading, picked: Sequence[Choice]) -> Iterator[tuple[str, Sharding]]:
    """The placed values of the whole step, each lying as the one that stands for it."""
    laid: dict[str, Sharding] = {}
    for home, standing in reading.standings.items():
        chosen = picked[standing.decision] if isinstance(standing, Place) else None
        if isinstance(standing, Place) and isinstance(chosen, Sharding):
            laid[home] = standing.sharding(chosen)
    for name, home in reading.merged.homes.items():
        if home in laid:
            yield name, laid[home]


def _everywhere(merged: Merged, found: Mapping[OpPath, T]) -> Iterator[tuple[OpPath, T]]:
    """The choice for an op, given to each op that it stands for."""
    inner: dict[int, list[tuple[OpPath, T]]] = {}
    for path, what in found.items():
        inner.setdefault(path[0], []).append((path[1:], what))
    for i, c in enumerate(merged.classes):
        for rest, what in inner.get(c, ()):
            yield (i, *rest), what


def _uses(
    merged: Merged, found: Mapping[tuple[str, str], Sharding]
) -> Iterator[tuple[str, str, Sharding]]:
    """The shardings in which ops of a region read values, if not in the values' own."""
    regions: dict[str, list[tuple[str, Sharding]]] = {}
    for (home, region), sharding in found.items():
        regions.setdefault(home, []).append((region, sharding))
    for name, home in merged.homes.items():
        for region, sharding in regions.get(home, ()):
            yield name, region, sharding
