"""Loads a compiled program onto other devices than those that it was compiled for."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.frontend.compat import options_for_devices


class Portable:
    """A compiled program that can be had on other devices too; it is written out once.

    JAX's own `deserialize_and_load` looks for the devices that the program came from, and on CPU
    what it loads still runs there; so the program is read here, with a device for each of them.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._homes: Sequence[Any] = compiled.runtime_executable().local_devices()

    def on(self, devices: Sequence[Any]) -> Any | None:
        """The same program on as many other devices; None where this JAX or backend cannot."""
        if len(self._homes) != len(devices) or not _is_able(devices[0].platform):
            return None
        try:
            return self.load(devices)
        except _REFUSALS:
            return None

    def load(self, devices: Sequence[Any]) -> Any:
        """What `on` gives, tried without asking whether it would run."""
        data, in_tree, out_tree = self._written
        unloaded, info, no_kwargs = _Reader(data, self._homes, devices).load()
        return jax.stages.Compiled(
            unloaded.load(), [], in_tree.unflatten(info), out_tree, no_kwargs=no_kwargs
        )

    @cached_property
    def _written(self) -> tuple[bytes, Any, Any]:
        return serialize_executable.serialize(self._compiled)


_REFUSALS = (AttributeError, KeyError, NotImplementedError, TypeError, ValueError, RuntimeError)


class _Reader(pickle.Unpickler):
    """Reads what JAX wrote of an executable; of its devices each becomes another one."""

    def __init__(self, data: bytes, homes: Sequence[Any], devices: Sequence[Any]) -> None:
        pickle.Unpickler.__init__(self, io.BytesIO(data))
        self._devices = tuple(devices)
        self._instead = {h.id: d for h, d in zip(homes, devices, strict=True)}

    def persistent_load(self, pid: Any) -> Any:
        """What stands in the data by name alone: the executable, a device, the client."""
        client = self._devices[0].client
        if pid[0] == "device":
            return self._instead[pid[1]]
        if pid[0] == "client":
            return client
        return client.deserialize_executable(
            pid[1],
            executable_devices=self._devices,
            compile_options=options_for_devices(self._devices),
        )


@lru_cache(maxsize=8)
def _is_able(platform: str) -> bool:
    """Whether a small program, moved from one device to another, runs there."""
    devices = jax.local_devices(backend=platform)
    if len(devices) < 2:
        return False
    here, there = (NamedSharding(Mesh(np.array([d]), ("x",)), _WHOLE) for d in devices[:2])
    shaped = jax.ShapeDtypeStruct((2,), np.float32, sharding=here)
    compiled = jax.jit(_doubled, in_shardings=here, out_shardings=here).lower(shaped).compile()
    try:
        moved = Portable(compiled).load(devices[1:2])
        result = moved(jax.device_put(np.ones(2, np.float32), there))
        return bool(result.devices() == {devices[1]} and float(result[1]) == _TWO)
    except _REFUSALS:
        return False


_WHOLE, _TWO = PartitionSpec(), 2.0


def _doubled(x: jax.Array) -> jax.Array:
    return x + x
