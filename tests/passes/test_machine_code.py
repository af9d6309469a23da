"""Machine code gives what the same functions give as plain Python, to the last bit.

Machine code looks at no bounds and no overflow: an index past the end reads another array's bytes
and goes on. Python stops there. So the kernels run once more in a process where numba compiles
nothing, on problems small enough for it, and both must print the same. Nor may a kernel make
what is no number: machine code takes it that there is none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from autopar.passes.shard.solver.anytime import Anytime
from autopar.passes.shard.solver.dual_ascent import DualAscent
from autopar.passes.shard.solver.effort import WorkMeter
from autopar.passes.shard.solver.problem import Edge, Problem, Usage, to_csr
from autopar.passes.stage.dynamic import Pace, find_frontier, min_memory, stages_that_fit
from autopar.passes.stage.interval_costs import interval_costs
from tests.passes.stage_tables import PLENTY, scaled_table


def sharding_problem(nodes: int, choices: int, seed: int, limit_bytes: float) -> Problem:
    """A scattered graph whose cheap choices hold much, some edges of it forbidden in part."""
    draws = np.random.default_rng(seed)
    costs = tuple(np.sort(draws.random(int(draws.integers(1, choices + 1)))) for _ in range(nodes))
    edges: list[Edge] = []
    for u in range(nodes):
        for v in range(u + 1, nodes):
            if draws.random() < 0.3:
                table = draws.random((len(costs[u]), len(costs[v])))
                edges.append(Edge(u, v, np.where(table > 0.95, np.inf, table)))
    usages = [
        Usage(v, v, v + int(draws.integers(4)), np.linspace(9, 0, len(costs[v])).round())
        for v in range(nodes)
    ]
    return Problem(costs, tuple(edges), tuple(usages), limit_bytes)


def answers() -> Iterator[str]:
    """The answer of each kernel's caller, with the bits of its numbers."""
    for seed in range(4):
        for limit_bytes in (20.0, 32.0, 60.0):
            problem = sharding_problem(9, 4, seed, limit_bytes)
            form = to_csr(problem)
            if form.fits_nowhere:
                yield f"sharding {seed} {limit_bytes:g} fits nowhere"
                continue
            ascent = DualAscent(form)
            reads = [r.cost.hex() for _, r in zip(range(6), ascent.steps(), strict=False)]
            search = Anytime(problem, form, seed)
            search.run(WorkMeter(3))
            best = None if search.best is None else search.best.tolist()
            yield (
                f"sharding {seed} {limit_bytes:g} {ascent.bound.hex()} {reads} "
                f"{best} {float(search.bound).hex()}"
            )
    for weights in ((1.0,) * 6, (1.0, 1.0, 2.0, 4.0)):
        table = scaled_table("4xcpu", weights, [4], 0.15)
        costs = interval_costs(table, table.batches[0])
        counts = [min(4, s) for s in range(1, 5)]
        devices = {u: shape.device_count for u, shape in enumerate(table.submeshes)}
        found = stages_that_fit(costs, devices, counts, table.memory_bytes)
        pace = Pace(4, tuple(counts))
        frontier = find_frontier(found, pace)
        rows = zip(frontier.seconds.tolist(), frontier.threshold.tolist(), strict=True)
        for stages, (seconds, threshold) in enumerate(rows):
            parts = found.trace_back(stages, threshold) if np.isfinite(seconds) else ()
            yield f"stages {len(weights)} {stages} {seconds.hex()} {parts}"
        yield f"least memory {len(weights)} {min_memory(costs, devices, counts, PLENTY, None)}"


def test_machine_code_and_python_give_the_same() -> None:
    # The random numbers of the local search are products that wrap, which numpy warns of.
    code = (
        "import numpy; from tests.passes.test_machine_code import answers\n"
        "with numpy.errstate(over='ignore', invalid='raise'):\n"
        "    for line in answers(): print(line)"
    )
    plain = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert plain.returncode == 0, plain.stderr
    compiled = list(answers())
    assert plain.stdout.splitlines() == compiled
    assert sum("stages" in line for line in compiled) > 6
    assert sum("None" not in line and "nowhere" not in line for line in compiled) > 8
