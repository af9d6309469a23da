"""Cluster names such as "8xh100", "4x8xa100-40gb" and "v5p:4x4x8": read, and made."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

from autopar.cluster.catalog import ENTRIES, FABRICS, chip_named, chip_of_kind, fabric_of
from autopar.cluster.chip import Chip
from autopar.cluster.topology import AbstractFabric, AbstractTopology
from autopar.errors import ClusterError
from autopar.ir.devices import DeviceFacts

FORMS = (
    "'8xh100' (devices x chip), '4x8xa100-40gb' (hosts x devices x chip), 'v5p:4x4x8' "
    "(TPU slice), 'v5p-64' (the same by Google's name), '2xv5e:16x16' (slices), 'local', or the "
    "path of a .toml file"
)

_ACCELERATOR = re.compile(r"(?:google\s+)?(?:(\d{1,6})x)?([a-z]\w*)-(\d{1,6})")


def read_name(text: str) -> tuple[str, Chip, AbstractTopology]:
    """The full name, the chip and the topology that a cluster name means.

    Raises ClusterError where the form or the chip is unknown, or no such cluster can be built.
    """
    name = _with_shape(text, text.strip().lower())
    for kind, match in _forms(name):
        chip = _chip(text, match["chip"])
        fabric = fabric_of(chip.name)
        if not isinstance(fabric, kind):
            raise ClusterError(f"cluster {text!r}: {fabric.hint(chip.name)}")
        full, topology = fabric.read(text, chip.name, match)
        return full, chip, topology
    near = f" For 8 devices of {name}: '8x{name}'." if chip_named(name) else _close(name)
    raise ClusterError(f"cluster {text!r} is not understood; write {FORMS}.{near}")


def larger_name(name: str, factor: int) -> str:
    """The name of a cluster with a power of two times the devices: more hosts, or longer rings.

    Raises ClusterError where the name has no form of a cluster's.
    """
    for kind, match in _forms(name):
        return kind.larger(match, factor)
    raise ClusterError(f"cluster {name!r} has no name by which it could be larger")


def _forms(name: str) -> Iterator[tuple[type[AbstractFabric], re.Match[str]]]:
    """The fabrics whose names have the form of this one."""
    for kind in FABRICS:
        if match := kind.form.fullmatch(name):
            yield kind, match


def _with_shape(text: str, name: str) -> str:
    """A name such as v5p-64 with the shape that it stands for; any other as it is."""
    match = _ACCELERATOR.fullmatch(name)
    chip = chip_named(match[2]) if match is not None else None
    if match is None or chip is None:
        return name
    return fabric_of(chip.name).by_count(text, chip.name, match[1], match[3]) or name


def _chip(text: str, name: str) -> Chip:
    chip = chip_named(name)
    if chip is None:
        raise ClusterError(
            f"cluster {text!r}: no chip is called {name!r}.{_close(name)} "
            f"Chips: {', '.join(e.chip.name for e in ENTRIES)}. Write {FORMS}."
        )
    return chip


def _close(name: str) -> str:
    known = [e.chip.name for e in ENTRIES] + [alias for e in ENTRIES for alias in e.aliases]
    word = re.sub(r"^(\d+x)*", "", name).split(":")[0]
    near = [k for k in known if word and k.startswith(word)]
    near += [k for k in difflib.get_close_matches(word, known, cutoff=0.5) if k not in near]
    return f" Close: {', '.join(near)}." if near else ""


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
    return fabric_of(name).local_name(name, facts)
