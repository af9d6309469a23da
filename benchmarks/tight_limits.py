"""Plans under tight limits, and whether a pin finds a better one: a JSON line a plan.

`python -m benchmarks.tight_limits [--only gpt] [--clusters 8xcpu] [--shares 0.8,0.5] [--pins 4]`
plans each model of the tests' zoo without a limit, then under shares of what that plan holds;
without clusters and shares, the 51 plans of `PLANS`. The largest arguments of each plan are pinned
in turn, whole and along each axis of its mesh, and `why_not` says what the plan would then take.
`ratio` is auto's seconds over the best pin's, and `excess` is by how much of its seconds the pin
beats more than the gap that the plan states: above `CLOSE` a pin found what auto should have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

import autopar
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from tests.zoo.case import Case
from tests.zoo.registry import BUILDERS, cases

# Every model of the zoo under one limit, and the small ones under more.
_SMALL = ("mlp", "mlp_equinox", "mlp_nnx", "masked")
PLANS = (
    *((build.__name__, "8xh100", 0.8) for build in BUILDERS),
    *(
        (name, cluster, share)
        for name in _SMALL
        for cluster in ("v5e:2x4", "8xcpu")
        for share in (0.9, 0.8, 0.7, 0.6)
    ),
)
CLOSE = 0.005  # of the seconds: planning asks for no better


def pins_of(plan: Plan, arguments: int) -> Iterator[tuple[str, PartitionSpec]]:
    """The largest arguments, each whole and along each axis of the mesh on each of its dims."""
    mesh = plan.mesh
    largest = sorted(plan.arguments, key=lambda a: (-a.local_bytes(mesh), a.path))[:arguments]
    for argument in largest:
        rank = len(argument.shape)
        yield argument.path, PartitionSpec()
        for axis, size in zip(mesh.names, mesh.sizes, strict=True):
            for dim in range(rank):
                if argument.shape[dim] % size == 0:
                    spec = [axis if d == dim else None for d in range(rank)]
                    yield argument.path, PartitionSpec(*spec)


def best_pin(plan: Plan, arguments: int) -> tuple[str, float] | None:
    """The pin under which the plan would take the least, and the seconds."""
    found: list[tuple[float, str]] = []
    for path, spec in pins_of(plan, arguments):
        try:
            pinned = autopar.why_not(plan, {path: spec}).pinned
        except AutoparError:
            continue
        if pinned is not None:
            found.append((pinned.seconds, f"{path} = {spec}"))
    if not found:
        return None
    seconds, pin = min(found)
    return pin, seconds


def excess(plan: Plan, pinned_seconds: float) -> float:
    """The share of a plan's seconds that a pin saves beyond the gap that the plan states."""
    saved = 1 - pinned_seconds / plan.prediction.seconds
    return saved - max(0.0, plan.outcome.gap)


def row(case: Case, cluster: str, share: float, pins: int) -> dict[str, Any]:
    """The plan under a share of what the plan without a limit holds, and the best pin beside it."""
    state, batch = jax.eval_shape(case.create_state, jax.random.key(0)), case.batch(0)
    roomy = autopar.plan(case.step, state, batch, cluster=cluster)
    limit = share * roomy.prediction.peak_bytes
    found = {"model": case.name, "cluster": cluster, "share": share}
    try:
        plan = autopar.plan(case.step, state, batch, cluster=cluster, memory_gb=limit / 2**30)
    except AutoparError as error:
        return {**found, "failed": str(error).splitlines()[0]}
    seconds, best = plan.prediction.seconds, best_pin(plan, pins)
    return {
        **found,
        "seconds": seconds,
        "roomy_seconds": roomy.prediction.seconds,
        "gap": plan.outcome.gap,
        "pin": best[0] if best else None,
        "pinned_seconds": best[1] if best else None,
        "ratio": seconds / best[1] if best else None,
        "excess": excess(plan, best[1]) if best else None,
    }


def main() -> None:
    """Every model on every cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name begins so, with commas")
    parser.add_argument("--clusters", default="", help="with commas; those of PLANS if left out")
    parser.add_argument("--shares", default="0.8,0.5", help="of what a plan without a limit holds")
    parser.add_argument("--pins", type=int, default=4, help="arguments that are pinned")
    given = parser.parse_args()
    models = cases("adam")
    asked: list[tuple[str, str, float]] = list(PLANS)
    if given.clusters:
        shares = [float(s) for s in given.shares.split(",")]
        asked = [(m, c, s) for m in models for c in given.clusters.split(",") for s in shares]
    for name, cluster, share in asked:
        if not given.only or name.startswith(tuple(given.only.split(","))):
            print(json.dumps(row(models[name], cluster, share, given.pins)), flush=True)


if __name__ == "__main__":
    main()
