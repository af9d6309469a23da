"""The parts of a step's results that a process has, and how far they are from those of one process.

The parts of arrays are told by path and place, so that those of many processes fit together:

    one process      ['w'] [(0, 4), (0, 4)]  ['w'] [(4, 8), (0, 4)]
    process 0 of 2   ['w'] [(0, 4), (0, 4)]
    process 1 of 2                           ['w'] [(4, 8), (0, 4)]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import autopar

Parts = dict[str, tuple[str, str]]  # by path and place: the type, and the bytes as hex digits

ROUNDING = 2e-5  # of each array's largest magnitude
_SMALL = 1e-6


def parts_of(tree: Any, mark: str = "") -> Parts:
    """All that this process has of a tree of arrays; the mark stands after each path."""
    found: Parts = {}
    for key, leaf in jax.tree_util.tree_leaves_with_path(tree):
        first = 0
        for piece in getattr(leaf, "pieces", (leaf,)):
            is_key = jax.dtypes.issubdtype(piece.dtype, jax.dtypes.prng_key)
            words = jax.random.key_data(piece) if is_key else piece
            for shard in words.addressable_shards:
                bounds = [i.indices(n)[:2] for i, n in zip(shard.index, words.shape, strict=True)]
                if bounds:
                    bounds[0] = (first + bounds[0][0], first + bounds[0][1])
                data = np.asarray(shard.data)
                place = f"{jax.tree_util.keystr(key)}{mark} {bounds}"
                found[place] = (data.dtype.name, data.tobytes().hex())
            first += piece.shape[0] if piece.shape else 0
    return found


def is_exact(plan: autopar.Plan, devices: int) -> bool:
    """True if processes of so many devices give every bit that one process gives under a plan.

    Sums between processes are taken in another order. Of more than two devices they are so even
    inside one: where there are several processes, JAX leaves all sums on CPUs to Gloo.
    """
    places = [s.devices or tuple(range(plan.device_count)) for s in plan.submeshes]
    return all(len(own) <= 2 and len({d // devices for d in own}) == 1 for own in places)


def gaps(mine: Sequence[Parts], wanted: Parts, exact: bool) -> dict[str, float]:
    """By path how far processes are off, in shares of the array's largest magnitude.

    Infinity is for what may not differ at all: where all is exact, in what holds no floats, and
    for parts that no process has, or one process has not.
    """
    largest = dict[str, float]()
    for place, (dtype, data) in wanted.items():
        path = _path(place)
        largest[path] = max(largest.get(path, _SMALL), magnitude(_numbers(dtype, data)))
    off = dict[str, float]()
    for place, (dtype, data) in (item for parts in mine for item in parts.items()):
        if place in wanted and data == wanted[place][1]:
            continue
        path, gap = _path(place), float("inf")
        if place in wanted and not exact:
            here, there = _numbers(dtype, data), _numbers(dtype, wanted[place][1])
            if jax.numpy.issubdtype(here.dtype, np.floating):
                apart = magnitude(here.astype(np.float64) - there.astype(np.float64))
                gap = apart / largest[path]
        off[path] = max(off.get(path, 0.0), gap)
    missing = wanted.keys() - {place for parts in mine for place in parts}
    return off | {_path(place): float("inf") for place in sorted(missing)}


def magnitude(numbers: np.ndarray[Any, Any]) -> float:
    """The largest magnitude in an array; infinity where it has what is no number."""
    sizes = np.abs(numbers.astype(np.float64))
    largest = float(np.max(sizes, initial=0.0))
    return largest if np.isfinite(largest) else float("inf")


def _numbers(dtype: str, data: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes.fromhex(data), dtype)


def _path(place: str) -> str:
    """The path of an array, without the place of its shard."""
    return place[: place.rindex(" [")]
