"""Plans a step on one mesh within a limit: sharding more, recomputing, or a recipe."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cost.timeline import Seconds
from autopar.errors import AutoparError, InfeasibleError, MemoryLimitError
from autopar.ir.graph import Graph
from autopar.ir.listing import Listing
from autopar.ir.sharding import MeshShape
from autopar.ir.sharding_plan import Margin, Outcome, Recomputation, ShardingPlan, Status
from autopar.ir.stages import Submesh
from autopar.passes.base import NO_LIMIT_BYTES, AbstractSharding, Setting, Watcher
from autopar.passes.pipeline import PassPipeline
from autopar.passes.shard.diagnose.why import (
    Answer,
    Case,
    anew,
    brought_near,
    case_of,
    cheapest_with,
)
from autopar.passes.shard.model.costs import ReshardCosts
from autopar.passes.shard.model.read import Readings
from autopar.passes.shard.model.residuals import Residuals
from autopar.passes.shard.optimal import EVERY_BYTE, MinMemory, Optimal, Priced, plan_of
from autopar.passes.shard.recipes.incumbent import known_solution
from autopar.passes.shard.solver.heuristic import light_answers
from autopar.passes.shard.solver.problem import Problem
from autopar.planner.fit_within import TRIES, Fit, fit_within, fits
from autopar.planner.placed_stages import PlacedStages, SubmeshContext, place_whole
from autopar.planner.remat import Form, LeanerForms, form_of
from autopar.planner.request import Request, is_small
from autopar.planner.stage_programs import StagePrograms, lower_stages

_NO_GAIN = 1e-9
_ROUGH = 0.95  # a recipe's margin is not exact
_WORSE = 1.5  # times the best plan's sum, up to which a recipe's may yet be faster
# What a recipe's seconds are to its sum at least, of what those of the plan without a limit are to
# its own: 0.88 and more of 60 recipes of the models in `benchmarks`. It holds of steps of so many
# seconds: in the sum of a shorter one most is what collectives take to start, which run as one.
_ALIKE, _LONG = 0.8, 5e-3
_WAITED = 0.5  # of the seconds of collectives
_CLEARLY = 0.1  # faster, to give up the proof of the cheapest plan for one that waits for moves
_WORTH_AGAIN = 0.01  # of the seconds, that recomputing where nothing binds must save
_WORTH_KEEPING = 0.02  # of the seconds, that gathering once may save at least
_CLOSE = 0.005  # of the seconds without a limit
_NEAR = 1.25  # by how much more the pass may count than the listing really holds
_ROUNDS = 6  # of looking around arguments, around what is faster or within less
_ARGUMENTS = 4  # that are laid otherwise one by one
_FEW = 300  # ops of a step that is listed so often
_AROUND = 0.25  # of the sum, by how much such a plan may look worse and yet be listed
_LISTED = 64  # of them at most
_SOME = 800  # ops of a step that is looked around for what it waits for
_WAITS = 0.1  # of a step's time, from which on it is looked around what it waits for
_MOVED = 4  # arguments that are looked around
_WORTH_AROUND = 0.02  # of the seconds, that must be saved to give up the proof of the cheapest plan
_NEXT_TO = 0.01  # the least sum: by how much more of it such a plan may cost and yet be listed
_HOPE = 2.0  # times the limit, what a plan may hold from which others are sought that keep it


@dataclass(frozen=True)
class MeshContext:
    """A mesh for a request, and the prices there, which all plans on it share."""

    request: Request
    submesh: SubmeshContext
    watchers: tuple[Watcher, ...] = ()
    readings: Readings = field(default_factory=Readings, compare=False)

    @classmethod
    def of(
        cls, mesh: MeshShape, request: Request, watchers: Sequence[Watcher] = (),
        readings: Readings | None = None,
    ) -> MeshContext:  # fmt: skip
        """A context where nothing is priced yet; `readings` are those of other meshes."""
        submesh = SubmeshContext.of(request.cluster, Submesh(mesh), request.compiler_options)
        return cls(request, submesh, tuple(watchers), readings or Readings())

    @property
    def mesh(self) -> MeshShape:
        """The mesh."""
        return self.submesh.mesh

    @property
    def tables(self) -> ReshardCosts:
        """The prices."""
        return self.submesh.tables

    def setting(self, memory_bytes: int) -> Setting:
        """The setting of passes here within a limit."""
        setting = self.request.setting(self.watchers, self.mesh)
        return replace(setting, memory_bytes=memory_bytes, pins=self.request.pins)

    def optimal(self) -> Optimal:
        """The pass that looks for the cheapest plan by the request's method."""
        return replace(
            self.request.shard, reshard_costs=self.tables, readings=self.readings,
            explain=False, tell_recipes=False,
        )  # fmt: skip


