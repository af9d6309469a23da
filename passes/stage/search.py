"""Search of stages, submeshes, logical meshes, microbatches, schedule and recomputation together.

    table of prices --> 1. space: what the user and the cluster allow
                        2. seeds: for each (m, schedules alike, family, number of stages) the
                           partition of least formula seconds, by `dynamic`; for schedules of
                           several chunks an even cut
                        3. simulation: seeds wait in a line by formula seconds; the next is traced
                           to its stages, checked for memory and simulated; one that does not fit
                           is replaced by the best that does; until enough are simulated
                        4. answer: the fastest simulated; or the reason why there is none

The formula is quick and a few per cent off; the simulator runs every task of the schedule. So the
formula proposes, and the simulator decides.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from autopar.cluster.placement import submesh_families
from autopar.errors import InfeasibleError, MemoryLimitError, ScheduleError
from autopar.ir.stages import Remat
from autopar.ir.text import show_bytes, show_seconds
from autopar.passes.base import NO_LIMIT_BYTES, AbstractPass, Setting
from autopar.passes.stage.candidates import Candidate, chunks_of
from autopar.passes.stage.dynamic import (
    Interval,
    Pace,
    Recurrence,
    even_chunks,
    find_frontier,
    min_memory,
    stages_that_fit,
)
from autopar.passes.stage.interval_costs import IntervalCosts, interval_costs
from autopar.passes.stage.prices import Choice, StageTable, Wanted
from autopar.schedule.grid import Grid
from autopar.schedule.table import SCHEDULES, Bubble, check_numbers, in_flight, make_grid

# So many runners-up are reported.
_OTHERS = 8
# So many candidates of a schedule are simulated, and so many tasks in all; none to which the
# formula, which is a few per cent off, gives so many times the best.
_TRIES = 6
_TASKS = 1_000_000
_FAR = 1.1
# Seconds that differ by less are the same.
_DIGITS = 9
# The devices of submeshes, by number, that tile the cluster in any mixture.
Family = Mapping[int, int]


@dataclass(frozen=True)
class Ranked:
    """The best choice, the runners-up in order, and how the best was found.

    `examined` counts the choices that were simulated and fit.
    """

    best: Choice
    others: tuple[Choice, ...]
    examined: int
    sentence: str
    space: SearchSpace = field(repr=False, compare=False)

    @cached_property
    def simple(self) -> Choice | None:
        """The best that a textbook has; None where the devices make no such stages."""
        return simple_choice(self.space)


@dataclass(frozen=True)
class Search(AbstractPass[StageTable, Ranked]):
    """Searches the stages, the number of microbatches and the schedule that are not given."""

    name: ClassVar[str] = "search"
    stages: int | None = None
    microbatches: int | None = None
    schedule: str | None = None

    def run(self, given: StageTable, setting: Setting) -> Ranked:
        """The best choice and the runners-up; raises as `search`."""
        del setting
        return search(given, Wanted(self.stages, self.microbatches, self.schedule))


def search(table: StageTable, wanted: Wanted = Wanted()) -> Ranked:
    """Find the fastest stages by simulation, among the best by formula.

    Raises MemoryLimitError if nothing fits the devices, with the least that any stages need;
    InfeasibleError if the wish cannot be met by these layers, devices or schedules.
    """
    # 1. The space.
    table.verify()
    space = _space(table, wanted)
    # 2. and 3. Seeds, which the ranking turns into candidates and simulates.
    ranking = Ranking(space)
    ranking.run(one_stage(space), (*_flat_seeds(space), *_chunk_seeds(space)))
    # 4. The answer.
    if not ranking.choices:
        raise _refusal(space, ranking)
    best, *others = ranking.rank()
    sentence = _summary(best, others, len(ranking.choices))
    return Ranked(best, tuple(others[:_OTHERS]), len(ranking.choices), sentence, space)


# -- 1. the space --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """The part of a table that is searched.

    `batches` are the costs of each number of microbatches; `stages` is None for any number.
    """

    table: StageTable
    batches: tuple[IntervalCosts, ...]
    families: tuple[Family, ...]
    schedules: tuple[str, ...]
    stages: int | None

    @property
    def flat(self) -> tuple[str, ...]:
        """The schedules with one stage on a device."""
        return tuple(s for s in self.schedules if chunks_of(s) == 1)

    @property
    def chunked(self) -> tuple[str, ...]:
        """The schedules with more."""
        return tuple(s for s in self.schedules if chunks_of(s) > 1)

    @property
    def most_stages(self) -> int:
        """The most stages of a flat schedule."""
        pieces = self.table.layer_count - len(set(self.table.joined))
        return self.stages or min(pieces, self.table.cluster.device_count)


def _space(table: StageTable, wanted: Wanted) -> SearchSpace:
    """Cut the table down to the user's wishes; refuses those that it cannot meet."""
    batches = [b for b in table.batches if wanted.microbatches in (None, b.microbatches)]
    if not batches:
        priced = ", ".join(str(b.microbatches) for b in table.batches)
        raise InfeasibleError(
            f"{wanted.microbatches} microbatches cannot be had; this batch goes into {priced}"
        )
    schedules = tuple(s for s in SCHEDULES if s in table.schedules and wanted.schedule in (None, s))
    if not schedules:
        raise InfeasibleError(
            f"schedule {wanted.schedule!r} cannot run this step; it allows "
            f"{', '.join(table.schedules)}"
        )
    families = _families(table)
    if wanted.stages:
        _check_stages(table, families, wanted.stages)
    costs = tuple(interval_costs(table, batch) for batch in batches)
    return SearchSpace(table, costs, families, schedules, wanted.stages)


