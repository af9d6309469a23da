"""Plans under tight limits, and whether a pin finds a better one: a JSON line a plan.

`python -m benchmarks.tight_limits [--only gpt] [--clusters 8xcpu] [--shares 0.8,0.5] [--pins 4]`
plans each model of the tests' zoo without a limit, then under shares of what that plan holds. The
largest arguments of each plan are pinned in turn, whole and along each axis of its mesh, and
`why_not` says what the plan would then take. `ratio` is auto's seconds over the best pin's: more
than 1 plus the gap of the plan means that a pin found what auto should have.
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
from tests.zoo.registry import cases


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


def rows(case: Case, cluster: str, shares: list[float], pins: int) -> Iterator[dict[str, Any]]:
    """A row for each share of what the plan without a limit holds."""
    state, batch = jax.eval_shape(case.create_state, jax.random.key(0)), case.batch(0)
    roomy = autopar.plan(case.step, state, batch, cluster=cluster)
    for share in shares:
        limit = share * roomy.prediction.peak_bytes
        row = {"model": case.name, "cluster": cluster, "share": share}
        try:
            plan = autopar.plan(case.step, state, batch, cluster=cluster, memory_gb=limit / 2**30)
        except AutoparError as error:
            yield {**row, "failed": str(error).splitlines()[0]}
            continue
        seconds, best = plan.prediction.seconds, best_pin(plan, pins)
        yield {
            **row,
            "seconds": seconds,
            "roomy_seconds": roomy.prediction.seconds,
            "gap": plan.outcome.gap,
            "pin": best[0] if best else None,
            "pinned_seconds": best[1] if best else None,
            "ratio": seconds / best[1] if best else None,
        }


def main() -> None:
    """Every model on every cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name begins so, with commas")
    parser.add_argument("--clusters", default="8xcpu,8xh100,v5e:2x4")
    parser.add_argument("--shares", default="0.8,0.5")
    parser.add_argument("--pins", type=int, default=4, help="arguments that are pinned")
    given = parser.parse_args()
    shares = [float(s) for s in given.shares.split(",")]
    for name, case in cases("adam").items():
        if given.only and not name.startswith(tuple(given.only.split(","))):
            continue
        for cluster in given.clusters.split(","):
            for row in rows(case, cluster, shares, given.pins):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