@dataclass(frozen=True)
class StepOnMesh:
    """A form of the step on a mesh, priced once whatever is asked of it.

    Its plans are kept by their limit in bytes, with whether all moves are exposed and recipes told,
    the programs that were made of shardings in turn, and the leaner forms of the step by the values
    that they make again.
    """

    context: MeshContext
    form: Form
    solved: dict[tuple[int, bool, bool], MeshPlan] = field(
        default_factory=lambda: dict[tuple[int, bool, bool], MeshPlan](), compare=False, repr=False
    )
    made: list[MeshPlan] = field(
        default_factory=lambda: list[MeshPlan](), compare=False, repr=False
    )
    leaner: dict[tuple[str, ...], StepOnMesh] = field(
        default_factory=lambda: dict[tuple[str, ...], StepOnMesh](), compare=False, repr=False
    )

    @cached_property
    def priced(self) -> Priced:
        """The form's choices and moves with their prices; raises PinError."""
        context = self.context
        optimal, setting = context.optimal(), context.setting(NO_LIMIT_BYTES)
        return optimal.price(self.form.graph, setting, setting.pins, optimal.recipe)

    @cached_property
    def placed(self) -> PlacedStages:
        """The form as one stage on the mesh."""
        context = self.context
        setting, cluster = context.setting(NO_LIMIT_BYTES), context.request.cluster
        return place_whole(self.form.graph, cluster, setting, context.submesh)

    def optimal(self) -> Optimal:
        """The pass that looks for the cheapest plan by the request's method."""
        return replace(self.context.optimal(), priced=lambda: self.priced)

    def recomputing(self, recomputed: Recomputation) -> StepOnMesh:
        """The step in the form that makes these values again."""
        if recomputed.values not in self.leaner:
            form = form_of(self.form, recomputed, self.context.request.rules)
            self.leaner[recomputed.values] = StepOnMesh(self.context, form)
        return self.leaner[recomputed.values]

    def in_form(self, form: Form) -> StepOnMesh:
        """The step in this form, or in another that may not be priced yet."""
        known = (s for s in (self, *self.leaner.values()) if s.form is form)
        return next(known, None) or StepOnMesh(self.context, form)

    @property
    def is_small(self) -> bool:
        """True if the form has so few ops that it can be planned many times."""
        return is_small(self.form.graph)

    def roomy(self) -> MeshPlan:
        """The cheapest plan without a limit, the recipes not told."""
        return self._solved(self.optimal(), NO_LIMIT_BYTES)

    def cheapest(self, memory_bytes: int) -> MeshPlan:
        """The cheapest plan of which the pass counts no more than a limit.

        One of a deep step without a limit comes with the recipes beside it.
        """
        told = not self.is_small and memory_bytes >= NO_LIMIT_BYTES
        return self._solved(replace(self.optimal(), tell_recipes=told), memory_bytes)

    def within(self, memory_bytes: int) -> MeshPlan | None:
        """The cheapest plan within a limit, by what is counted; None where there is none.

        The pass may count more than listings hold. Where it finds none it may count as many times
        the limit as it counts what the lightest plan holds.
        """
        with suppress(MemoryLimitError):
            return self.cheapest(memory_bytes)
        if not self.may_fit() or self._overcounted == 1.0:
            return None
        with suppress(MemoryLimitError):
            return self.cheapest(int(memory_bytes * self._overcounted))
        return None

    def fit(
        self,
        roomy: Iterable[MeshPlan] = (),
        light: Iterable[MeshPlan] = (),
        tries: int = TRIES,
    ) -> Fit[MeshPlan]:
        """The cheapest plan within the limit, and the fewest bytes that any plan held.

        `roomy` are plans without a limit, `light` those that hold little.
        """
        limit = self.context.request.budget_bytes
        return fit_within(limit, self.within, roomy, None, light, tries, self._counted)

    def fitted(
        self, roomy: MeshPlan, light: Iterable[MeshPlan] = (), tries: int = TRIES
    ) -> MeshPlan | None:
        """The fastest plan found that keeps the limit, None where there is none.

        `roomy` is the plan without a limit, `light` are those that hold little. A plan that waits
        for every move is looked for once within the limit, and where that holds too much within
        what the answer was allowed.
        """
        limit = self.context.request.budget_bytes
        best = self.fit([roomy], light, tries).best
        if best is roomy:
            return best
        narrower = best.allowed_bytes if best is not None else None
        for allowed in dict.fromkeys((limit, narrower or limit)):
            waits = self.waiting(allowed)
            if waits is not None and fits(waits, limit):
                return waits if best is None or _is_faster(waits, best) else best
        return best

    def _counted(self, plan: MeshPlan) -> float:
        """The bytes that the pass counts of a plan."""
        if plan.allowed_bytes is not None and plan.allowed_bytes < NO_LIMIT_BYTES:
            return plan.counted_bytes
        case = self.case_of(plan, EVERY_BYTE)
        return case.posed.assembled.problem.peak_bytes(case.chosen)

    def waiting(self, memory_bytes: int) -> MeshPlan | None:
        """The cheapest plan within a limit if every move is waited for; None where it is no other.

        The pass takes moves off the critical path to run beside work for most of their time. Where
        there is not so much work, the cheapest plan that waits for every move may be the faster
        one. Only of small steps.
        """
        if not self.is_small or self.priced.waits_for_all(memory_bytes):
            return None
        shard = replace(self.optimal(), all_exposed=True)
        try:
            waits = self._solved(shard, memory_bytes)
        except MemoryLimitError:
            return None
        recipes = shard.recipes(self.form.graph, self.context.setting(memory_bytes))
        sentence = "Solved with no overlap: there is little compute to overlap with."
        return waits.told_with(replace(waits.outcome, sentence=sentence, recipes=recipes))

    def recipes(self, memory_bytes: int, keeping: bool = False) -> tuple[Margin, ...]:
        """The costs of the recipes within a limit on what the pass counts.

        With `keeping` they gather once for both passes, too, as a deep step's plan does.
        """
        optimal = self._keeping if keeping and not self.is_small else self.optimal()
        return optimal.recipes(self.form.graph, self.context.setting(memory_bytes))

    def recipe_plans(self, memory_bytes: int, cost: float) -> Iterator[tuple[str, MeshPlan]]:
        """The name and the program of recipes within a limit, not searched for: up to a cost."""
        setting = self.context.setting(memory_bytes)
        for name, sharding in self.optimal().recipe_plans(self.form.graph, setting, cost):
            yield name, self.lowered(sharding, setting)

    def may_fit(self) -> bool:
        """True if the choices that hold least come near the limit: the pass counts no worse."""
        return self.needed_bytes <= _NEAR * self.context.request.budget_bytes

    @property
    def needed_bytes(self) -> float:
        """The bytes that any plan of the form holds at least, by what the pass counts."""
        return self._unlimited.needed_bytes

    @cached_property
    def _overcounted(self) -> float:
        """Bytes that the pass counts of the lightest plan over those it holds, but at least 1."""
        return max(1.0, self._counted(self.lightest) / self.lightest.peak_bytes)

    @property
    def least_argument_bytes(self) -> float:
        """The fewest bytes that a device holds all the while, in whatever form the step runs."""
        problem = self._unlimited
        held = (u for u in problem.usages if u.first == 0 and u.last == problem.horizon - 1)
        return sum(float(u.nbytes.min()) for u in held)

    @property
    def _unlimited(self) -> Problem:
        """The problem with all its memory rows, under a limit that nothing keeps."""
        return self.priced.within(EVERY_BYTE).assembled.problem

    @cached_property
    def _keeping(self) -> Optimal:
        """The pass that gathers once for both passes."""
        own = self.context.optimal()
        return replace(own, reuse_gathered=True, priced=lambda: self._reused)

    @cached_property
    def _reused(self) -> Priced:
        """The form priced where it gathers once for both passes."""
        return self.priced.reusing_gathered()

    def case_of(self, plan: MeshPlan, memory_bytes: float, all_exposed: bool = False) -> Case:
        """A plan as an assignment of its problem under a limit."""
        reuses = plan.sharding.reuse_gathered
        posed = (self._reused if reuses else self.priced).within(memory_bytes, all_exposed)
        return case_of(posed, plan.sharding, reuses)

    def keeping(self) -> MeshPlan:
        """The cheapest plan, whatever it holds, that gathers once for both passes."""
        return self._planned(self._keeping, NO_LIMIT_BYTES)

    @cached_property
    def lightest(self) -> MeshPlan:
        """The plan that holds the least."""
        recipe, tables = self.context.request.shard.recipe, self.context.tables
        shard = MinMemory(recipe, tables, lambda: self.priced)
        return self._planned(shard, self.context.request.budget_bytes)

    def refusal(self) -> AutoparError:
        """Why there is no plan: what cannot be kept together, and which limit would do."""
        recomputes = bool(self.form.recomputed.values)
        setting = self._setting(self.context.request.budget_bytes)
        return self.optimal().refusal(self.form.graph, setting, recomputes)

    def light(self) -> Iterator[MeshPlan]:
        """Plans that hold little, the fastest first; of a deep step only the lightest.

        None is made before the first is asked for.
        """
        posed, setting = self.priced.within(EVERY_BYTE), self.context.setting(NO_LIMIT_BYTES)
        problem = posed.assembled.problem
        answers = light_answers(problem, posed.assembled.copies) if self.is_small else ()
        plans = list[MeshPlan]()
        for choice in dict.fromkeys(answers):
            solution = known_solution(problem, choice, "The fastest that was found to hold little.")
            sharding = plan_of(posed.reading, posed.assembled, solution, self.context.mesh)
            plans.append(self.lowered(sharding, setting))
        yield from sorted(plans, key=lambda p: p.seconds) or [self.lightest]

    def _solved(self, shard: Optimal, memory_bytes: int) -> MeshPlan:
        key = memory_bytes, shard.all_exposed, shard.tell_recipes
        if key not in self.solved:
            planned = self._planned(shard, memory_bytes)
            counted = self.priced.counted_bytes(memory_bytes, shard.all_exposed)
            self.solved[key] = replace(planned, allowed_bytes=memory_bytes, counted_bytes=counted)
        return self.solved[key]

    def _planned(self, shard: AbstractSharding, memory_bytes: int) -> MeshPlan:
        setting = self._setting(memory_bytes)
        sharding = PassPipeline(shard=shard).shard_graph(self.form.graph, setting)
        return self.lowered(sharding, setting)

    def _setting(self, memory_bytes: int) -> Setting:
        """The setting of passes within a limit, which weigh a plan as its program is weighed."""

        def weigh(_: Graph, plan: ShardingPlan) -> float:
            return self.lowered(plan, setting).peak_bytes

        setting = self.context.setting(memory_bytes)
        return replace(setting, weigh=weigh)

    def lowered(self, sharding: ShardingPlan, setting: Setting) -> MeshPlan:
        """The program of the form under a sharding, which is made once."""
        for known in self.made:
            if known.sharding.shards_as(sharding):
                is_told = known.outcome == sharding.outcome
                return known if is_told else known.told_with(sharding.outcome)
        self.made.append(MeshPlan(self.form, lower_stages(self.placed, (sharding,), setting)))
        return self.made[-1]


