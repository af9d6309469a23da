"""Devices that are not here, as a compiler knows them, in our own numbering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental import topologies

from autopar.cluster.target import Target
from autopar.errors import ClusterError
from autopar.runtime.aot.gpu_specs import gpu_spec


def devices_of(target: Target) -> list[Any]:
    """The devices of a target: the one of our number i is at i."""
    if target.platform == "gpu":
        found = topologies.get_topology_desc(
            platform="cuda", topology=target.topology, target_config=gpu_spec(target.chip)
        )
        return in_our_order(found.devices)
    found = topologies.get_topology_desc(
        topology_name=target.topology, platform="tpu", **tpu_options(target)
    )
    return in_our_order(found.devices)


def tpu_options(target: Target) -> dict[str, Any]:
    """The keywords of a TPU topology beside its name."""
    options: dict[str, Any] = {
        "num_slices": target.slices,
        "chips_per_host_bounds": target.host_bounds,
        "wrap": target.wraps,
    }
    if target.chip == "v4":
        if target.devices_per_chip != 1:
            raise ClusterError("a v4 chip is compiled for as one device, its two cores joined")
        options["chip_config_name"] = "megacore"
    return options


def in_our_order(devices: Sequence[Any]) -> list[Any]:
    """Devices by number: fastest along the cores of a chip, then x, y, z and slice.

    JAX counts those of a TPU host first instead. Devices on switches have no cores; they come
    host by host.
    """
    return sorted(devices, key=_place)


def _place(device: Any) -> tuple[int, ...]:
    core = getattr(device, "core_on_chip", None)
    if core is None:
        return (device.process_index, device.id)
    return (getattr(device, "slice_index", None) or 0, *reversed(device.coords), core)
