"""The best few candidates of every schedule, simulated and put in order.

Candidates wait in a line by what a formula gives them; a partition is only traced, and a grid
only made, when its turn comes. Where a partition does not fit under its schedule, one that does is
looked for and waits in its place.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.errors import ScheduleError
from autopar.passes.stage.candidates import Candidate
from autopar.passes.stage.prices import Choice
from autopar.passes.stage.seeds import Seed, Space, tightened
from autopar.schedule.grid import Grid
from autopar.schedule.table import SCHEDULES, make_grid

# So many candidates of a schedule are simulated, and so many tasks in all; none to which the
# formula, which is a few per cent off, gives so many times the best.
_TRIES = 6
_TASKS = 1_000_000
_FAR = 1.1

# Seconds that differ by less are the same.
_DIGITS = 9


@dataclass
class Ranking:
    """What has been simulated and fits; what was met on the way.

    `least_bytes` is the least that one device held of what was simulated and does not fit;
    `refusals` are what schedules said to numbers of microbatches.
    """

    space: Space
    choices: list[Choice] = field(default_factory=lambda: list[Choice]())
    tries: Counter[str] = field(default_factory=lambda: Counter[str]())
    tasks: int = 0
    least_bytes: float = float("inf")
    refusals: list[str] = field(default_factory=lambda: list[str]())
    _line: list[tuple[float, int, int, int, int, Seed | Candidate]] = field(
        default_factory=lambda: list[tuple[float, int, int, int, int, Seed | Candidate]]()
    )
    _grids: dict[tuple[str, int, int], Grid | None] = field(
        default_factory=lambda: dict[tuple[str, int, int], Grid | None]()
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
        if alone and self._is_new(alone):
            self._try(alone)
        for seed in seeds:
            self._wait(seed)
        while self._line and not self._enough(self._line[0][0]):
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
        place = (lead.formula_seconds, lead.devices, lead.microbatches, order, self._arrivals)
        heapq.heappush(self._line, (*place, lead))

    def _is_new(self, candidate: Candidate) -> bool:
        """Whether these stages are met for the first time under this schedule."""
        key = (candidate.microbatches, candidate.parts, candidate.schedule)
        new = key not in self._met
        self._met.add(key)
        return new

    def _enough(self, formula_seconds: float) -> bool:
        """Whether what comes next, with so many seconds, is left out."""
        if not self.choices:
            return False
        if formula_seconds > _FAR * self.best_seconds:
            return True
        return self.tasks > _TASKS or all(self.tries[s] >= _TRIES for s in self.space.schedules)

    def _try(self, candidate: Candidate) -> None:
        """Simulate a candidate, unless it cannot be the best or is known not to fit."""
        hopeless = (candidate.microbatches - 1) * candidate.pace_seconds >= self.best_seconds
        if hopeless or (self.choices and self.tries[candidate.schedule] >= _TRIES):
            return
        grid = self._grid(candidate)
        if grid is None:
            return
        self.tries[candidate.schedule] += 1
        memory = self.space.table.memory_bytes
        # Without chunks and split backwards the closed formula is what the simulator counts.
        exact = candidate.chunks == 1 and not SCHEDULES[candidate.schedule].needs_split
        if exact and max(candidate.formula_bytes) > memory:
            self._miss(candidate, max(candidate.formula_bytes))
            return
        self.tasks += candidate.task_count
        seconds, peaks = candidate.simulated(grid)
        if max(peaks) > memory:
            self._miss(candidate, max(peaks))
            return
        self.choices.append(
            Choice(
                candidate.stages,
                candidate.microbatches,
                candidate.schedule,
                candidate.chunks,
                seconds,
                candidate.formula_seconds,
                peaks,
            )
        )

    def _miss(self, candidate: Candidate, nbytes: int) -> None:
        """Let one that fits wait in its place, if there is one."""
        self.least_bytes = min(self.least_bytes, nbytes)
        if not candidate.tight:
            tight = tightened(self.space, candidate)
            if tight:
                self._wait(tight)

    def _grid(self, candidate: Candidate) -> Grid | None:
        """The grid, made once for each schedule and numbers; None where the schedule refuses."""
        key = (candidate.schedule, candidate.devices, candidate.microbatches)
        if key not in self._grids:
            try:
                self._grids[key] = make_grid(*key, candidate.chunks)
            except ScheduleError as error:
                self.refusals.append(str(error))
                self._grids[key] = None
        return self._grids[key]

    def ranked(self) -> list[Choice]:
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