@dataclass(frozen=True)
class MeshPlan:
    """A form of the step as the program of one stage on a mesh.

    `cost` is the solver's sum, in which all work is done one after the other; `seconds` has
    collectives beside the work that does not wait for them. `allowed_bytes` are those that the
    solver was given, and `counted_bytes` those that its rows count, where it was asked.
    """

    form: Form
    programs: StagePrograms
    allowed_bytes: int | None = None
    counted_bytes: float = math.inf

    @property
    def sharding(self) -> ShardingPlan:
        """The sharding of the step."""
        return self.programs.shardings[0]

    @property
    def listing(self) -> Listing:
        """The listing that every device runs."""
        return self.programs.program.parts[0].listing

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a device holds."""
        return self.programs.peak_bytes[0]

    @property
    def spent(self) -> Seconds:
        """Predicted work and collectives of a step."""
        return self.programs.seconds(0)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.programs.timing.seconds

    @property
    def least_kept_seconds(self) -> float:
        """Seconds that a plan is expected to take at least that gathers once for both passes.

        It saves what this one gathers again, as far as that is waited for.
        """
        return _ROUGH * (self.seconds - self.repeated_seconds)

    @property
    def repeated_seconds(self) -> float:
        """Seconds that are waited for at most while it gathers again, for the backward pass."""
        again = sum(
            runs * c.seconds for m, runs in self.listing.moves() if m.repeat for c in m.collectives
        )
        return min(again, self.spent.exposed)

    @property
    def cost(self) -> float:
        """The sum that the solver minimized, in seconds."""
        return self.outcome.seconds

    @property
    def outcome(self) -> Outcome:
        """The solver's account of it."""
        return self.sharding.outcome

    @cached_property
    def leaner_forms(self) -> LeanerForms:
        """Forms of the step that keep less of it from the forward to the backward pass."""
        key = self.peak_bytes, self.seconds
        known = self.form.leaner_forms.get(key)
        if known is not None:
            return known
        whole, prices = self.programs.whole, self.programs.placed.contexts[0].tables.prices
        sizes, timed = (whole.sizes, whole.timed) if whole is not None else (None, None)
        residuals = Residuals(self.form.graph, self.listing, prices, sizes, timed)
        forms = self.form.leaner_forms[key] = LeanerForms(residuals, self.peak_bytes)
        return forms

    def told(self, step: StepOnMesh, memory_bytes: int) -> MeshPlan:
        """The same with the recipes within a limit beside it, of the step in its form."""
        if self.outcome.recipes or step.context.request.method != "auto":
            return self
        recipes = step.recipes(memory_bytes, self.sharding.reuse_gathered)
        return self.told_with(replace(self.outcome, recipes=recipes))

    def told_as(self, auto: MeshPlan, sentence: str) -> MeshPlan:
        """The same as an answer to `auto`, whose bound and whose recipes are those of its plan."""
        told = auto.outcome
        outcome = replace(
            self.outcome,
            status=Status.FEASIBLE,
            bound_seconds=min(told.bound_seconds, self.cost),
            sentence=sentence,
            recipes=told.recipes,
        )
        return self.told_with(outcome)

    def told_with(self, outcome: Outcome) -> MeshPlan:
        """The same with another account of how it was found."""
        shardings = (replace(self.sharding, outcome=outcome),)
        programs = replace(self.programs, shardings=shardings, priced=self.programs.costs)
        return replace(self, programs=programs)


