"""The interconnects that there are, and which one joins each chip of the catalog."""

from __future__ import annotations

from autopar.cluster.switch import Switch, SwitchFabric
from autopar.cluster.topology import AbstractFabric, AbstractTopology, Level
from autopar.cluster.torus import Torus, TorusFabric

# A new interconnect is a row of each of these, a file like those of its two classes, and a row
# below for each chip that it joins.
TOPOLOGIES: tuple[type[AbstractTopology], ...] = (Switch, Torus)
FABRICS: tuple[type[AbstractFabric], ...] = (TorusFabric, SwitchFabric)

_GIGA = 1e9
_US = 1e-6


def _nvlink(gigabytes: float, pair: float, reduction: float = 0.0) -> Level:
    """NVLink or NVSwitch inside a host, in GB/s per GPU, of a ring and of one pair.

    Fitted for H100 and B200 to XLA's tables of measured collectives over 2, 4 and 8 GPUs (probed
    with benchmarks/collectives.py): from 8 MiB on within 15 % but for all-to-alls over 2 and 4 GPUs
    (25 %), below within 2x. Its own figures scatter as much there. Pairs exchange 76 (B200: 82)
    GB/s up to 64 MiB, and four times that above 128 MiB, which no formula here follows; two GPUs
    alone reach 116.
    """
    return Level(
        "nvlink",
        8,
        gigabytes * _GIGA,
        2.4 * _US,
        start_seconds=20 * _US,
        pair_bytes_per_second=pair * _GIGA,
        shuffle_bytes_per_second=0.86 * gigabytes * _GIGA,
        reduction_efficiency=reduction,
        reduction_start_seconds=60 * _US if reduction else 0.0,
        local_bytes_per_second=2.5 * gigabytes * _GIGA,
    )


def _network(gigabytes: float, start: float, step: float) -> Level:
    """InfiniBand or Ethernet between hosts: the one-way GB/s that a GPU reaches, microseconds.

    Of H100, H200 and B200 they are XLA's, which takes the first to have half the port of the
    others: with them whole hosts, and GPUs of one number in each host, are within 10 % of its
    all-gathers, reduce-scatters, all-reduces (4 hosts) and permutes. Not followed, because it is
    no physical figure: groups of some GPUs of each host pay a network step for every member
    (8 in 2 hosts: 332 us for 64 KiB); an all-to-all sends the share that stays at home as well;
    two whole hosts of four are half as fast as two of two; and a group of every second host is 5 ms
    whatever its size.
    """
    return Level("network", 1, gigabytes * _GIGA, step * _US, start_seconds=start * _US)


def _data_center(gigabits_per_chip: float, devices_per_chip: int = 1) -> Level:
    """The data-center network between TPU slices; latencies are a guess (low confidence)."""
    rate = gigabits_per_chip / 8 / devices_per_chip * _GIGA
    return Level("data-center network", 1, rate, 30 * _US, start_seconds=50 * _US)


# Measured here on 8 virtual devices of 2 cores, busy: an all-reduce of 4 B 255 us, of 16 MiB 17 ms.
_CPU_INSIDE = Level("host", 8, 2 * _GIGA, 2 * _US, start_seconds=100 * _US)
_CPU_NETWORK = Level("network", 1, 1 * _GIGA, 50 * _US, start_seconds=100 * _US)

_OF_CHIPS: dict[str, AbstractFabric] = {
    "cpu": SwitchFabric(1024, 1024, _CPU_INSIDE, _CPU_NETWORK),
    # 25 Gb/s for a whole p3.16xlarge of 8 GPUs: 0.39 GB/s each. 8.4 and 14 us are NCCL's table.
    "v100-16gb": SwitchFabric(8, 8, _nvlink(120, 40), _network(0.35, 8.4, 14)),
    # Ports of 200 Gb/s, nine tenths reached.
    "a100-40gb": SwitchFabric(8, 8, _nvlink(230, 58), _network(22.5, 8.4, 14)),
    "a100-80gb": SwitchFabric(8, 8, _nvlink(230, 58), _network(22.5, 8.4, 14)),
    "h100": SwitchFabric(8, 8, _nvlink(361, 76, 0.6), _network(22.8, 47, 37)),
    "h200": SwitchFabric(8, 8, _nvlink(361, 76, 0.6), _network(43.5, 47, 37)),
    "b200": SwitchFabric(8, 8, _nvlink(640, 82), _network(46, 42, 22)),
    # One NVLink domain is a rack of 72; a host drives 4 of them.
    "gb200": SwitchFabric(72, 4, _nvlink(640, 82), _network(46, 42, 22)),
    # 46.6 and 93.4 GB/s one way are what libtpu's own estimates imply (v4: scaling book).
    "v4": TorusFabric(3, 4096, 2, 4, 45 * _GIGA, 1, False, _data_center(25)),
    "v5e": TorusFabric(2, 256, 1, 16, 46.63 * _GIGA, 1, True, _data_center(25)),
    "v5p": TorusFabric(3, 8960, 2, 4, 93.4 * _GIGA, 1, False, _data_center(50)),
    "v6e": TorusFabric(2, 256, 1, 16, 93.4 * _GIGA, 1, False, _data_center(100)),
    "tpu7x": TorusFabric(3, 9216, 2, 4, 93.4 * _GIGA, 2, False, _data_center(100, 2)),
}


def fabric_of(chip: str) -> AbstractFabric:
    """The fabric of a chip of the catalog, by its full name."""
    return _OF_CHIPS[chip]
