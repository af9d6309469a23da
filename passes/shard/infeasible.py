"""Says why nothing fits the memory: by how much, what is largest, and what would help."""

from __future__ import annotations

import numpy as np

from autopar.errors import MemoryLimitError, listing
from autopar.ir.text import show_bytes
from autopar.passes.base import Setting
from autopar.passes.shard.assemble import Assembled
from autopar.passes.shard.decisions import Decision, Reading
from autopar.passes.shard.problem import Floats, Problem

_SHOWN = 5
_ROUNDS = 20
_ROOM = 1.05  # on top of what is known to be enough, so that a rounded figure is enough too


def memory_error(
    reading: Reading, assembled: Assembled, setting: Setting, method: str = "auto"
) -> MemoryLimitError:
    """The error for a problem that no assignment fits."""
    problem = assembled.problem
    least = np.zeros(problem.horizon)
    for usage in problem.usages:
        least[usage.first : usage.last + 1] += usage.nbytes.min()
    worst = int(least.argmax())
    live = [u for u in problem.usages if u.first <= worst <= u.last]
    live.sort(key=lambda u: (-float(u.nbytes.min()), -float(u.nbytes.max()), u.node))
    total, needed = sum(float(u.nbytes.max()) for u in live), float(least[worst])
    faults = [
        _item(reading.decisions[u.node], float(u.nbytes.min()), float(u.nbytes.max()))
        for u in live[:_SHOWN]
        if u.node < len(reading.decisions)
    ]
    over = needed - setting.memory_bytes
    enough = max(_enough(problem), setting.memory_bytes) * _ROOM
    within = "" if method == "auto" else f" under {method}"
    headline = (
        f"no plan on ({setting.mesh}) fits {show_bytes(setting.memory_bytes)} a device: at its "
        f"peak the step holds {show_bytes(total)} unsharded, and at least {show_bytes(needed)} a "
        f"device however it is sharded{within}"
        + (f", {show_bytes(over)} too much." if over > 0 else ", and more where all must agree.")
    )
    freedom = ["method='auto', which may shard more"] * (method != "auto")
    freedom += ["fewer pins"] * bool(setting.pins)
    remedy = ", ".join(
        [
            *("Use more devices", "a smaller batch", "jax.checkpoint on the layers"),
            *freedom,
            f"or a limit of {show_bytes(enough)} or more (memory_gb={enough / 2**30:.3g}).",
        ]
    )
    return MemoryLimitError(listing(headline, faults, remedy))


def _enough(problem: Problem) -> float:
    """The peak of an assignment that holds little: a limit that is known to be kept.

    Every node takes what holds least, weighed by how near the peak that is: each round the
    times that were highest weigh more.
    """
    weight = np.ones(problem.horizon)
    peaks: list[float] = []
    for _ in range(_ROUNDS):
        held: list[Floats] = [np.zeros(len(c)) for c in problem.costs]
        for usage in problem.usages:
            span = float(weight[usage.first : usage.last + 1].sum())
            held[usage.node] = held[usage.node] + span * usage.nbytes
        over_time = problem.held_bytes([int(h.argmin()) for h in held])
        peaks.append(float(over_time.max()))
        weight = weight * (1 + over_time / max(peaks[-1], 1.0))
        weight = weight / weight.max()
    return min(peaks)


def _item(decision: Decision, least: float, most: float) -> str:
    value = decision.value.type_text if decision.value is not None else ""
    line = f" ({decision.line})" if decision.line else ""
    return f"{decision.label} {value}: {show_bytes(least)} to {show_bytes(most)}{line}"
