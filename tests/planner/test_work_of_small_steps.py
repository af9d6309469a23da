"""The work of planning small steps, or of refusing them, counted and not timed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

import autopar
from autopar.errors import MemoryLimitError
from autopar.passes.shard.solver import solve as solving
from autopar.passes.shard.solver.branch_and_bound import Bounded, branch_and_bound
from autopar.passes.shard.solver.problem import Problem
from benchmarks.bench_small_plans import CASES

# A problem is some hundredth of a second to pose, and 5e7 numbers some second to look at: so both
# together are less than the five seconds of a core that a small step may take.
MOST_SOLVED, MOST_WORK = 100, 5e7


@dataclass
class Counted:
    """The problems that branch and bound was given, and the answers."""

    answers: list[Bounded] = field(default_factory=list[Bounded])

    @property
    def work(self) -> int:
        """Numbers looked at."""
        return sum(answer.work for answer in self.answers)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Generator[Counted]:
    found = Counted()

    def search(problem: Problem) -> Bounded:
        found.answers.append(branch_and_bound(problem))
        return found.answers[-1]

    with monkeypatch.context() as patched:
        patched.setattr(solving, "branch_and_bound", search)
        yield found


@pytest.mark.parametrize("name", ["mlp2 2x8xh100/2 at 0.6", "mlp4-adam 8xcpu/2 at 0.6"])
def test_a_small_step_takes_little_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few problems are solved on the way to a plan or a refusal, and each to its proof."""
    case = CASES[name]
    step, args = case.build()
    roomy = autopar.plan(step, *args, **case.options)
    assert case.share is not None
    limit = case.share * roomy.prediction.peak_bytes / 2**30
    with counted(monkeypatch) as found:
        with suppress(MemoryLimitError):
            autopar.plan(step, *args, memory_gb=limit, **case.options)
    assert 0 < len(found.answers) <= MOST_SOLVED
    assert found.work <= MOST_WORK
    for answer in found.answers:
        assert answer.proven
