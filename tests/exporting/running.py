"""Executes an exported module where autopar cannot be imported, and reports what came of it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.exporting.python import python_module
from autopar.runtime.standalone import running as source
from tests.end_to_end.combos import Combo
from tests.end_to_end.running import EAGER, Leaf, compiled_bytes, numbers, traffic_gaps, zoo_case
from tests.house.source import ROOT


@dataclass(frozen=True)
class Exported:
    """A zoo case planned, its module, and the collective bytes of autopar's own program."""

    module: ModuleType
    text: str
    plan: autopar.Plan
    own_bytes: dict[str, int]


def exported(combo: Combo, folder: Path) -> Exported:
    """A case's plan as a module; raises what planning and exporting raise."""
    case = zoo_case(combo.model, combo.optimizer)
    step = autopar.parallelize(
        case.step, cluster=EAGER, mesh=combo.mesh, method=combo.method, remat=False
    )  # what a plan recomputes, a module cannot
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    plan = step.plan_for(state, case.batch(0))
    text = python_module(plan)
    own = dict(compiled_bytes(step.compile(state, case.batch(0))))
    return Exported(loaded(text, folder), text, plan, own)


def loaded(text: str, folder: Path) -> ModuleType:
    """A module out of its source."""
    path = folder / "exported.py"
    path.write_text(text, encoding="ascii")
    spec = importlib.util.spec_from_file_location("exported", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["exported"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def laid_into_source(text: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """The package's source, of which modules are made, with the tables of a module."""
    tables = text.split("# ---- the plan ----\n")[1].split("# ---- the program ----\n")[0]
    decided: dict[str, Any] = {}
    exec(tables, dict(vars(source)), decided)
    for name, table in decided.items():
        patch.setattr(source, name, table)
    return source


def gaps_and_leaves(combo: Combo, made: Exported) -> tuple[dict[str, str], tuple[Leaf, ...]]:
    """How the collectives of the exported step differ from autopar's own, and what it computes."""
    case = zoo_case(combo.model, combo.optimizer)
    state, batch = case.create_state(jax.random.key(0)), case.batch(0)
    step = made.module.parallelize(case.step, state, batch)
    compiled = step.lower(state, batch).compile()
    head = made.plan.arguments[0].path.split("/")[0]
    placed = jax.device_put(state, made.module.shardings_for(state, head))
    gaps = traffic_gaps(made.own_bytes, compiled_bytes(compiled))
    return gaps, numbers(step(jax.tree.map(_own, placed), batch))


def _own(leaf: Any) -> Any:
    """A copy: the step consumes its state."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if is_key else jax.device_put(np.asarray(leaf), leaf.sharding)


_ALONE = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "autopar":
            raise ImportError("no autopar here")
sys.meta_path.insert(0, Refuse())
sys.path[:0] = [{folder!r}, {root!r}]
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
import exported
{body}
assert "autopar" not in sys.modules
"""


def run_alone(folder: Path, body: str) -> Any:
    """The JSON that code prints last, in a process with the module and without autopar."""
    code = _ALONE.format(folder=str(folder), root=str(ROOT), body=body)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
