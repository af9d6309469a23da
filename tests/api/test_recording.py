"""A step is measured whether it is one program or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import autopar


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * x.mean(), jnp.sum(x)


@pytest.mark.parametrize(("options", "programs"), [({}, {"step"}), ({"microbatches": 2}, {"F0"})])
def test_every_program_of_a_traced_step_is_a_span(
    options: dict[str, Any], programs: set[str], tmp_path: Path
) -> None:
    run: Any = autopar.parallelize(step, cluster="8xcpu", **options)
    w, x = np.zeros(8, np.float32), np.ones((16, 4), np.float32)
    w, _ = run(w, x)
    run.trace(tmp_path / "trace.json")
    _, total = run(w, x)
    assert float(total) == 64
    told = str(run.recording)
    assert "measured  p=1" in told
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {e["name"].split(".")[0] for e in events if e["ph"] == "X"}
    assert programs <= spans
