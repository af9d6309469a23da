"""Runs a zoo case for three steps, plain and in parallel, and says where the two differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

import autopar
from autopar.hlo.collectives import read_collectives
from tests.end_to_end.combos import Combo
from tests.zoo import Case, Optimizer, cases

STEPS = 3
TOLERANCE = 1e-5  # of each tensor's largest magnitude
TRAFFIC_SHARE, TRAFFIC_SLACK = 0.05, 64

# Links so fast and chips so slow that `auto` cuts up even the zoo's tiny models.
EAGER = autopar.Cluster.from_toml_text(
    """
like = "8xcpu"
name = "8 slow devices on a fast switch"
[chip]
launch_seconds = 0.0
half_flops = 1.0
memory_bytes_per_second = 1e9
[chip.peak_flops]
f32 = 1e9
f64 = 1e9
bf16 = 1e9
[[switch.levels]]
name = "switch"
size = 8
bytes_per_second = 1e10
latency_seconds = 1e-9
start_seconds = 1e-8
"""
)

Leaf = tuple[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Ran:
    """What three parallel steps left behind."""

    step: autopar.ParallelStep[..., Any]
    compiled: Any
    leaves: tuple[Leaf, ...]  # of the last state and of every step's metrics
    left_over: tuple[str, ...]  # state buffers that a step was given and did not consume


@cache
def zoo_case(model: str, optimizer: Optimizer) -> Case:
    """A case of the zoo."""
    return cases(optimizer)[model]


@cache
def initial_state(model: str, optimizer: Optimizer) -> Any:
    """A case's state on one device; no step consumes it."""
    return zoo_case(model, optimizer).create_state(jax.random.key(0))


@cache
def plain_leaves(model: str, optimizer: Optimizer) -> tuple[Leaf, ...]:
    """The last state and every step's metrics of plain `jax.jit`."""
    case = zoo_case(model, optimizer)
    state, step, metrics = initial_state(model, optimizer), jax.jit(case.step), []
    for i in range(STEPS):
        state, measured = step(state, case.batch(i))
        metrics.append(measured)
    return numbers((state, metrics))


def run_combo(combo: Combo) -> Ran:
    """Three steps through the front door. Raises what planning raises."""
    case = zoo_case(combo.model, combo.optimizer)
    step = autopar.parallelize(case.step, cluster=EAGER, mesh=combo.mesh, method=combo.method)
    state, metrics = initial_state(combo.model, combo.optimizer), []
    left_over: list[str] = []
    for i in range(STEPS):
        before = state
        state, measured = step(state, case.batch(i))
        metrics.append(measured)
        # The first state lies on one device, so it is copied to the mesh and lives on.
        left_over += undeleted(before) if i else []
    compiled = step.compile(state, case.batch(0))
    return Ran(step, compiled, numbers((state, metrics)), tuple(left_over))


def undeleted(tree: Any) -> list[str]:
    """Paths of the arrays of a tree that still have their buffers."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path) for path, leaf in flat if not leaf.is_deleted()]


def numbers(tree: Any) -> tuple[Leaf, ...]:
    """Every leaf on the host with its path; typed random keys as their data."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return tuple((jax.tree_util.keystr(path), np.asarray(_data(leaf))) for path, leaf in flat)


def _data(leaf: Any) -> Any:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def differing(got: tuple[Leaf, ...], expected: tuple[Leaf, ...]) -> list[str]:
    """Where two runs differ: floats by more than rounding, all else at all."""
    faults: list[str] = []
    for (path, mine), (_, plain) in zip(got, expected, strict=True):
        if mine.shape != plain.shape or mine.dtype != plain.dtype:
            faults.append(f"{path} is {mine.dtype}{mine.shape}, not {plain.dtype}{plain.shape}")
        elif not np.issubdtype(plain.dtype, np.floating):
            faults += [] if np.array_equal(mine, plain) else [f"{path} differs"]
        elif plain.size:
            gap = np.max(np.abs(mine.astype(np.float64) - plain))
            share = gap / max(float(np.max(np.abs(plain))), 1e-30)
            faults += [] if share <= TOLERANCE else [f"{path} is off by {share:.1e}"]
    return faults


def predicted_bytes(plan: autopar.Plan) -> Counter[str]:
    """Collective bytes of a step by kind, as planned."""
    found: Counter[str] = Counter()
    for row in plan.prediction.traffic:
        found[row.kind] += row.nbytes
    return found


def compiled_bytes(compiled: Any) -> Counter[str]:
    """Collective bytes of a step by kind, as compiled."""
    found: Counter[str] = Counter()
    for row in read_collectives(compiled.as_text()):
        found[row.kind] += row.total_bytes
    return found


def traffic_gaps(predicted: Mapping[str, int], compiled: Mapping[str, int]) -> dict[str, str]:
    """Kinds of collectives whose bytes differ by more than the tolerance."""
    gaps: dict[str, str] = {}
    for kind in sorted({*predicted, *compiled}):
        planned, real = predicted.get(kind, 0), compiled.get(kind, 0)
        if abs(planned - real) > max(TRAFFIC_SHARE * planned, TRAFFIC_SLACK):
            gaps[kind] = f"{kind}: {planned} bytes planned, {real} compiled"
    return gaps
