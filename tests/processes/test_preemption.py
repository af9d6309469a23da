"""A job that the scheduler stops saves its state after the step that all have come to, and ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.kills import Job, Shape, saved_steps

ENDLESS = 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("shape", [Shape(1, 2, 1), Shape(2, 1, 2)])
def test_sigterm_saves_and_ends_with_0(tmp_path: Path, shape: Shape) -> None:
    """One process is told, as where one host is taken away."""
    job = Job(shape, tmp_path, tmp_path / "compiled", ENDLESS)
    job.says(r"^step +2 ", 600.0)
    job.processes[-1].terminate()
    assert job.ends(300.0) == [0] * shape.processes, job.said
    found = re.search(rf"^step (\d+) of {ENDLESS} is saved in", job.said, re.MULTILINE)
    assert found is not None, job.said
    assert saved_steps(tmp_path)[-1] == int(found[1])