@dataclass(frozen=True)
class TriedMesh:
    """A step on a mesh, its plan there without a limit, and one within it once that is looked for.

    `within` is None where there is none, or where it was not looked for.
    """

    step: StepOnMesh
    roomy: MeshPlan
    within: MeshPlan | None = None

    @property
    def context(self) -> MeshContext:
        """The mesh, for the request."""
        return self.step.context

    @property
    def fits(self) -> bool:
        """True if the plan without a limit keeps it."""
        return fits(self.roomy, self.context.request.budget_bytes)

    def limited(self) -> TriedMesh:
        """The same with the faster plan whose counted bytes keep the limit, where there is one."""
        limit = self.context.request.budget_bytes
        able = (self.step.within(limit), self.step.waiting(limit))
        fastest = min((p for p in able if p is not None), key=lambda p: p.seconds, default=None)
        return replace(self, within=fastest)

    @cached_property
    def nearest_bytes(self) -> float:
        """The fewest bytes that a known plan would hold, recomputing what it can.

        Infinite where what the step begins with is already too much. The lightest plan is asked
        for only where the plan without a limit is not near.
        """
        request = self.context.request
        limit = request.budget_bytes
        if self.step.least_argument_bytes > limit:
            return math.inf

        def leanest(plan: MeshPlan) -> float:
            if not request.remat or plan.peak_bytes <= limit:
                return plan.peak_bytes
            leaner = plan.leaner_forms.within(limit)
            return plan.peak_bytes - (leaner.saved_bytes if leaner is not None else 0)

        roomy = leanest(self.roomy)
        return roomy if roomy <= _HOPE * limit else min(roomy, leanest(self.step.lightest))

    @property
    def is_near(self) -> bool:
        """True if a plan is known from which one within the limit may be found."""
        return self.nearest_bytes <= _HOPE * self.context.request.budget_bytes

    @property
    def entries(self) -> int:
        """The number of prices that are kept for it."""
        return self.step.priced.assembler.entries

    def put_by(self) -> TriedMesh:
        """The same to be gone into later: what is priced takes memory, and is made again then."""
        return replace(self, step=StepOnMesh(self.step.context, self.step.form))

    @property
    def is_close(self) -> bool:
        """True if a plan within the limit is likely to be found."""
        return self.nearest_bytes <= _NEAR * self.context.request.budget_bytes

    @property
    def least_seconds(self) -> float:
        """Seconds that a plan within the limit is expected to take at least.

        Overlap and recipes may make one faster than the plan without a limit.
        """
        if self.within is not None:
            return self.within.seconds
        return _ROUGH * self.roomy.seconds

    @property
    def promise(self) -> tuple[bool, float]:
        """The key that sorts meshes without room, the most promising first."""
        if self.within is None:
            return True, self.roomy.peak_bytes
        return False, self.within.seconds


