"""The devices as a bench: runs an experiment's program and takes the time.

How often a program is run, and the seconds that the runs give, is settled first.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.cluster import Cluster, device_order
from autopar.cluster.calibration import Experiment
from autopar.ir.sharding import MeshShape
from autopar.runtime.bind import bind_mesh


@dataclass(frozen=True)
class Repeats:
    """A program runs `least` times, and up to `most` until `seconds` are over."""

    least: int
    most: int
    seconds: float


@dataclass(frozen=True)
class Timing:
    """The median seconds of an op in a program that repeats it, over `count` runs of the program.

    `spread` is relative: a robust standard deviation of a run over its median.
    """

    seconds: float
    spread: float
    count: int


# -- programs that repeat one op, each repetition waiting for the one before -----------------------


_DTYPES: dict[str, Any] = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "fp8": jnp.float8_e4m3fn,
}
_BLOCK = 65_521  # numbers drawn for an operand; a prime, so that no two rows begin alike
_CHAIN = 8  # tiny ops in one trip, so that the loop's own count of trips weighs little

Carry = tuple[Any, ...]
Trip = Callable[[Carry], Carry]
# One trip round the loop, the ops in it, and the shapes of one device's arrays in the carry.
Body = tuple[Trip, int, list[tuple[int, ...]]]


def program(experiment: Experiment, mesh: Mesh, trips: int) -> tuple[Any, Carry, int]:
    """A jitted program, its arguments (in place already) and how many times it does the op."""
    if experiment.axis:
        trip, per_trip, shapes = _collective(experiment, mesh.shape[experiment.axis])
    else:
        trip, per_trip, shapes = _LOCAL[experiment.kind](experiment)
    everywhere = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, everywhere)

    def repeated(*carry: Any) -> Any:
        return lax.fori_loop(0, trips, lambda _, c: trip(c), carry)[0]

    mapped = jax.shard_map(
        repeated,
        mesh=mesh,
        in_specs=(everywhere,) * len(shapes),
        out_specs=everywhere,
        check_vma=False,
    )
    args = tuple(_filled(shape, experiment, sharding, mesh.size) for shape in shapes)
    return jax.jit(mapped), args, trips * per_trip


def _filled(
    shape: tuple[int, ...], experiment: Experiment, sharding: NamedSharding, count: int
) -> Any:
    """An array of `shape` on each device.

    Operands of matmuls are noise, because zeros take less power and so less time; scaled so that
    products neither grow nor vanish.
    """
    whole = (count * shape[0], *shape[1:])
    dtype = _DTYPES[experiment.dtype]
    if experiment.kind != "matmul":
        return jnp.zeros(whole, dtype, device=sharding)
    noise = np.random.default_rng(0).standard_normal(_BLOCK).astype(np.float32)
    scaled = (noise / math.sqrt(shape[0])).astype(dtype)
    return jax.device_put(np.resize(scaled, whole), sharding)


def _matmul(experiment: Experiment) -> Body:
    """There and back: x[m,k] @ up[k,n] @ down[n,k]."""
    m, k, n = experiment.shape

    def trip(carry: Carry) -> Carry:
        x, up, down = carry
        return _dot(_dot(x, up), down), up, down

    return trip, 2, [(m, k), (k, n), (n, k)]


def _dot(x: Any, w: Any) -> Any:
    if x.dtype == jnp.float8_e4m3fn:
        return jnp.dot(x, w, preferred_element_type=jnp.bfloat16).astype(x.dtype)
    return jnp.dot(x, w)


def _launch(experiment: Experiment) -> Body:
    """Sums, each over what the last one gave: two of them never become one kernel."""

    def trip(carry: Carry) -> Carry:
        x, floor = carry
        for _ in range(_CHAIN):
            x = jnp.sum(jnp.maximum(floor, x), keepdims=True)
        return x, floor

    return trip, _CHAIN, [(1,), (experiment.shape[0] // 4,)]


def _scale(experiment: Experiment) -> Body:

    def trip(carry: Carry) -> Carry:
        x, factor = carry
        return x * factor[0], factor

    return trip, 1, [(experiment.shape[0] // 4,), (1,)]


def _add(experiment: Experiment) -> Body:

    def trip(carry: Carry) -> Carry:
        x, y = carry
        return x + y, y

    return trip, 1, [(experiment.shape[0] // 4,)] * 2


def _collective(experiment: Experiment, members: int) -> Body:
    """A collective whose result, or what it is written into, is the next one's operand.

    A result that takes its operand's place comes once a trip: XLA folds the sum of a sum. Others
    come twice, so that the loop need not copy the result to where the operand was.
    """
    axis, items = experiment.axis, experiment.shape[0] // 4
    ring = [(i, (i + 1) % members) for i in range(members)]

    def all_gather(x: Any) -> Any:
        return lax.all_gather(lax.slice(x, (0,), (items // members,)), axis, tiled=True)

    def reduce_scatter(x: Any) -> Any:
        share = lax.psum_scatter(x, axis, tiled=True)
        return lax.dynamic_update_slice(x, share, (0,))

    ops: dict[str, tuple[Callable[[Any], Any], int]] = {
        "all-reduce": (lambda x: lax.psum(x, axis), 1),
        "all-gather": (all_gather, 2),
        "reduce-scatter": (reduce_scatter, 1),
        "all-to-all": (lambda x: lax.all_to_all(x, axis, 0, 0, tiled=True), 2),
        "collective-permute": (lambda x: lax.ppermute(x, axis, ring), 2),
    }
    op, per_trip = ops[experiment.kind]

    def trip(carry: Carry) -> Carry:
        (x,) = carry
        for _ in range(per_trip):
            x = op(x)
        return (x,)

    return trip, per_trip, [(items,)]


_LOCAL: dict[str, Callable[[Experiment], Body]] = {
    "launch": _launch,
    "scale": _scale,
    "add": _add,
    "matmul": _matmul,
}


# -- the bench -------------------------------------------------------------------------------------


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
