"""The shrinker: leaves out one thing after the other while a case still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.case import Outcome
from tests.fuzz.configs import Config, config_from
from tests.fuzz.program import Program, as_json, from_json
from tests.fuzz.workers import Task, Worker

Try = Callable[[Program, Config], Outcome]


@dataclass(frozen=True)
class Shrunk:
    """The smallest program and plainest config that were found to fail alike."""

    program: Program
    config: Config
    outcome: Outcome
    tried: int


def shrunk(
    program: Program, config: Config, failed: Outcome, tries: Try, most: int = 150
) -> Shrunk:
    """The smallest failure found in so many tries."""
    best = Shrunk(program, config, failed, 0)
    tried = 0
    improved = True
    while improved and tried < most:
        improved = False
        candidates = [(p, best.config) for p in best.program.smaller()]
        candidates += [(best.program, c) for c in best.config.simpler()]
        for p, c in candidates:
            if tried >= most:
                break
            tried += 1
            outcome = tries(p, c)
            if outcome.signature == failed.signature:
                best = Shrunk(p, c, outcome, tried)
                improved = True
                break
    return best


def shrunk_apart(program: Program, config: Config, failed: Outcome, limit: float) -> Shrunk:
    """The same with every try in a process of its own, which may die."""
    workers: list[Worker] = []

    def tries(p: Program, c: Config) -> Outcome:
        if workers and workers[-1].is_used_up:
            workers.pop().end()
        if not workers:
            workers.append(Worker())
        # Through plain data and back, so that what is printed is what ran.
        task = Task(p.seed, 0, as_json(from_json(as_json(p))), config_from(c.as_json()).as_json())
        return workers[-1].run(task, limit).outcome

    try:
        return shrunk(program, config, failed, tries)
    finally:
        for worker in workers:
            worker.end()
