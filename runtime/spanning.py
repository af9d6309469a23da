"""Arrays that span processes: made of what each has on its host, and made whole on each again.

`jax.device_put` of a host array onto devices of several processes compares all hosts' arrays by a
collective, which takes longer than a small step. Here each process lays out its own pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import ArgumentError
from autopar.frontend.compat import host_putter
from autopar.runtime.bind import is_key
from autopar.runtime.transport.abstract import Copier


def spread(leaf: Any, sharding: NamedSharding, *, is_copy: bool = False) -> Any:
    """An array that every process has whole, laid out over the devices of several.

    Where all devices are this process's own that is `jax.device_put`.
    """
    if sharding.is_fully_addressable:
        if type(leaf) is np.ndarray and not is_copy and _is_as_jax_has_it(leaf.dtype):
            return host_putter(leaf.shape, leaf.dtype, sharding)(leaf)
        return jax.device_put(leaf, sharding, may_alias=False if is_copy else None)
    if _is_key(leaf):
        words = spread(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array) and not leaf.addressable_shards:
        processes = sorted(_processes(leaf))
        raise ArgumentError(
            f"an array {leaf.dtype}{list(leaf.shape)} lies on process {processes} alone, and "
            f"process {jax.process_index()} needs it: pass it to every process, as a host array, "
            "or as the last step gave it back"
        )
    host = np.asarray(leaf)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda box: host[box])


def _is_as_jax_has_it(dtype: Any) -> bool:
    """True of numbers that JAX would not make narrower ones of."""
    return dtype.kind in "biufc" and jax.dtypes.canonicalize_dtype(dtype) == dtype


def _is_spanning(leaf: Any) -> bool:
    """True of an array with devices of several processes."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return False
    return len(_processes(leaf)) > 1


def _processes(leaf: Any) -> set[int]:
    return {d.process_index for d in leaf.sharding.device_set}


class Gatherer:
    """Makes arrays whole on every host where a step cannot take them as they lie over processes.

    State is made so before there is a plan: cut up evenly over all devices. `places` has, for each
    leaf, the device sets on which the step takes it. All processes see how an array lies, so that
    all make the same ones whole.
    """

    def __init__(self, places: Sequence[Sequence[frozenset[Any]]]) -> None:
        self._places = places
        self._known: dict[tuple[int, int], Any] = {}

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The leaves, those that lie elsewhere on the host."""
        found = list(leaves)
        for number, leaf in enumerate(leaves):
            key = (number, id(getattr(leaf, "sharding", None)))
            if key in self._known:
                continue
            if _is_spanning(leaf) and leaf.sharding.device_set not in self._places[number]:
                found[number] = gathered(leaf)
            elif isinstance(leaf, jax.Array):
                self._known[key] = leaf.sharding  # held, so that its id stays its own
        return found


def gathered(leaf: jax.Array) -> Any:
    """An array that spans processes, whole on the host of each; all of them must call this."""
    if _is_key(leaf):
        words = gathered(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    if leaf.is_fully_replicated and not leaf.addressable_shards:
        return leaf
    if not leaf.is_fully_replicated:
        if not isinstance(leaf.sharding, NamedSharding):
            raise ArgumentError(
                f"an array {leaf.dtype}{list(leaf.shape)} lies over several processes as "
                f"{leaf.sharding}; give it a NamedSharding, or pass what each host has of it"
            )
        mesh: Any = leaf.sharding.mesh
        leaf = _replicator(NamedSharding(mesh, PartitionSpec()))(leaf)
    return np.asarray(leaf.addressable_data(0))


def elsewhere(processes: Sequence[int]) -> Mesh:
    """A mesh of one device of each of these processes."""
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    return Mesh(np.array([first[p] for p in processes], dtype=object), ("process",))


def of_copies(carry: Copier, numbers: Sequence[int]) -> Copier:
    """A copier that is given copies of some arrays, as these are consumed before they arrive."""
    if not numbers:
        return carry

    def copy(arrays: Sequence[Any]) -> Sequence[Any]:
        given = list(arrays)
        for i in numbers:
            given[i] = _copied(given[i])
        return carry(given)

    return copy


_copied: Callable[[Any], Any] = jax.jit(jnp.copy)


@lru_cache(maxsize=64)
def _replicator(sharding: NamedSharding) -> Callable[[Any], Any]:
    return jax.jit(lambda x: x, out_shardings=sharding)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and is_key(leaf.dtype)
