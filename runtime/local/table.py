"""From a primitive's name to what a device runs of it."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.runtime.local import fourier, index, kernels, shape, window
from autopar.runtime.local.base import LocalRun
from autopar.runtime.local.rebind import run_as_is

_RUNS: Mapping[str, LocalRun] = {
    **shape.RUNS,
    **window.RUNS,
    **index.RUNS,
    **kernels.RUNS,
    **fourier.RUNS,
}


def local_run(primitive_name: str) -> LocalRun:
    """The primitive on pieces; it is run as it is unless its parameters speak of whole shapes."""
    return _RUNS.get(primitive_name, run_as_is)


def local_primitives() -> frozenset[str]:
    """The primitives that are not run as they are: those whose rows in `autopar.rules` say so."""
    return frozenset(_RUNS)
