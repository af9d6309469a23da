"""Programs that repeat one op on every device, each repetition waiting for the one before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.cluster.calibration import Experiment

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