def _families(table: StageTable) -> tuple[Family, ...]:
    """The cluster's families, of the submeshes that the table prices."""
    number = {submesh: u for u, submesh in enumerate(table.submeshes)}
    found = (
        # A family tiles the cluster in any mixture, so that every sum of devices can be placed.
        {number[s]: s.device_count for s in family if s in number}
        for family in submesh_families(table.cluster)
    )
    return tuple(family for family in found if family)


def _check_stages(table: StageTable, families: Sequence[Family], stages: int) -> None:
    pieces = table.layer_count - len(set(table.joined))
    every = table.cluster.device_count
    if stages > pieces:
        joined = f" ({pieces} that can be parted)" if pieces < table.layer_count else ""
        raise InfeasibleError(
            f"{stages} stages need as many layers, and there are {table.layer_count}{joined}; "
            f"ask for at most {pieces} stages, or for more layers"
        )
    counts = sorted(set[int]().union(*(_stage_counts(family, every) for family in families)))
    if stages not in counts:
        blocks = "; ".join(
            " or ".join(str(table.submeshes[submesh]) for submesh in family) for family in families
        )
        raise InfeasibleError(
            f"the {every} devices of {table.cluster.name} cannot be parted among {stages} stages, "
            f"where one may have {blocks}; numbers of stages that can be had: "
            f"{', '.join(map(str, counts))}"
        )


def _stage_counts(family: Family, every: int) -> set[int]:
    """The numbers of submeshes that can add up to all devices."""
    # counts[n] = numbers of submeshes that make up n devices: a knapsack.
    counts: list[set[int]] = [{0}, *(set[int]() for _ in range(every))]
    for total in range(1, every + 1):
        for devices in family.values():
            if devices <= total:
                counts[total] |= {count + 1 for count in counts[total - devices]}
    return counts[every]


# -- the simple plan -----------------------------------------------------------------------------


