"""Groups of devices that talk to each other, from the spellings that HLO has for them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

from autopar.ir.mesh import MeshShape

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_DEVICES = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?\)")  # `([2,4]T(1,0))`: no shape of its own
_MESH = re.compile(r"@?\w*mesh\[([^\]]*)\](.*)\{([^}]*)\}\s*$")
_AXIS = re.compile(r"'?\"?([A-Za-z_]\w*)'?\"?=(\d+)")
_CHOSEN = re.compile(r"'?\"?([A-Za-z_]\w*)'?\"?(?::\((\d+)\)(\d+))?")


def read_groups(attributes: Mapping[str, str], device_count: int) -> Groups:
    """The groups of a collective, over devices 0 to device_count - 1.

    Reads replica_groups as lists `{{0,1},{2,3}}`, iota `[2,4]<=[4,2]T(1,0)` and mesh
    `mesh['a'=2,'b'=4] {'b'}`, the axes behind what says which device is where in it, and
    source_target_pairs as the sets that pairs connect.
    No groups, or empty ones, mean all devices.
    """
    if "source_target_pairs" in attributes:
        return join_pairs(_lists(attributes["source_target_pairs"]))
    text = f"{attributes.get('replica_groups', '')}{attributes.get('device_ids', '')}"
    if found := _IOTA.match(text):
        shape, dims, order = (_numbers(part or "") for part in found.groups())
        flat = _transpose(dims, order or tuple(range(len(dims))))
        width = shape[-1] if len(shape) > 1 else math.prod(shape)
        return _split(flat, width)
    if found := _MESH.match(text):
        return _on_mesh(found.group(1), found.group(2), found.group(3))
    return _lists(text) or (tuple(range(device_count)),)


def axes_of(groups: Groups, mesh: MeshShape) -> tuple[str, ...]:
    """The axes that groups of mesh positions run over: () where they are those of no axes.

    Positions count row-major. Groups of one device are taken to be left out.
    """
    wanted = {frozenset(group) for group in groups}
    names = tuple(n for n, size in zip(mesh.names, mesh.sizes, strict=True) if size > 1)
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            # The groups along these axes: the positions with those dims innermost, cut into rows.
            grouped = [dim for dim, name in enumerate(mesh.names) if name in axes]
            rest = [dim for dim, name in enumerate(mesh.names) if name not in axes]
            flat = _transpose(mesh.sizes, (*rest, *grouped))
            if {frozenset(group) for group in _split(flat, mesh.size(axes))} == wanted:
                return axes
    return ()


def axes_crossed(groups: Groups, mesh: MeshShape) -> tuple[str, ...]:
    """The axes along which the devices of any group differ from each other."""
    places = {at: place for at, place in enumerate(itertools.product(*map(range, mesh.sizes)))}
    return tuple(
        name
        for dim, name in enumerate(mesh.names)
        if any(len({places[at][dim] for at in group if at in places}) > 1 for group in groups)
    )


def _split(flat: Sequence[int], width: int) -> Groups:
    return tuple(tuple(flat[at : at + width]) for at in range(0, len(flat), width))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _lists(text: str) -> Groups:
    groups = (_numbers(inner) for inner in re.findall(r"\{([\d,\s]*)\}", text))
    return tuple(group for group in groups if group)


def _transpose(dims: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """0, 1, 2, ... laid out as `dims`, read with its dims in another order."""
    strides = [math.prod(dims[at + 1 :]) for at in range(len(dims))]
    flat: tuple[int, ...] = (0,)
    for at in reversed(order):
        flat = tuple(step * strides[at] + n for step in range(dims[at]) for n in flat)
    return flat


def _on_mesh(axes: str, between: str, chosen: str) -> Groups:
    """Groups along some axes, or parts of axes `'a':(2)4` (4 after 2 bigger parts), of a mesh."""
    names: list[str] = []
    dims: list[int] = []
    wanted = {name: (int(pre or 1), size) for name, pre, size in _CHOSEN.findall(chosen)}
    grouped: list[int] = []
    rest: list[int] = []
    for name, size in _AXIS.findall(axes):
        pre, part = wanted.get(name, (1, "1"))
        inner = int(part) if part else int(size)
        for piece, taken in ((pre, False), (inner, True), (int(size) // pre // inner, False)):
            (grouped if taken and name in wanted else rest).append(len(dims))
            dims.append(piece)
            names.append(name)
    flat = _transpose(dims, (*rest, *grouped))
    if found := _IOTA.search(axes + between) or _DEVICES.search(between):
        ids, order = (_numbers(part or "") for part in found.groups()[-2:])
        devices = _transpose(ids, order or tuple(range(len(ids))))
        flat = tuple(devices[n] for n in flat)
    return _split(flat, math.prod(dims[at] for at in grouped))


def join_pairs(sets: Groups) -> Groups:
    """The sets of devices that overlapping sets connect, each in rising order."""
    root: dict[int, int] = {}

    def find(device: int) -> int:
        while root.setdefault(device, device) != device:
            device = root[device]
        return device

    for first, *others in sets:
        find(first)
        for other in others:
            low, high = sorted((find(first), find(other)))
            root[high] = low
    members: dict[int, list[int]] = {}
    for device in sorted(root):
        members.setdefault(find(device), []).append(device)
    return tuple(tuple(group) for group in members.values())
