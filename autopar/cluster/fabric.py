"""What joins the chips of the catalog: hosts, networks and links, before anyone says how many."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster.topology import Level

_GIGA = 1e9
_US = 1e-6


@dataclass(frozen=True)
class SwitchFabric:
    """Up to `domain` devices on one fast switch (sizes in the levels are placeholders)."""

    domain: int
    devices_per_host: int
    inside: Level
    network: Level


@dataclass(frozen=True)
class TorusFabric:
    """Chips in a grid; `ring_multiple` is the axis size, or its divisor, that closes a ring.

    `largest` is the biggest slice in chips and `longest` the longest axis (0: no limit).
    """

    dims: int
    largest: int
    longest: int
    ring_multiple: int
    link_bytes_per_second: float
    devices_per_chip: int
    full_gather: bool
    network: Level


def _nvlink(gigabytes: float, pair: float, reduction: float = 0.0) -> Level:
    """NVLink or NVSwitch inside a host, in GB/s per GPU.

    8.4 us to start and 3.4 us a step are NCCL's Simple protocol (its tuning table). On H100 they
    and 320 GB/s meet XLA's speed-of-light figures: 32 MiB over 8 GPUs, all-gather 129 us. So
    does the pair rate (collective-permute 452 us). NCCL's table starts NVLS at 25 us; 75 us is
    what keeps a 32 MiB all-reduce near XLA's 226 us.
    """
    return Level(
        "nvlink",
        8,
        gigabytes * _GIGA,
        3.4 * _US,
        start_seconds=8.4 * _US,
        pair_bytes_per_second=pair * _GIGA,
        reduction_efficiency=reduction,
        reduction_start_seconds=75 * _US if reduction else 0.0,
    )


def _network(gigabytes: float) -> Level:
    """InfiniBand or Ethernet between hosts, nominal one-way GB/s per GPU.

    A 400 Gb/s port of 50 GB/s reaches 39 in NCCL and 23 in XLA's model; 35 is between the two.
    XLA gives one pair, and an all-to-all, 22 of 50 GB/s (32 MiB between two H100 hosts:
    1530 us). 14 us a step is NCCL's Simple protocol.
    """
    return Level(
        "network",
        1,
        0.7 * gigabytes * _GIGA,
        14 * _US,
        start_seconds=8.4 * _US,
        pair_bytes_per_second=0.44 * gigabytes * _GIGA,
        shuffle_bytes_per_second=0.44 * gigabytes * _GIGA,
    )


def _data_center(gigabits_per_chip: float, devices_per_chip: int = 1) -> Level:
    """The data-center network between TPU slices; latencies are a guess (low confidence)."""
    rate = gigabits_per_chip / 8 / devices_per_chip * _GIGA
    return Level("data-center network", 1, rate, 30 * _US, start_seconds=50 * _US)


# Measured here on 8 virtual devices of 2 cores, busy: an all-reduce of 4 B 255 us, of 16 MiB 17 ms.
_CPU_INSIDE = Level("host", 8, 2 * _GIGA, 2 * _US, start_seconds=100 * _US)
_CPU_NETWORK = Level("network", 1, 1 * _GIGA, 50 * _US, start_seconds=100 * _US)

_SWITCHES: dict[str, SwitchFabric] = {
    "cpu": SwitchFabric(1024, 1024, _CPU_INSIDE, _CPU_NETWORK),
    # 25 Gb/s for a whole p3.16xlarge of 8 GPUs: 0.39 GB/s each.
    "v100-16gb": SwitchFabric(8, 8, _nvlink(120, 40), _network(0.39)),
    "a100-40gb": SwitchFabric(8, 8, _nvlink(230, 58), _network(25)),
    "a100-80gb": SwitchFabric(8, 8, _nvlink(230, 58), _network(25)),
    "h100": SwitchFabric(8, 8, _nvlink(320, 76, 0.85), _network(50)),
    "h200": SwitchFabric(8, 8, _nvlink(320, 76, 0.85), _network(50)),
    "b200": SwitchFabric(8, 8, _nvlink(640, 152, 0.74), _network(50)),
    # One NVLink domain is a rack of 72; a host drives 4 of them.
    "gb200": SwitchFabric(72, 4, _nvlink(640, 152, 0.74), _network(50)),
}

# 46.6 and 93.4 GB/s one way are what libtpu's own collective estimates imply (v4: scaling book).
_TORI: dict[str, TorusFabric] = {
    "v4": TorusFabric(3, 4096, 0, 4, 45 * _GIGA, 1, False, _data_center(25)),
    "v5e": TorusFabric(2, 256, 16, 16, 46.63 * _GIGA, 1, True, _data_center(25)),
    "v5p": TorusFabric(3, 8960, 0, 4, 93.4 * _GIGA, 1, False, _data_center(50)),
    "v6e": TorusFabric(2, 256, 16, 16, 93.4 * _GIGA, 1, False, _data_center(100)),
    "tpu7x": TorusFabric(3, 9216, 0, 4, 93.4 * _GIGA, 2, False, _data_center(100, 2)),
}


def fabric_of(chip: str) -> SwitchFabric | TorusFabric:
    """The fabric of a chip of the catalog, by its full name."""
    return _SWITCHES[chip] if chip in _SWITCHES else _TORI[chip]
