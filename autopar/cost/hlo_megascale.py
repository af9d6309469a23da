"""Collectives between TPU slices, which HLO writes as sends to the host and receives from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.collective import COLLECTIVE_KINDS, CollectiveKind
from autopar.cost.hlo_groups import Groups
from autopar.cost.hlo_text import Instruction

_KINDS: dict[str, CollectiveKind] = {
    kind.upper().replace("-", "_"): kind for kind in COLLECTIVE_KINDS
}
_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TARGET = re.compile(r'_xla_megascale_target="([^"]*)"')
_PART = re.compile(r"\{([\d,:]+)\}x\{([\d,:]+)\}")


@dataclass(frozen=True)
class Transfer:
    """What a send to other slices is a part of; the `groups` hold mesh positions."""

    kind: CollectiveKind
    groups: Groups


def transfer_of(send: Instruction, order: Sequence[int]) -> Transfer | None:
    """The collective of a send; None where it does not leave its slice.

    The target "{1,2}x{0:15}" means slices 1 and 2 (counted from 1) and in each the devices 0 to
    15, which exchange with those of their own number. `order` has the device of each position.
    """
    attributes = send.attributes.get("frontend_attributes", "")
    kind, target = _KIND.search(attributes), _TARGET.search(attributes)
    if send.opcode != "send" or kind is None or target is None:
        return None
    known = _KINDS.get(kind.group(1), "collective-permute")
    return Transfer(known, tuple(_groups(target.group(1), order)))


def _groups(target: str, order: Sequence[int]) -> Iterator[tuple[int, ...]]:
    position = {device: at for at, device in enumerate(order)}
    parts = [(_range(slices), _range(devices)) for slices, devices in _PART.findall(target)]
    slice_count = max((number for slices, _ in parts for number in slices), default=1)
    width = len(order) // slice_count
    for slices, devices in parts:
        for device in devices:
            ids = [(number - 1) * width + device for number in slices]
            yield tuple(sorted(position[i] for i in ids if i in position))


def _range(text: str) -> list[int]:
    """The numbers of "0:15" or "1,2"."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def in_every_slice(groups: Groups, order: Sequence[int], width: int) -> Groups:
    """The mesh positions of groups that each slice of `width` devices has alike.

    A program for several slices is written for one; its devices are the slice's, in mesh order.
    """
    slices = [
        [at for at, device in enumerate(order) if device // width == number]
        for number in range(len(order) // width)
    ]
    return tuple(tuple(places[at] for at in group) for places in slices for group in groups)