def try_mesh(context: MeshContext, plain: Form) -> TriedMesh:
    """The plan without a limit on a mesh; raises InfeasibleError where pins leave none."""
    step = StepOnMesh(context, plain)
    return TriedMesh(step, step.roomy())


def plan_on(tried: TriedMesh, fastest: float = math.inf) -> MeshPlan:
    """The plan on one mesh; where memory binds, recomputing is weighed against sharding more.

    Nothing is gone into that promises less than the `fastest` plan elsewhere: no recipe, and of a
    deep step no other plan where there is room. Raises InfeasibleError, in brief, where there is
    none: `refusal` tells why.
    """
    step, roomy = tried.step, tried.roomy
    # 1. The plan without a limit keeps it.
    if tried.fits:
        if not step.is_small and roomy.least_kept_seconds >= fastest:
            return roomy
        kept = _kept(step, roomy)
        return _faster_again(tried, kept) or kept
    if not tried.is_near:
        raise MemoryLimitError(f"nothing near the limit was found on ({step.context.mesh})")
    # 2. Values are made again for the backward pass. Where that costs nothing it is the answer: no
    #    plan within a limit that binds costs less than one without.
    may_fit = step.may_fit()
    best = _recomputed(tried) if step.context.request.remat else None
    best = _faster_again(tried, best) or best
    # 3. More is sharded, which is of no use to a form that holds too much however it is sharded.
    if may_fit and (best is None or best.cost > roomy.cost * (1 + _CLOSE)):
        with suppress(InfeasibleError):
            sharded = _sharded_more(tried)
            best = sharded if best is None or sharded.seconds <= best.seconds else best
    # 4. A recipe may be faster than either.
    if best is not None or may_fit:
        best = best_recipe(tried, roomy, best, fastest)
    if best is None:
        raise MemoryLimitError(f"no form of the step fits on ({step.context.mesh})")
    return best