def simple_choice(space: SearchSpace) -> Choice | None:
    """The best plan of equal stages, a host each if no number is asked for, all sharded alike.

    The layers are cut as evenly as they can be and run under the schedule that keeps least; the
    number of microbatches is the one of least formula seconds, which weighs the bubble against
    small microbatches. No search should be needed to find it, so none may end up behind it. Where
    none fits by its price it is the one that holds the least: what is built may hold less.
    """
    table, every = space.table, space.table.cluster.device_count
    wanted = space.stages or table.cluster.hosts
    found: list[Candidate] = []
    for costs in space.batches if space.flat else ():
        for f, family in enumerate(space.families):
            equal = [u for u, devices in family.items() if devices * wanted == every]
            for o in np.flatnonzero(np.isin(costs.submesh, equal)).tolist():
                parts = even_chunks(costs, (o,), (0,) * wanted, NO_LIMIT_BYTES)
                if parts is not None:
                    schedule = min(space.flat, key=lambda s: sum(in_flight(s, wanted, wanted, 1)))
                    found.append(Candidate(table, costs, f, parts, schedule, True))
    if not found:
        return None

    def rank(candidate: Candidate) -> tuple[float, float]:
        over = max(0, max(candidate.formula_bytes) - table.memory_bytes)
        return over, candidate.formula_seconds

    best = min(found, key=rank)
    return best.simulated(make_grid(best.schedule, best.devices, best.microbatches, 1))


# -- 2. seeds of candidates ----------------------------------------------------------------------


def one_stage(space: SearchSpace) -> Candidate | None:
    """The best of one stage, under the schedule that keeps least; None if there is none."""
    if space.stages not in (None, 1) or not space.flat:
        return None
    candidates = (
        Candidate(space.table, costs, 0, (Interval(0, costs.layer_count - 1, o),), schedule, False)
        for costs in space.batches
        for o, option in enumerate(costs.options)
        if option.mesh.device_count == space.table.cluster.device_count
        for schedule in space.flat
    )
    # Without a pipeline the formula is exact, so that one candidate is enough.
    fit = (c for c in candidates if max(c.formula_bytes) <= space.table.memory_bytes)
    return min(fit, key=lambda c: (c.formula_seconds, c.formula_bytes), default=None)


@dataclass(frozen=True)
class ScheduleGroup:
    """Schedules of one stage a device that the formula does not tell apart, and costs under them.

    `flights` are the microbatches in flight s = 1.. stages before the end, `windows` those on the
    first of s stages in all.
    """

    schedules: tuple[str, ...]
    costs: IntervalCosts
    flights: tuple[int, ...]
    windows: tuple[int, ...]

    @property
    def bubble(self) -> Bubble:
        """The part of a stage that others wait for once a step."""
        return SCHEDULES[self.schedules[0]].bubble

    def recurrence(self, space: SearchSpace, family: int) -> Recurrence:
        """The recurrence over the stages that fit with so many in flight."""
        devices, limit = space.families[family], space.table.memory_bytes
        return stages_that_fit(self.costs, devices, self.flights, limit, self.bubble)

    @property
    def pace(self) -> Pace:
        """The rest of the formula."""
        return Pace(self.costs.microbatches, self.windows, self.bubble)


def _schedule_groups(
    schedules: Sequence[str], costs: IntervalCosts, most: int
) -> tuple[ScheduleGroup, ...]:
    """Group schedules that have as many microbatches in flight.

    A count that depends on how many stages come before is the least over them, so that no stages
    are left out that may fit.
    """
    found: dict[object, ScheduleGroup] = {}
    for name in schedules:
        counts = [in_flight(name, stages, costs.microbatches, 1) for stages in range(1, most + 1)]
        flights = tuple(
            # flights[s - 1]: in flight s stages before the end, the least over all numbers of
            # stages.
            min(row[len(row) - s] for row in counts[s - 1 :])
            for s in range(1, most + 1)
        )
        windows = tuple(row[0] for row in counts)
        key = SCHEDULES[name].bubble, SCHEDULES[name].needs_split, flights, windows
        alike = found[key].schedules if key in found else ()
        found[key] = ScheduleGroup((*alike, name), costs.under(name), flights, windows)
    return tuple(found.values())


