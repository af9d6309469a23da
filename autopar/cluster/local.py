"""The name of the cluster that the present devices make."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cluster.catalog import chip_of_kind, fabric_of
from autopar.cluster.torus import TorusFabric
from autopar.errors import ClusterError
from autopar.ir.devices import DeviceFacts


def local_name(facts: Sequence[DeviceFacts]) -> str:
    """The cluster name ("8xh100", "v5e:2x4", ...) that fits some present devices.

    Raises ClusterError where there are none, they differ, or their kind is not in the catalog.
    """
    if not facts:
        raise ClusterError("there are no devices; expected at least one from jax.devices()")
    first = facts[0]
    if any((f.platform, f.kind) != (first.platform, first.kind) for f in facts):
        kinds = sorted({f.kind for f in facts})
        raise ClusterError(f"local devices are of several kinds {kinds}; describe them in a TOML")
    name = "cpu" if first.platform == "cpu" else chip_of_kind(first.kind)
    if name is None:
        raise ClusterError(
            f"device kind {first.kind!r} is not in the catalog; write a TOML file for the cluster "
            "and pass its path (autopar calibrate measures one, and "
            "Cluster.parse('8xh100').to_toml() shows the form)"
        )
    if first.platform == "tpu":
        return _torus_name(name, facts)
    hosts = len({f.process_index for f in facts})
    return f"{hosts}x{len(facts) // hosts}x{name}" if hosts > 1 else f"{len(facts)}x{name}"


def _torus_name(chip: str, facts: Sequence[DeviceFacts]) -> str:
    if any(not f.coords for f in facts):
        raise ClusterError(f"{chip} devices report no coordinates; name the cluster by its shape")
    spans = [max(axis) - min(axis) + 1 for axis in zip(*(f.coords for f in facts), strict=True)]
    fabric = fabric_of(chip)
    axes = spans[: fabric.dims] if isinstance(fabric, TorusFabric) else spans
    shape = "x".join(str(span) for span in axes)
    slices = len({f.slice_index for f in facts})
    return f"{slices}x{chip}:{shape}" if slices > 1 else f"{chip}:{shape}"