def _kept(step: StepOnMesh, roomy: MeshPlan) -> MeshPlan:
    """The plan without a limit, or a faster one: it waits for moves, or gathers once for both
    passes.

    A recipe gathers as its textbook has it.
    """
    if step.context.request.method != "auto":
        return roomy
    best, spent, limit = roomy, roomy.spent, step.context.request.budget_bytes
    if spent.exposed > _WAITED * spent.communication:
        waits = step.waiting(NO_LIMIT_BYTES)
        clearly = roomy.seconds * (1 - _CLEARLY)
        if waits is not None and waits.seconds < clearly and fits(waits, limit):
            best = waits
    # Only where that is waited for long: what this saves is some quarter of it.
    if roomy.repeated_seconds > _WORTH_KEEPING * roomy.seconds:
        kept = step.keeping()
        if _is_faster(kept, best) and fits(kept, limit):
            return kept
    return best


def _is_faster(plan: MeshPlan, other: MeshPlan) -> bool:
    """True if a plan is faster than another by more than rounding."""
    return plan.seconds < other.seconds * (1 - _NO_GAIN)


def _faster_again(tried: TriedMesh, best: MeshPlan | None) -> MeshPlan | None:
    """The fastest plan of a form that makes again what takes longer to keep.

    None where none is clearly faster than the best.
    """
    plain, request = tried.step.form, tried.context.request
    if request.method != "auto" or not request.remat or plain.trace is None:
        return None
    if all(op.kind != "scan" for op in plain.graph.ops):  # only what a scan stacks can take longer
        return None
    forms, known = tried.roomy.leaner_forms, tried.roomy.seconds if best is None else best.seconds

    def planned(recomputed: Recomputation) -> MeshPlan | None:
        step = tried.step.recomputing(recomputed)
        if step.form.graph == plain.graph:  # the model's own checkpoints make it all again already
            return None
        with suppress(InfeasibleError):
            return step.cheapest(NO_LIMIT_BYTES)
        return None

    # 1. All that scans hold is made again.
    checkpointed = forms.checkpointed()
    whole = planned(checkpointed) if checkpointed is not None else None
    found = [whole] if whole is not None else []
    # 2. What saves most by the sum of all ops; from there on ever more, as long as the step gets
    #    clearly shorter. Where to keep nothing is faster already, compilers fuse and schedule it
    #    better than is told: nothing in between is.
    shortest = whole.seconds if whole is not None else math.inf
    for recomputed in forms.ever_leaner(_WORTH_AGAIN * known):
        again = planned(recomputed)
        if again is None or again.seconds >= shortest:
            break
        found.append(again)
        shortest = again.seconds * (1 - _WORTH_AGAIN)
    able = [m for m in found if fits(m, request.budget_bytes)]
    fastest = min(able, key=lambda m: m.seconds, default=None)
    least = math.inf if best is None else best.seconds * (1 - _WORTH_AGAIN)
    return fastest if fastest is not None and fastest.seconds < least else None


def leanest(tried: TriedMesh) -> StepOnMesh:
    """The form of a step that holds the least on a mesh: as it is, or with all made again."""
    step, request = tried.step, tried.context.request
    recomputed = None
    if request.remat and step.form.trace is not None:
        recomputed = tried.roomy.leaner_forms.within(0)
    if recomputed is None:
        return step
    with suppress(InfeasibleError):
        lean = step.recomputing(recomputed)
        return min((step, lean), key=lambda s: s.needed_bytes)
    return step


def _recomputed(tried: TriedMesh) -> MeshPlan | None:
    """The plan that makes as little again as it takes to fit.

    A form's plan without a limit may do, and then no other of it is cheaper; else it may fit
    when it is sharded more, too. What makes most again is sharded as far as it takes.
    """
    limit, forms = tried.context.request.budget_bytes, tried.roomy.leaner_forms
    known: dict[tuple[str, ...], tuple[StepOnMesh, MeshPlan | None]] = {}

    def planned(step: StepOnMesh) -> MeshPlan | None:
        try:
            least = step.cheapest(NO_LIMIT_BYTES)
        except InfeasibleError:
            return None
        return step.fitted(least, tries=2) or least

    def solve(allowed: int) -> MeshPlan | None:
        recomputed = forms.within(allowed)
        if recomputed is None:
            return None
        if recomputed.values not in known:
            step = tried.step.recomputing(recomputed)
            known[recomputed.values] = step, planned(step)
        return known[recomputed.values][1]

    # 1. As little again as it takes.
    best = fit_within(limit, solve).best or solve(0)
    # 2. If it takes all of it, the plans of that form which hold little may be as fast; of a deep
    #    step there is but the one that holds the least.
    steps = [step for step, _ in known.values()]
    last = max(steps, key=lambda s: s.form.recomputed.saved_bytes, default=None)
    found = [best] if best is not None else []
    if last is not None and last.may_fit():
        if best is None or (best.form is last.form and last.is_small):
            found = [*last.light(), *found]
    able = [plan for plan in found if fits(plan, limit)]
    return min(able, key=lambda plan: plan.seconds, default=None)