def _flat_seeds(space: SearchSpace) -> tuple[FlatSeed, ...]:
    """The best partition of every number of microbatches and stages, for every group of schedules.

    Large numbers of microbatches come first: they soon give the bound that cuts the others short.
    """
    seeds: list[FlatSeed] = []
    cutoff = math.inf
    for costs in sorted(space.batches, key=lambda r: -r.microbatches):
        for group in _schedule_groups(space.flat, costs, space.most_stages):
            for f in range(len(space.families)):
                recurrence = group.recurrence(space, f)
                found = find_frontier(recurrence, group.pace, cutoff, space.stages)
                cutoff = found.cutoff
                # A bubble term that is less than its stage is in F for the slowest stage too.
                twice = np.where(group.bubble is Bubble.WHOLE, 0.0, found.threshold)
                for stages in np.flatnonzero(np.isfinite(found.seconds)).tolist():
                    threshold = float(found.threshold[stages])
                    seconds = float(found.seconds[stages] - twice[stages])
                    seeds.append(
                        FlatSeed(
                            space, group.schedules, recurrence, costs, f, stages, threshold, seconds
                        )
                    )
    return tuple(seeds)


@dataclass(frozen=True, eq=False)
class FlatSeed:
    """A number of stages at the threshold that is best for it.

    `schedules` are those that the formula does not tell apart.
    """

    space: SearchSpace
    schedules: tuple[str, ...]
    recurrence: Recurrence
    costs: IntervalCosts
    family: int
    devices: int
    threshold: float
    formula_seconds: float

    @property
    def microbatches(self) -> int:
        """m, microbatches of a step."""
        return self.costs.microbatches

    def candidates(self) -> Iterator[Candidate]:
        """Its stages under each of its schedules."""
        parts = self.recurrence.trace_back(self.devices, self.threshold)
        for schedule in self.schedules:
            yield Candidate(self.space.table, self.costs, self.family, parts, schedule, False)


