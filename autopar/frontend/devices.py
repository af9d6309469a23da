"""The devices that are present, as plain facts."""

from __future__ import annotations

import jax

from autopar.ir.devices import DeviceFacts


def local_devices() -> tuple[DeviceFacts, ...]:
    """The DeviceFacts of each of jax.devices(), in JAX's order.

    On several processes this is every device of the job. Only a process's own devices report
    their memory, so those figures stand in for the others of the same kind.
    """
    facts = [_facts(device) for device in jax.devices()]
    known = {f.kind: f.memory_bytes for f in facts if f.memory_bytes}
    return tuple(
        f
        if f.memory_bytes
        else DeviceFacts(
            f.platform, f.kind, known.get(f.kind, 0), f.process_index, f.coords, f.slice_index
        )
        for f in facts
    )


def keep_to_cpu() -> None:
    """Keep JAX off every accelerator in this process, so that planning asks no device anything."""
    jax.config.update("jax_platforms", "cpu")


def _facts(device: jax.Device) -> DeviceFacts:
    mine = device.process_index == jax.process_index()
    stats = device.memory_stats() if mine and device.platform != "cpu" else None
    return DeviceFacts(
        platform=device.platform,
        kind=device.device_kind,
        memory_bytes=int((stats or {}).get("bytes_limit", 0)),
        process_index=device.process_index,
        coords=tuple(getattr(device, "coords", None) or ()),
        slice_index=int(getattr(device, "slice_index", None) or 0),
    )
