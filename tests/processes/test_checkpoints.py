"""A job's processes save what each keeps, and any plan on any number of processes reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import autopar
from tests.processes.jobs import results
from tests.processes.scenarios import ROWS, WIDTH, create, own_rows, train, trained

STAGES: dict[str, Any] = {"stages": 2, "microbatches": 4}
MESH: dict[str, Any] = {"mesh": (2, 2), "method": "fsdp"}


def plan_file(path: Path, options: dict[str, Any]) -> Path:
    shapes = jax.eval_shape(create, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    autopar.plan(train, shapes, batch, cluster="2x2xcpu", **options).save(path)
    return path


def whole(pieces: list[dict[str, str]]) -> np.ndarray[Any, Any]:
    """The stack of weights from what the processes have of it."""
    found = np.full((8, WIDTH, WIDTH), np.nan, np.float32)
    for place, data in (item for own in pieces for item in own.items()):
        rows, rest = place.split(" ", 1)
        box = (slice(*map(int, rows.split(":"))), *eval(rest, {"slice": slice}))
        found[box] = np.frombuffer(bytes.fromhex(data), np.float32).reshape(found[box].shape)
    assert not np.isnan(found).any()
    return found


@pytest.mark.ci
def test_two_processes_save_stages_and_any_plan_goes_on(tmp_path: Path) -> None:
    stages, mesh = plan_file(tmp_path / "s.json", STAGES), plan_file(tmp_path / "m.json", MESH)
    folder = tmp_path / "checkpoints"
    found = results(2, 2, "checkpoints", str(folder), str(stages), str(mesh))
    saved = whole([one["saved"] for one in found])
    for one in found:
        assert one["same number"] == one["other number"] == 3
        assert one["same extras"] == one["other extras"] == {"rows": 48}
        assert one["same"] == one["saved"]
        assert one["same then"] == found[0]["same then"]
    np.testing.assert_array_equal(whole([one["other"] for one in found]), saved)

    # One process, and a plan for other devices, goes on from what two wrote.
    step = autopar.parallelize(train, cluster="4xcpu", stages=4, microbatches=4)
    step.plan_for(jax.eval_shape(create, jax.random.key(0)), jnp.zeros((ROWS, WIDTH)))
    with ocp.CheckpointManager(folder) as manager:
        restored = step.restore(manager, step.abstract_state(create, jax.random.key(0)))
    assert restored is not None
    np.testing.assert_array_equal(whole([own_rows(restored.state["w"])]), saved)
    told, _ = trained(step, restored.state)
    then = [
        [np.frombuffer(bytes.fromhex(t), np.float32)[0] for t in one["same then"]] for one in found
    ]
    alone = [np.frombuffer(bytes.fromhex(t), np.float32)[0] for t in told]
    np.testing.assert_allclose(alone, then[0], rtol=1e-5)
