"""The devices as a bench: runs an experiment's program and takes the time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.cluster import Cluster, device_order
from autopar.cluster.calibration import Experiment
from autopar.ir.mesh import MeshShape
from autopar.runtime.bind import bind_mesh
from autopar.runtime.measure.programs import program
from autopar.runtime.measure.timing import Repeats, Timing

_TO_SIGMA = 1.4826  # from a median absolute deviation to a normal's standard deviation
_LEAST_SHARE = 0.05  # of a run, for the op, where the call weighs more than it should


class DeviceBench:
    """Times programs on the devices of a cluster, all of them at once.

    On several processes each runs the same programs, and the first one's clock counts for all.
    """

    def __init__(self, cluster: Cluster, devices: Sequence[Any]) -> None:
        self._cluster, self._devices = cluster, devices
        self._meshes: dict[str, Mesh] = {}
        self._call_seconds: float | None = None

    def clock(self) -> float:
        """Seconds of the first process's clock."""
        return _agreed(time.perf_counter())

    def timed(self, experiment: Experiment, trips: int, repeats: Repeats) -> Timing | str:
        """The timing of a program of `trips` repetitions, or why the devices cannot run it."""
        try:
            run, args, ops = program(experiment, self._mesh(experiment.mesh), trips)
            compiled = run.lower(*args).compile()
            seconds = self._runs(compiled, args, repeats)
        except (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError) as error:
            first_line = str(error).partition("\n")[0]
            return f"{type(error).__name__}: {first_line[:200]}"
        middle = _agreed(statistics.median(seconds))
        working = max(middle - self._call(repeats), _LEAST_SHARE * middle)
        off = _agreed(statistics.median(abs(s - middle) for s in seconds))
        return Timing(working / ops, _TO_SIGMA * off / working, len(seconds))

    def _mesh(self, text: str) -> Mesh:
        if text not in self._meshes:
            count = self._cluster.device_count
            shape = MeshShape.of(text) if text else MeshShape.of((count,))
            order = device_order(self._cluster, shape)
            self._meshes[text] = bind_mesh(shape, order, self._devices)
        return self._meshes[text]

    def _runs(self, compiled: Any, args: Sequence[Any], repeats: Repeats) -> list[float]:
        """Seconds of each run, as often as the first that counts leaves time for.

        The one before does not count: buffers are allocated in it, libraries loaded, clocks raised.
        """
        self._once(compiled, args)
        first = self._once(compiled, args)
        wanted = math.ceil(repeats.seconds / max(_agreed(first), 1e-9))
        count = min(repeats.most, max(repeats.least, wanted))
        return [first, *(self._once(compiled, args) for _ in range(count - 1))]

    def _once(self, compiled: Any, args: Sequence[Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        return time.perf_counter() - start

    def _call(self, repeats: Repeats) -> float:
        """Seconds that calling a program takes that does next to nothing."""
        if self._call_seconds is None:
            mesh = self._mesh("")
            spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
            x = jnp.zeros((mesh.size,), device=spread)
            compiled = jax.jit(lambda x: x + 1).lower(x).compile()
            self._call_seconds = _agreed(statistics.median(self._runs(compiled, (x,), repeats)))
        return self._call_seconds


def _agreed(seconds: float) -> float:
    """The first process's figure, on every process: what follows from it must not differ."""
    if jax.process_count() == 1:
        return seconds
    return float(multihost_utils.broadcast_one_to_all(np.float64(seconds)))
