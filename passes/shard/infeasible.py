"""Says why nothing fits the memory: by how much, what is largest, and what would help."""

from __future__ import annotations

import numpy as np

from autopar.errors import MemoryLimitError, listing
from autopar.ir.text import show_bytes
from autopar.passes.base import Setting
from autopar.passes.shard.assemble import Assembled
from autopar.passes.shard.decisions import Decision, Reading

_SHOWN = 5


def memory_error(reading: Reading, assembled: Assembled, setting: Setting) -> MemoryLimitError:
    """The error for a problem that no assignment fits."""
    problem = assembled.problem
    least = np.zeros(problem.horizon)
    for usage in problem.usages:
        least[usage.first : usage.last + 1] += usage.nbytes.min()
    worst = int(least.argmax())
    live = [u for u in problem.usages if u.first <= worst <= u.last]
    live.sort(key=lambda u: (-float(u.nbytes.min()), u.node))
    total = max((sum(float(u.nbytes.max()) for u in live), float(least[worst])))
    faults = [
        _item(reading.decisions[u.node], float(u.nbytes.min()), float(u.nbytes.max()))
        for u in live[:_SHOWN]
        if u.node < len(reading.decisions)
    ]
    needed = float(least[worst])
    over = needed - setting.memory_bytes
    headline = (
        f"no plan on ({setting.mesh}) fits {show_bytes(setting.memory_bytes)} a device: at its "
        f"peak the step holds {show_bytes(total)} unsharded, and at least {show_bytes(needed)} a "
        f"device however it is sharded"
        + (
            f", {show_bytes(over)} too much."
            if over > 0
            else ", but not with these choices together."
        )
    )
    remedy = (
        f"Use more devices, a smaller batch, jax.checkpoint on the layers, or a limit of "
        f"{show_bytes(max(needed, setting.memory_bytes) * 1.05)} or more (memory_gb=...)."
        + (" Pins or a recipe may also be what forbids sharding more." if over <= 0 else "")
    )
    return MemoryLimitError(listing(headline, faults, remedy))


def _item(decision: Decision, least: float, most: float) -> str:
    value = decision.value.type_text if decision.value is not None else ""
    line = f" ({decision.line})" if decision.line else ""
    return f"{decision.label} {value}: {show_bytes(least)} to {show_bytes(most)}{line}"