def best_recipe(
    tried: TriedMesh, auto: MeshPlan, best: MeshPlan | None, fastest: float = math.inf
) -> MeshPlan | None:
    """A recipe's plan that is faster than the best so far and fits; the best where none is.

    The solver's answer costs no more than a recipe's by its sum, in which nothing overlaps, and may
    take longer by the seconds that a plan tells. And what a limit makes of `auto` and of a recipe
    is found by different ways round what the memory rows leave out. So a recipe is gone into where
    its program, with nothing searched, promises to be the faster one. Of deep steps, where each
    plan takes its time, only the recipes' plans without a limit are looked at, of those that the
    sum calls cheaper. An answer has the bound and the recipes of the plan by `auto`.
    """
    step, roomy = tried.step, tried.roomy
    context, small = step.context, step.is_small
    request = context.request
    if request.method != "auto":
        return best
    room = NO_LIMIT_BYTES
    if not small:
        auto = auto.told(step, room)
    elif not tried.fits:
        room = int(_NEAR * request.budget_bytes)

    def promised() -> Iterator[str]:
        if small:
            cost = _WORSE * best.cost if best is not None else math.inf
            if best is not None and best.seconds >= _LONG:
                cost = min(cost, best.seconds * roomy.cost / (_ALIKE * roomy.seconds))
            listed = [(plan.seconds, name) for name, plan in step.recipe_plans(room, cost)]
            # The fastest first, so that none is gone into which only beats the plan so far.
            for seconds, name in sorted(listed, key=lambda row: row[0]):
                if _ROUGH * seconds < min(fastest, best.seconds if best else math.inf):
                    yield name
            return
        for margin in auto.outcome.recipes:
            if margin.seconds is not None and (best is None or margin.seconds < best.cost):
                yield margin.name

    for name in promised():
        own = replace(context, request=request.with_method(name), watchers=())
        try:
            textbook = try_mesh(own, step.form)
            most = min(fastest, best.seconds if best is not None else math.inf)
            if _ROUGH * textbook.roomy.seconds >= most:
                continue
            found = plan_on(textbook, most) if small else textbook.roomy
        except InfeasibleError:
            continue
        faster = best is None or _is_faster(found, best)
        if faster and fits(found, request.budget_bytes):
            best = found.told_as(auto, f"The plan of the recipe {name}.")
    return best


def around_arguments(step: StepOnMesh, best: MeshPlan) -> MeshPlan:
    """The best plan within a limit, or a faster one around another layout of an argument.

    The solver's sum prices each op for itself, where a kernel runs several: of small kernels, whose
    launch is most of their time, it may rank two plans otherwise than their listings do. So for
    each other layout of the arguments that take most room on a device, all else is chosen anew,
    and the plans that the sum puts near the best are listed. Only of steps of a few ops, by `auto`;
    `step` is in the form of the best plan.

        sum       best  x  x        x  x   |  not listed
        listing    o    o  o        *  o   |                  * is the answer

    Around a faster one it looks again. A listing may hold more than the rows of the sum count.
    Where one that is faster holds too much, all is looked for once more within so much less.
    """
    context, limit = step.context, step.context.request.budget_bytes
    if step.form.graph.op_count > _FEW or context.request.method != "auto":
        return best
    setting, fastest, allowed = context.setting(limit), best, limit
    known: dict[tuple[bool, bool, int, int], Answer] = {}
    for _ in range(_ROUNDS):
        around, over = fastest, 0
        for case, choice in _other_layouts(step, around, allowed, known):
            plan = step.lowered(case.plan(choice), setting)
            if not _is_faster(plan, fastest):
                continue
            if fits(plan, limit):
                fastest = plan
            else:
                over = max(over, plan.peak_bytes - limit)
        if fastest is around:
            if not over:
                break
            allowed -= over
    if fastest is best:
        return best
    return fastest.told_as(best, "Solved around other layouts of the largest arguments.")


