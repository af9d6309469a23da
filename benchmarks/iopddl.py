"""Solves problems of the IOPDDL contest and says how good the answers are, one line a problem.

    python -m benchmarks.iopddl FILE... --time-limit S --json [--solution OUT.json]

The time counts from the opening of a file, reading and compiling included. Costs are evaluated
with whole numbers; infeasible answers are told as such, never as answers.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from autopar.errors import InputError
from autopar.passes.shard.solver.effort import (
    AbstractDeadline,
    AbstractMeter,
    Effort,
    WorkMeter,
    bounded,
)
from autopar.passes.shard.solver.problem import Problem
from autopar.passes.shard.solver.solve import solve
from benchmarks.iopddl_file import read_iopddl

_RESERVE = 0.02  # of the limit, to bring the answer home
_RESERVE_SECONDS = 0.7
_SECONDS_A_CHUNK, _FIRST_ENTRIES = 0.15, 1_000_000  # of a chunk of the search


@dataclass(frozen=True)
class Line:
    """What is reported of a problem; without an answer that fits, cost and gap are None."""

    name: str
    feasible: bool
    cost: int | None
    bound: int
    gap: float | None
    first_feasible_seconds: float | None
    seconds: float
    peak_memory_mib: int
    note: str


class Clock(AbstractDeadline):
    """The contest's deadline: so many seconds from when it began, and so much work if it is told.

    The machine code of the search is compiled beside it: a busy machine may take minutes.
    """

    def __init__(self, seconds: float, began: float, work: float = math.inf) -> None:
        self.seconds, self.work, self._began = seconds, work, began
        self.first_seconds = math.inf

    @property
    def spent_seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        """True if no second is left."""
        return self.spent_seconds >= self.seconds

    def answered(self) -> None:
        """Note when the first answer was there."""
        self.first_seconds = min(self.first_seconds, self.spent_seconds)

    def builds(self, build: Callable[[], None]) -> bool:
        """True if that is done within the seconds."""
        thread = threading.Thread(target=build, name="compile", daemon=True)
        thread.start()
        thread.join(max(self.seconds - self.spent_seconds, 0.0))
        return not thread.is_alive()

    def meter(self) -> AbstractMeter:
        """The greater of the shares of the seconds and of the work."""
        return _ClockMeter(self)


class _ClockMeter(AbstractMeter):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counted = WorkMeter(clock.work)
        self.work, self.quick = clock.work if math.isfinite(clock.work) else 0.0, False

    def spend(self, entries: float) -> None:
        self._counted.spend(entries)

    @property
    def share(self) -> float:
        return max(self._clock.spent_seconds / max(self._clock.seconds, 1e-9), self._counted.share)

    def chunks(self, share: float, parts: int) -> Iterator[int]:
        """Equal chunks of the work; without a limit on that, what takes some tenths of a second."""
        if self.work:
            yield from self._counted.chunks(share, parts)
        entries = _FIRST_ENTRIES
        while True:
            began = time.monotonic()
            yield entries
            scale = _SECONDS_A_CHUNK / max(time.monotonic() - began, 1e-3)
            entries = bounded(entries * min(max(scale, 0.3), 3.0))

    def answered(self) -> None:
        self._clock.answered()


def solve_file(
    path: Path, seconds: float | None, work: int | None = None, seed: int = 0
) -> tuple[Line, tuple[int, ...]]:
    """Read a problem and search it within the limits; the line, and the choices or ()."""
    began = time.monotonic()
    problem = read_iopddl(path)
    clock = Clock(seconds, began, work or math.inf) if seconds is not None else None
    found = solve(problem, effort=Effort(work), seed=seed, deadline=clock)
    fits = bool(found.choice) and exact_fits(problem, found.choice)
    cost = exact_cost(problem, found.choice) if fits else None
    bound = int(found.bound_seconds) if math.isfinite(found.bound_seconds) else 0
    line = Line(
        name=path.name.removesuffix(".gz").removesuffix(".json"),
        feasible=fits,
        cost=cost,
        bound=bound,
        gap=max(0.0, (cost - bound) / cost) if cost else 0.0 if fits else None,
        first_feasible_seconds=round(clock.first_seconds, 2) if fits and clock else None,
        seconds=round(time.monotonic() - began, 2),
        peak_memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        note="" if fits else "proven infeasible" if found.proven_infeasible else "none found",
    )
    return line, found.choice if fits else ()


def exact_cost(problem: Problem, choice: Sequence[int]) -> int:
    """The objective of an assignment of a problem in whole numbers."""
    nodes = sum(int(cost[c]) for cost, c in zip(problem.costs, choice, strict=True))
    return nodes + sum(int(e.table[choice[e.left], choice[e.right]]) for e in problem.edges)


def exact_fits(problem: Problem, choice: Sequence[int]) -> bool:
    """Whether no time holds more than the limit, to the byte, and no part is forbidden."""
    change = [0] * (problem.horizon + 1)
    for usage in problem.usages:
        held = int(usage.nbytes[choice[usage.node]])
        change[usage.first] += held
        change[usage.last + 1] -= held
    most = held = 0
    for step in change:
        held += step
        most = max(most, held)
    return most <= problem.limit_bytes and problem.seconds(choice) < float("inf")


def _seconds(time_limit: float | None) -> float | None:
    """The seconds of a search within a limit, which keeps some to bring the answer home."""
    if time_limit is None:
        return None
    return time_limit - min(max(_RESERVE * time_limit, _RESERVE_SECONDS), 0.3 * time_limit)


def _table_row(line: Line) -> str:
    cost = f"{line.cost:>20,}" if line.cost is not None else f"{line.note:>20}"
    gap = f"{line.gap:>8.2%}" if line.gap is not None else " " * 8
    first = line.first_feasible_seconds
    return (
        f"{line.name:<28}{cost}{line.bound:>20,}{gap}"
        f"{'' if first is None else f'{first:.1f}':>8}{line.seconds:>8.1f}"
        f"{line.peak_memory_mib:>8}"
    )


@click.command(help="Solve problems of the IOPDDL contest.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--time-limit", type=click.FloatRange(min=0.1), help="Seconds a problem.")
@click.option("--work", type=click.IntRange(min=1), help="Units of work a problem: repeatable.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
@click.option("--json", "as_json", is_flag=True, help="One JSON line a problem.")
@click.option("--solution", type=click.Path(path_type=Path), help="Write the choices here.")
def main(
    files: tuple[Path, ...],
    time_limit: float | None,
    work: int | None,
    seed: int,
    as_json: bool,
    solution: Path | None,
) -> None:
    """Every file in turn; a file that cannot be read ends it with status 2."""
    if solution is not None and len(files) > 1:
        raise click.UsageError("--solution takes one FILE")
    if time_limit is None and work is None:
        time_limit = 60.0
    if not as_json:
        click.echo(
            f"{'problem':<28}{'cost':>20}{'bound':>20}{'gap':>8}{'first s':>8}{'s':>8}{'MiB':>8}"
        )
    for path in files:
        try:
            line, choice = solve_file(path, _seconds(time_limit), work, seed)
        except InputError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(2)
        click.echo(json.dumps(asdict(line)) if as_json else _table_row(line))
        if solution is not None:
            solution.write_text(json.dumps(list(choice)) + "\n")


if __name__ == "__main__":
    main()
