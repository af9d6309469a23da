"""Cluster names such as "8xh100", "4x8xa100-40gb" and "v5p:4x4x8", read into parts."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import replace

from autopar.cluster.catalog import ALIASES, CHIPS, chip_named
from autopar.cluster.chip import Chip
from autopar.cluster.fabric import SwitchFabric, TorusFabric, fabric_of
from autopar.cluster.topology import Level, Switch, Topology, Torus
from autopar.errors import ClusterError

FORMS = (
    "'8xh100' (devices x chip), '4x8xa100-40gb' (hosts x devices x chip), 'v5p:4x4x8' "
    "(TPU slice), 'v5p-64' (the same by Google's name), '2xv5e:16x16' (slices), 'local', or the "
    "path of a .toml file"
)

_SWITCHED = re.compile(r"(?:(\d+)x)?(\d+)x([a-z][\w-]*)")
_TORUS = re.compile(r"(?:(\d+)x)?([a-z]\w*):(\d+(?:x\d+)*)")
_ACCELERATOR = re.compile(r"(?:google\s+)?(?:(\d{1,6})x)?([a-z]\w*)-(\d{1,6})")
_HOST_BOUNDS = (2, 2, 1)
# Google counts the cores of these in a name, two to a chip, and the chips of the others.
_COUNTED_BY_CORE = frozenset({"v4", "v5p", "tpu7x"})


def read_name(text: str) -> tuple[str, Chip, Topology]:
    """The full name, the chip and the topology that a cluster name means.

    Raises ClusterError where the form or the chip is unknown, or no such cluster can be built.
    """
    name = _with_shape(text, text.strip().lower())
    if match := _TORUS.fullmatch(name):
        slices, chip_name, sizes = match.groups()
        chip = _chip(text, chip_name)
        fabric = fabric_of(chip.name)
        if isinstance(fabric, SwitchFabric):
            raise ClusterError(
                f"cluster {text!r}: {chip.name} has no torus; write a count, as in '8x{chip.name}'"
            )
        shape = tuple(int(size) for size in sizes.split("x"))
        count = int(slices or 1)
        full = f"{chip.name}:{sizes}" if count == 1 else f"{count}x{chip.name}:{sizes}"
        return full, chip, _torus(text, fabric, shape, count)
    if match := _SWITCHED.fullmatch(name):
        outer, inner, chip_name = match.groups()
        chip = _chip(text, chip_name)
        fabric = fabric_of(chip.name)
        if isinstance(fabric, TorusFabric):
            example = "x".join(["4"] * fabric.dims)
            raise ClusterError(
                f"cluster {text!r}: {chip.name} is wired as a torus; write its shape, as in "
                f"'{chip.name}:{example}'"
            )
        prefix = name[: -len(chip_name)]
        return prefix + chip.name, chip, _switch(text, fabric, int(outer or 0), int(inner))
    raise ClusterError(f"cluster {text!r} is not understood; write {FORMS}.{_close(name)}")


def _with_shape(text: str, name: str) -> str:
    """A name as Google gives to TPU slices, such as v5p-64, with the slice's shape: v5p:2x4x4.

    Any other name is handed on as it is. Raises ClusterError where there is no such slice.
    """
    match = _ACCELERATOR.fullmatch(name)
    chip = chip_named(match[2]) if match is not None else None
    fabric = fabric_of(chip.name) if chip is not None else None
    if match is None or chip is None or not isinstance(fabric, TorusFabric):
        return name
    slices, _, count = match.groups()
    cores = 2 if chip.name in _COUNTED_BY_CORE else 1
    shapes = {math.prod(s): s for s in _slice_shapes(fabric)}
    chips, rest = divmod(int(count), cores)
    if rest or chips not in shapes:
        counts = sorted(n * cores for n in shapes)
        near = sorted(sorted(counts, key=lambda n: abs(n - int(count)))[:3])
        unit = "cores, two to a chip" if cores > 1 else "chips"
        raise ClusterError(
            f"cluster {text!r}: there is no {chip.name} slice of {count} {unit}; near it are "
            f"{', '.join(f'{chip.name}-{n}' for n in near)}"
        )
    sizes = "x".join(map(str, shapes[chips]))
    return f"{slices}x{chip.name}:{sizes}" if slices is not None else f"{chip.name}:{sizes}"


def _slice_shapes(fabric: TorusFabric) -> Iterator[tuple[int, ...]]:
    """The shape of every slice that has a name, the squarest of a number of chips last.

    Google's tables (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e): up to 32 chips double one axis
    after another; from a cube of 4x4x4 on they are blocks of cubes as near to a cube as can be.
    """
    if fabric.dims == 2:
        yield from ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
        return
    yield from ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
    cubes = fabric.largest // 64
    sides = [
        (a, b, c)
        for a in range(1, cubes + 1)
        for b in range(a, cubes // a + 1)
        for c in range(b, cubes // (a * b) + 1)
    ]
    for a, b, c in sorted(sides, key=lambda side: (-sum(side), side)):
        yield 4 * a, 4 * b, 4 * c


def larger_name(name: str, factor: int) -> str:
    """The name of a cluster with a power of two times the devices: more hosts, or longer rings.

    Of a torus the shortest side is doubled, the last of equal ones. Raises ClusterError where the
    name has neither form.
    """
    if match := _TORUS.fullmatch(name):
        slices, chip_name, sizes = match.groups()
        shape = [int(size) for size in sizes.split("x")]
        for _ in range(factor.bit_length() - 1):
            at = max(i for i, size in enumerate(shape) if size == min(shape))
            shape[at] *= 2
        return f"{slices + 'x' if slices else ''}{chip_name}:{'x'.join(map(str, shape))}"
    if match := _SWITCHED.fullmatch(name):
        outer, inner, chip_name = match.groups()
        if outer:
            return f"{int(outer) * factor}x{inner}x{chip_name}"
        return f"{int(inner) * factor}x{chip_name}"
    raise ClusterError(f"cluster {name!r} has no name by which it could be larger")


def _chip(text: str, name: str) -> Chip:
    chip = chip_named(name)
    if chip is None:
        raise ClusterError(
            f"cluster {text!r}: no chip is called {name!r}.{_close(name)} "
            f"Chips: {', '.join(c.name for c in CHIPS)}. Write {FORMS}."
        )
    return chip


def _close(name: str) -> str:
    known = [*(chip.name for chip in CHIPS), *(alias for alias, _ in ALIASES)]
    word = re.sub(r"^(\d+x)*", "", name).split(":")[0]
    near = [k for k in known if word and k.startswith(word)]
    near += [k for k in difflib.get_close_matches(word, known, cutoff=0.5) if k not in near]
    return f" Close: {', '.join(near)}." if near else ""


def _switch(text: str, fabric: SwitchFabric, outer: int, inner: int) -> Switch:
    domain = fabric.domain
    if not outer:
        # One number: fill one domain, or whole domains.
        outer, inner = (1, inner) if inner <= domain else (inner // domain, inner)
        if outer > 1 or inner > domain:
            if inner % domain:
                near = outer * domain
                raise ClusterError(
                    f"cluster {text!r}: {inner} devices do not fill hosts of {domain}; write a "
                    f"multiple of {domain} (such as {near}), or hosts x devices, as in "
                    f"'{outer}x{domain}x...'"
                )
            inner = domain
    if outer < 1 or inner < 1 or inner > domain:
        raise ClusterError(
            f"cluster {text!r}: {outer} x {inner} devices; expected at least one of each and at "
            f"most {domain} on one host or rack"
        )
    levels: tuple[Level, ...] = (replace(fabric.inside, size=inner),)
    if outer > 1:
        levels = (*levels, replace(fabric.network, size=outer))
    return Switch(levels, min(fabric.devices_per_host, inner))


def _torus(text: str, fabric: TorusFabric, shape: tuple[int, ...], slices: int) -> Torus:
    if fault := _impossible(fabric, shape, slices):
        raise ClusterError(f"cluster {text!r} cannot be built: {fault}")
    bounds = tuple(min(b, s) for b, s in zip(_HOST_BOUNDS, shape, strict=False))
    return Torus(
        shape=shape,
        # A ring needs optical or edge links, which slices have only at these sizes.
        wraps=tuple(size % fabric.ring_multiple == 0 for size in shape),
        link_bytes_per_second=fabric.link_bytes_per_second,
        hop_seconds=1e-6,
        host_bounds=bounds,
        devices_per_chip=fabric.devices_per_chip,
        full_gather=fabric.full_gather,
        network=replace(fabric.network, size=slices) if slices > 1 else None,
    )


def _impossible(fabric: TorusFabric, shape: tuple[int, ...], slices: int) -> str | None:
    """Why no slice has this shape, with what would do, or None."""
    if slices < 1 or min(shape) < 1:
        return "every count must be 1 or more"
    if len(shape) != fabric.dims:
        example = "x".join(["4"] * fabric.dims)
        return f"it has {len(shape)} sizes but slices are {fabric.dims}-D, as in {example}"
    if math.prod(shape) > fabric.largest:
        return f"it has {math.prod(shape)} chips but the largest slice has {fabric.largest}"
    if set(shape) == {1}:
        return None
    if fabric.dims == 2:
        if any(size not in (2, 4, 8, 16) for size in shape):
            return "each size must be 2, 4, 8 or 16 (or 1x1)"
    elif any(size % 4 and size not in (1, 2) for size in shape) or any(s % 2 for s in shape[:2]):
        return "each size must be 2 or a multiple of 4, or 1 on the last axis (or 1x1x1)"
    return None
