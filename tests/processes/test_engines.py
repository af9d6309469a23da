"""Open MPI, Slurm and Ray run what `autopar launch` writes for them, where they are installed."""

from __future__ import annotations

import pytest

from benchmarks.engines import LAUNCHERS, NEEDED, STEPS, trial


@pytest.mark.slow
@pytest.mark.parametrize("engine", [engine for engine in LAUNCHERS if NEEDED[engine]])
def test_an_engine_runs_its_file(engine: str) -> None:
    found = trial(engine, 2)
    if "left_out" in found:
        pytest.skip(str(found["left_out"]))
    assert found["exit_code"] == 0, found
    assert found["losses"] == pytest.approx(trial("plain", 1)["losses"], rel=1e-4)
    assert len(found["losses"]) == STEPS
