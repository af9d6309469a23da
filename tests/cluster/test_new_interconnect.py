"""An interconnect in one class that nothing else names: all that asks about wiring takes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from autopar.calibrating.fitted import figures_of, with_figures
from autopar.calibrating.ladder import measured_axes
from autopar.cluster import (
    Cluster,
    Layout,
    LinkLevel,
    SwitchLevel,
    axis_links,
    catalog,
    device_order,
    names,
)
from autopar.cluster.placement import Block, cut_out, link_between, submesh_shapes
from autopar.cluster.target import Target
from autopar.cluster.topology import (
    AbstractFabric,
    AbstractTopology,
    CompilerTopology,
    DirectLink,
    Link,
    Shares,
)
from autopar.cost import collective, collective_seconds
from autopar.errors import ClusterError
from autopar.ir.devices import DeviceFacts
from autopar.ir.sharding import MeshShape
from autopar.ir.stages import Submesh
from autopar.report.clusters import cluster_data
from autopar.report.svg.mesh import mesh_svg


@dataclass(frozen=True)
class Ring(AbstractTopology):
    """Devices in a ring, all in one host."""

    kind: ClassVar[str] = "ring"

    size: int
    link_bytes_per_second: float
    closes: bool = True
    links: str = "torus"

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.size,)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return ("ring",)

    @property
    def hosts(self) -> int:
        return 1

    @property
    def switch_levels(self) -> tuple[SwitchLevel, ...]:
        return ()

    @property
    def direct_link(self) -> DirectLink | None:
        return DirectLink(self.link_bytes_per_second, 1e-6)

    @property
    def own_figures(self) -> Mapping[str, float]:
        return {"link_bytes_per_second": self.link_bytes_per_second}

    def with_figures(self, figures: Mapping[str, float], levels: Sequence[SwitchLevel]) -> Ring:
        return replace(self, link_bytes_per_second=figures["link_bytes_per_second"])

    def shares(self, sizes: Sequence[int]) -> Shares:
        return tuple((size,) for size in sizes)

    def link_level(self, axis: int, size: int, stride: int) -> LinkLevel:
        rate = self.link_bytes_per_second / stride
        wraps = self.closes and size == self.size
        return LinkLevel("ring", self.links, size, 2 * rate, rate, rate, 1e-6 * stride, 0.0, wraps)

    def block(self, extents: Sequence[int]) -> Ring:
        return replace(self, size=extents[0], closes=self.closes and extents[0] == self.size)

    def block_name(self, extents: Sequence[int]) -> str:
        return f"arc{extents[0]}"

    def between(self, distances: Sequence[int], pairs: int, wires: int) -> Link:
        return Link(distances[0] * 1e-6, wires * self.link_bytes_per_second)

    def layout(self) -> Layout:
        return Layout(self.size, 1, 1, ("ring",), (self.size, 1), (self.closes, False), True, 1)

    def compiler_topology(self, chip: str, cluster: str) -> CompilerTopology:
        return CompilerTopology(f"ring:{self.size}")

    def __str__(self) -> str:
        return f"ring of {self.size}"


@dataclass(frozen=True)
class RingFabric(AbstractFabric):
    """Devices of one ring; its clusters are called as "ring8xchip" is."""

    form: ClassVar[re.Pattern[str]] = re.compile(r"ring(\d+)x(?P<chip>[a-z]\w*)")

    def read(self, text: str, chip: str, match: re.Match[str]) -> tuple[str, Ring]:
        return match[0], Ring(int(match[1]), 1e9)

    def hint(self, chip: str) -> str:
        return f"{chip} is wired as a ring; write 'ring8x{chip}'"

    @classmethod
    def larger(cls, match: re.Match[str], factor: int) -> str:
        return f"ring{int(match[1]) * factor}x{match['chip']}"

    def local_name(self, chip: str, facts: Sequence[DeviceFacts]) -> str:
        return f"ring{len(facts)}x{chip}"


RING = Cluster("ring8", Cluster.parse("8xcpu").chip, Ring(8, 1e9))


def test_its_clusters_are_named_and_found_on_local_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = replace(Cluster.parse("v5e:2x4").chip, name="loop1")
    entry = catalog.Entry(chip, RingFabric(), ("ring8xloop1",), ("loop one",))
    monkeypatch.setattr(catalog, "ENTRIES", (*catalog.ENTRIES, entry))
    monkeypatch.setattr(names, "FABRICS", (*catalog.FABRICS, RingFabric))
    assert Cluster.parse("ring4xloop1").topology == Ring(4, 1e9)
    assert names.larger_name("ring4xloop1", 4) == "ring16xloop1"
    # It is a TPU, which is no reason to look for the coordinates of a torus.
    assert names.local_name([DeviceFacts("tpu", "Loop One", 0, 0)] * 8) == "ring8xloop1"
    with pytest.raises(ClusterError, match="wired as a ring; write 'ring8xloop1'"):
        Cluster.parse("8xloop1")


def test_meshes_lie_on_it_and_collectives_over_them_have_a_price() -> None:
    mesh = MeshShape(("data", "model"), (2, 4))
    assert sorted(device_order(RING, mesh)) == list(range(8))
    (level,) = axis_links(RING, mesh, ("model",))
    assert (level.size, level.wraps) == (4, False)
    assert collective_seconds("all-gather", 1e6, (level,)) > 0


def test_links_of_a_kind_of_their_own_are_priced_by_a_row_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optical = Cluster("ring8", RING.chip, Ring(8, 1e9, links="optical"))
    levels = axis_links(optical, MeshShape(("data",), (8,)), ("data",))
    with pytest.raises(ClusterError, match="kind 'optical' have no price; add a formula"):
        collective_seconds("all-gather", 1e6, levels)
    rate = 2.0  # bytes/s of the only formula that it has
    row = {"optical": lambda kind, nbytes, levels: nbytes / rate}
    monkeypatch.setattr(collective, "FORMULAS", {**collective.FORMULAS, **row})
    assert collective_seconds("all-gather", 1e6, levels) == 5e5


def test_blocks_of_it_are_rings_of_their_own() -> None:
    half = next(s for s in submesh_shapes(RING) if s.device_count == 4)
    assert str(half) == "arc4"
    assert cut_out(RING, half).topology == Ring(4, 1e9, closes=False)
    link = link_between(RING, Block(0, half), Block(4, half))
    assert link == Link(1e-6, 1e9)


def test_it_is_compiled_for_calibrated_reported_and_drawn() -> None:
    assert Target.of(RING).topology == "ring:8"
    assert figures_of(RING.topology) == {"link_bytes_per_second": 1e9}
    faster = with_figures(RING.topology, {"link_bytes_per_second": 2e9})
    assert faster == Ring(8, 2e9)
    assert measured_axes(RING, 2)
    assert "ring of 8" in str(RING)
    assert cluster_data(RING)
    assert "ring8" in mesh_svg(RING, [Submesh(MeshShape(("data",), (8,)), tuple(range(8)))])