def _chunk_seeds(space: SearchSpace) -> tuple[ChunkSeed, ...]:
    """For every chunked schedule, number of microbatches, submesh and logical mesh."""
    every = space.table.cluster.device_count
    pieces = space.table.layer_count - len(set(space.table.joined))

    def is_wanted(count: int, chunks: int) -> bool:
        wanted = count == space.stages if space.stages else count > 1 or every == 1
        return wanted and count * chunks <= pieces

    return tuple(
        ChunkSeed(space, costs, f, every // devices, options, chunks)
        for chunks in sorted(set(map(chunks_of, space.chunked)))
        for costs in space.batches
        for f, family in enumerate(space.families)
        for submesh, devices in family.items()
        if every % devices == 0 and is_wanted(every // devices, chunks)
        for options in _same_mesh(costs, submesh)
    )


@dataclass(frozen=True, eq=False)
class ChunkSeed:
    """Equal submeshes under one logical mesh, for the schedules of so many chunks."""

    space: SearchSpace
    costs: IntervalCosts
    family: int
    devices: int
    options: tuple[int, ...]
    chunks: int

    @property
    def microbatches(self) -> int:
        """m, microbatches of a step."""
        return self.costs.microbatches

    @property
    def formula_seconds(self) -> float:
        """Seconds if all devices took the same and there were no bubbles: a lower bound."""
        whole = self.costs.seconds[list(self.options), 0, -1].min()
        return self.microbatches * float(whole) / self.devices

    def candidates(self) -> Iterator[Candidate]:
        """Its most even chunks, as if memory were plentiful, under each of its schedules."""
        count, table = self.devices * self.chunks, self.space.table
        parts = even_chunks(self.costs, self.options, (0,) * count, NO_LIMIT_BYTES)
        if not parts:
            return
        for schedule in self.space.chunked:
            if chunks_of(schedule) == self.chunks:
                yield Candidate(table, self.costs, self.family, parts, schedule, False)


Seed = FlatSeed | ChunkSeed


def _same_mesh(costs: IntervalCosts, submesh: int) -> list[tuple[int, ...]]:
    """The options of a submesh, those of one logical mesh together."""
    groups: dict[object, tuple[int, ...]] = {}
    for o in np.flatnonzero(costs.submesh == submesh).tolist():
        mesh = costs.options[o].mesh
        groups[mesh] = (*groups.get(mesh, ()), o)
    return list(groups.values())


# -- 3. simulation, best formula first -----------------------------------------------------------


@dataclass
class Ranking:
    """The line of waiting candidates, and the choices that were simulated and fit.

    `least_bytes` is the least peak of a device among candidates that were timed and do not fit,
    `unfit` are those that no order of tasks fits; `refusal` is the first error of a schedule that
    refuses a number of microbatches.
    """

    space: SearchSpace
    choices: list[Choice] = field(default_factory=lambda: list[Choice]())
    tries: Counter[str] = field(default_factory=lambda: Counter[str]())
    tasks: int = 0
    least_bytes: float = float("inf")
    unfit: list[Candidate] = field(default_factory=lambda: list[Candidate]())
    refusal: str = ""
    _line: list[tuple[float, int, int, int, int, Seed | Candidate]] = field(
        default_factory=lambda: list[tuple[float, int, int, int, int, Seed | Candidate]]()
    )
    _grids: dict[tuple[str, int, int], Grid] = field(
        default_factory=lambda: dict[tuple[str, int, int], Grid]()
    )
    _met: set[object] = field(default_factory=lambda: set[object]())
    _arrivals: int = 0

    @property
    def best_seconds(self) -> float:
        """The least seconds so far."""
        return min((choice.seconds for choice in self.choices), default=float("inf"))

    def run(self, alone: Candidate | None, seeds: Sequence[Seed]) -> None:
        """Take seeds and candidates by their turns until enough are simulated or none is left.

        One stage, which every pipeline must beat, comes first.
        """
        # One stage comes first: its seconds bound every pipeline.
        if alone and self._is_new(alone):
            self._try(alone)
        for seed in seeds:
            self._wait(seed)
        while self._line and not self._enough(self._line[0][0]):
            # The lead with the least formula seconds: a candidate is tried, a seed becomes
            # candidates.
            lead = heapq.heappop(self._line)[-1]
            if isinstance(lead, Candidate):
                self._try(lead)
            else:
                for candidate in lead.candidates():
                    self._wait(candidate)

    def _wait(self, lead: Seed | Candidate) -> None:
        order = len(SCHEDULES)
        if isinstance(lead, Candidate):
            if not self._is_new(lead):
                return
            order = list(SCHEDULES).index(lead.schedule)
        self._arrivals += 1
        # Ties: fewer stages, fewer microbatches, first schedule of the table, first come.
        place = (lead.formula_seconds, lead.devices, lead.microbatches, order, self._arrivals)
        heapq.heappush(self._line, (*place, lead))

    def _is_new(self, candidate: Candidate) -> bool:
        """True if these stages are met for the first time under this schedule."""
        key = (candidate.microbatches, candidate.parts, candidate.schedule)
        new = key not in self._met
        self._met.add(key)
        return new

    def _enough(self, formula_seconds: float) -> bool:
        """True if the rest of the line, from so many formula seconds on, is left out."""
        if not self.choices:
            return False
        # The formula is a few per cent off, so what it puts this far behind cannot win.
        if formula_seconds > _FAR * self.best_seconds:
            return True
        return self.tasks > _TASKS or all(self.tries[s] >= _TRIES for s in self.space.schedules)

    def _try(self, candidate: Candidate) -> None:
        """Simulate a candidate, unless it cannot be the best or is known not to fit."""
        # (m - 1) w is a lower bound of any schedule's seconds.
        hopeless = (candidate.microbatches - 1) * candidate.pace_seconds >= self.best_seconds
        if hopeless or (self.choices and self.tries[candidate.schedule] >= _TRIES):
            return
        if not self._allows(candidate):
            return
        self.tries[candidate.schedule] += 1
        memory = self.space.table.memory_bytes
        # Without chunks and split backwards the closed formula is what the simulator counts.
        # Memory is checked before anything is simulated, where a formula is exact.
        exact = candidate.chunks == 1 and not SCHEDULES[candidate.schedule].needs_split
        if exact and max(candidate.formula_bytes) > memory:
            self._miss(candidate, max(candidate.formula_bytes))
            return
        self.tasks += candidate.task_count
        # What no order of tasks holds less than needs no simulation.
        if max(candidate.least_bytes) > memory:
            self.unfit.append(candidate)
            self._miss(candidate)
            return
        # The simulator has the last word on seconds and bytes.
        choice = candidate.simulated(self._grid(candidate))
        if max(choice.peak_bytes) > memory:
            self._miss(candidate, max(choice.peak_bytes))
            return
        self.choices.append(choice)

    def _miss(self, candidate: Candidate, nbytes: float = math.inf) -> None:
        """Let one that fits wait in its place, if there is one."""
        self.least_bytes = min(self.least_bytes, nbytes)
        # Its stages were chosen for the schedule in its group that keeps least: choose them for
        # this one.
        if not candidate.tight:
            tight = _tighten(self.space, candidate)
            if tight:
                self._wait(tight)

    def _allows(self, candidate: Candidate) -> bool:
        """True if its schedule allows so many stages and microbatches."""
        numbers = candidate.devices, candidate.microbatches, candidate.chunks
        try:
            check_numbers(SCHEDULES[candidate.schedule], *numbers)
        except ScheduleError as error:
            self.refusal = self.refusal or str(error)
            return False
        return True

    def _grid(self, candidate: Candidate) -> Grid:
        """The grid, made once for each schedule and numbers."""
        key = (candidate.schedule, candidate.devices, candidate.microbatches)
        if key not in self._grids:
            self._grids[key] = make_grid(*key, candidate.chunks)
        return self._grids[key]

    def leanest(self) -> float:
        """The least peak of a device among all candidates that do not fit."""
        unfit = (max(c.simulated(self._grid(c)).peak_bytes) for c in self.unfit)
        return min([self.least_bytes, *unfit])

    def rank(self) -> list[Choice]:
        """The choices, best first.

        Of equals: fewest stages, then microbatches, least memory, first schedule of the table.
        """
        names = list(SCHEDULES)
        return sorted(
            self.choices,
            key=lambda c: (
                float(f"{c.seconds:.{_DIGITS}g}"),
                len(c.stages),
                c.microbatches,
                max(c.peak_bytes),
                names.index(c.schedule),
            ),
        )


# -- a candidate that fits in place of one that does not -----------------------------------------


def _tighten(space: SearchSpace, candidate: Candidate) -> Candidate | None:
    """The best of as many stages that fits under the candidate's own schedule; None if none does.

    Chunks each get an equal part of a device's memory, which is stricter than need be.
    """
    costs, name, devices = candidate.costs, candidate.schedule, candidate.devices
    flights = in_flight(name, devices, candidate.microbatches, candidate.chunks)
    parts: tuple[Interval, ...] | None = None
    if candidate.chunks > 1:
        first = candidate.parts[0].option
        (options,) = [o for o in _same_mesh(costs, int(costs.submesh[first])) if first in o]
        shares = [-(-flights[device] // candidate.chunks) for device in candidate.device_of]
        limit = space.table.memory_bytes
        parts = even_chunks(costs.under(name), options, shares, limit, candidate.chunks)
    else:
        windows = [in_flight(name, p, costs.microbatches, 1)[0] for p in range(1, devices + 1)]
        group = ScheduleGroup((name,), costs.under(name), flights[::-1], tuple(windows))
        recurrence = group.recurrence(space, candidate.family)
        found = find_frontier(recurrence, group.pace, only=devices)
        if math.isfinite(found.seconds[devices]):
            parts = recurrence.trace_back(devices, float(found.threshold[devices]))
    return replace(candidate, parts=parts, tight=True) if parts else None


# -- 4. the answer, or why there is none ---------------------------------------------------------


def _summary(best: Choice, others: Sequence[Choice], examined: int) -> str:
    """Describe the best choice, and the best of the other kind: a pipeline, or one stage."""
    alone = best.devices == 1
    rivals = [choice for choice in others if (choice.devices == 1) is not alone]
    rival = f"; {_describe(rivals[0])}" if rivals else ""
    return f"{_describe(best)}, the best of {examined} that were simulated{rival}."


def _describe(choice: Choice) -> str:
    seconds = show_seconds(choice.seconds)
    if choice.devices == 1:
        return f"one stage with {choice.microbatches} microbatches takes {seconds}"
    chunks = f" in {choice.chunks} chunks each" if choice.chunks > 1 else ""
    return (
        f"{choice.devices} stages{chunks} with {choice.microbatches} microbatches under "
        f"{choice.schedule} take {seconds}"
    )


def _refusal(space: SearchSpace, ranking: Ranking) -> InfeasibleError:
    """The error that tells why no candidate is left."""
    limit = space.table.memory_bytes
    least = _min_memory(space)
    # a. No stages fit, whatever the schedule.
    if least and least[0] > limit:
        return MemoryLimitError(
            f"no stages fit the {show_bytes(limit)} of a device: the least that any need is "
            f"{show_bytes(least[0])}. {least[1]} Use more microbatches, more devices, or let "
            "forwards be recomputed"
        )
    # b. Some fit, but not under the schedules that are allowed.
    leanest = ranking.leanest()
    if leanest < math.inf:
        return MemoryLimitError(
            f"no stages fit the {show_bytes(limit)} of a device under "
            f"{' or '.join(space.schedules)}: the leanest that were tried need "
            f"{show_bytes(leanest)}. Allow a schedule that keeps fewer, as 1f1b"
        )
    # c. A schedule refuses the number of microbatches.
    if ranking.refusal:
        return InfeasibleError(ranking.refusal)
    # d. No sharding suits the submeshes that are left.
    if unsuited := _describe_unsuited(space):
        return InfeasibleError(unsuited)
    chunked = space.chunked and not space.flat
    why = "with two stages on each of some equal submeshes" if chunked else "of priced submeshes"
    return InfeasibleError(
        f"no stages can be made {why} of {space.table.cluster.name} from "
        f"{space.table.layer_count} layers; ask for fewer stages or another schedule"
    )


def _describe_unsuited(space: SearchSpace) -> str:
    """Name the submeshes that no sharding suits; empty if each has one.

    As under `dp`, if a microbatch has fewer rows than the submesh has devices.
    """
    suited = {u for costs in space.batches for u in costs.submesh.tolist()}
    shapes = list(enumerate(space.table.submeshes))
    without = ", ".join(str(shape) for u, shape in shapes if u not in suited)
    if not without:
        return ""
    able = ", ".join(str(shape) for u, shape in shapes if u in suited)
    counts = " or ".join(str(costs.microbatches) for costs in space.batches)
    return (
        f"no stages can be made of {space.table.cluster.name}: with {counts} microbatches the "
        f"sharding asked for suits submeshes of {able}, but not of {without}. Use fewer "
        "microbatches, more stages, or another method"
    )


def _min_memory(space: SearchSpace) -> tuple[int, str] | None:
    """The least bytes that the leanest schedule needs on some device, and what needs them."""
    least: tuple[int, str] | None = None
    for costs in space.batches:
        most = 1 + int(costs.bytes_at(costs.microbatches).max())
        for group in _schedule_groups(space.flat, costs, space.most_stages):
            for family in space.families:
                below = least[0] if least else most
                found = min_memory(group.costs, family, group.flights, below, space.stages)
                if found:
                    nbytes, parts = found
                    least = nbytes, _binding(space, group.costs, parts, group.flights)
    return least


def _binding(
    space: SearchSpace, costs: IntervalCosts, parts: Sequence[Interval], flights: Sequence[int]
) -> str:
    """Describe the stage that needs the most memory, and what needs it."""
    stages = len(parts)

    def needed(s: int) -> int:
        part = parts[s]
        at = part.option, part.first, part.last
        return int(costs.bytes_at(flights[stages - 1 - s])[at])

    s = max(range(stages), key=needed)
    part = parts[s]
    at = part.option, part.first, part.last
    option = costs.options[part.option]
    submesh = space.table.submeshes[int(costs.submesh[part.option])]
    again = f", {option.remat} remat" if option.remat is not Remat.NONE else ""
    return (
        f"So stage {s} of {stages}, layers {part.first} to {part.last} on {submesh} "
        f"({option.mesh}{again}) with {costs.microbatches} microbatches: "
        f"{show_bytes(int(costs.fixed[at]))} throughout, {flights[stages - 1 - s]} in flight "
        f"of {show_bytes(int(costs.activation[at]))}, and {show_bytes(int(costs.working[at]))} "
        "to work in."
    )