def around_moves(step: StepOnMesh, best: MeshPlan) -> MeshPlan:
    """The best plan, or a faster one around other layouts of the arguments that are moved longest.

    The solver's sum has every move off the critical path waited for by the same share of its time.
    A listing tells of each: a sum over a network in a loop of short trips may be waited for whole.
    Of two plans whose sums are all but equal one may then take much less. So each layout of the
    arguments whose moves take longest is fixed in turn, and all else is solved anew. Those with
    next to the least sum are listed, and the fastest stays fixed while the next argument is tried:

        moved longest    x  o  o  *  x        x  its sum is larger: not listed
        then             o  *  o  o           *  the fastest, which is kept

    Only of steps of few ops that wait for long and have room, and for GPUs, whose listings are told
    as XLA's timeline has them: there a GPT on two hosts takes 13 % less. `step` is in the form of
    the best plan.
    """
    context, spent = step.context, best.spent
    waits = spent.exposed > _WAITS * best.seconds
    few, on_gpu = step.form.graph.op_count <= _SOME, context.tables.prices.platform == "gpu"
    if not (waits and few and on_gpu) or context.request.method != "auto":
        return best
    case, limit = step.case_of(best, NO_LIMIT_BYTES), context.request.budget_bytes
    setting = context.setting(limit)
    fixed: dict[int, int] = {}
    fastest = best
    for node in _longest_moved(case, best)[:_MOVED]:
        around = [anew(case, {**fixed, node: c}, limit) for c in range(len(case.choices(node)))]
        found = sorted((a.seconds, a.choice) for a in around if a.choice)
        for seconds, choice in found:
            if seconds > found[0][0] * (1 + _NEXT_TO):
                break
            plan = step.lowered(case.plan(choice), setting)
            if _is_faster(plan, fastest) and fits(plan, limit):
                fastest, fixed[node] = plan, choice[node]
    if fastest.seconds > best.seconds * (1 - _WORTH_AROUND):
        return best
    return fastest.told_as(best, "Solved around other layouts of what is moved longest.")


def _longest_moved(case: Case, plan: MeshPlan) -> list[int]:
    """The decisions of arguments that are moved, that whose collectives take longest first."""
    seconds: defaultdict[int, float] = defaultdict(float)
    given = (case.place_of(i.value.name) for i in plan.form.graph.inputs)
    arguments = {place.decision for place in given if place is not None}
    for move, runs in plan.listing.moves():
        place = case.place_of(move.value.name)
        if place is not None and place.decision in arguments:
            seconds[place.decision] += runs * sum(c.seconds for c in move.collectives)
    return sorted((n for n in seconds if seconds[n]), key=lambda n: (-seconds[n], n))


def _other_layouts(
    step: StepOnMesh,
    best: MeshPlan,
    memory_bytes: int,
    known: dict[tuple[bool, bool, int, int], Answer],
) -> Iterator[tuple[Case, tuple[int, ...]]]:
    """Choices around another layout of a large argument, by their sums; the best is left out.

    What was found the cheapest with a layout around another plan, or within more, is `known`.
    """
    found: dict[tuple[int, ...], tuple[float, Case]] = {}
    # 1. One argument is laid otherwise: the rest, with moves beside work, and with all waited for.
    for all_exposed in (False, True):
        case = step.case_of(best, memory_bytes, all_exposed)
        within = replace(case.posed.assembled.problem, limit_bytes=memory_bytes)
        found.setdefault(case.chosen, (math.inf, case))
        for node in _largest_arguments(case, best):
            for choice in range(len(case.choices(node))):
                fixed = {node: choice}
                place = case.reuse_gathered, all_exposed, node, choice
                before = known[place].choice if place in known else None
                if before is None or (before and not within.fits(before)):
                    known[place] = cheapest_with(case, fixed, memory_bytes)
                answer = brought_near(case, known[place], fixed, memory_bytes)
                if answer.choice and answer.choice not in found:
                    found[answer.choice] = answer.seconds / case.seconds, case
    # 2. Those whose sums are near.
    near = sorted((share, key) for key, (share, _) in found.items() if share <= 1 + _AROUND)
    for _, key in near[:_LISTED]:
        yield found[key][1], key


def _largest_arguments(case: Case, plan: MeshPlan) -> list[int]:
    """The decisions of the arguments that take most room on a device, the largest first."""
    lies, mesh = plan.sharding.sharding_of, plan.sharding.mesh
    inputs = [i for i in plan.form.graph.inputs if i.value.name in lies]
    largest = sorted(inputs, key=lambda i: (-lies[i.value.name].local_bytes(i.value, mesh), i.path))
    places = (case.place_of(i.value.name) for i in largest[:_ARGUMENTS])
    return list(dict.fromkeys(place.decision for place in places if place is not None))


def _sharded_more(tried: TriedMesh) -> MeshPlan:
    """A plan within the limit, by sharding alone."""
    step = tried.step
    found = step.fitted(tried.roomy, step.light())
    if found is None:
        raise MemoryLimitError(f"the lightest plan on ({tried.context.mesh}) does not fit")
    return found
