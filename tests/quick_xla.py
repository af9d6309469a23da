"""XLA flags with which the tests' tiny programs compile in a third of the time.

XLA reads them when it starts, so they are set before JAX is asked for a device.
"""

from __future__ import annotations

import re
from importlib.metadata import version

_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
# Emitters that compile faster than the newer ones; jaxlib 0.12 knows them no more, and an unknown
# flag ends the process.
_OLDER = ["--xla_cpu_use_fusion_emitters=false"]


def quick_flags() -> str:
    """The flags that the installed jaxlib knows, as XLA_FLAGS has them."""
    found = re.match(r"0\.(\d+)", version("jaxlib"))
    older = found is not None and int(found[1]) <= 10
    return " ".join([*_FLAGS, *(_OLDER if older else [])])
