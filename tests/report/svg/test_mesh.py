"""Clusters drawn: every device once in each panel, on its host, coloured by its coordinate."""

from collections import Counter

import pytest

from autopar.cluster import Cluster
from autopar.ir.sharding import MeshShape
from autopar.ir.stages import Submesh
from autopar.report.svg.mesh import mesh_svg
from tests.report.svg.reading import boxes, element_count, read, said, titled


def drawn(cluster: str, *meshes: Submesh) -> str:
    return mesh_svg(Cluster.parse(cluster), meshes)


def whole(mesh: str) -> Submesh:
    return Submesh(MeshShape.of(mesh))


def test_a_pod_is_drawn_plane_by_plane_once_an_axis() -> None:
    svg = drawn("v5p:4x4x4", whole("data=16,model=4"))
    cells = titled(svg, "device ")
    assert len(cells) == 2 * 64
    assert len({(c.x, c.y) for c in cells}) == 2 * 64
    assert Counter(c.title.split()[1] for c in cells) == {str(d): 2 for d in range(64)}
    # Device 5 is at x=1, y=1, z=0: one to the right of and one below device 0.
    zero, five = (titled(svg, f"device {d} ")[1] for d in (0, 5))
    assert (five.x - zero.x, five.y - zero.y) == (20, 20)
    assert five.title == "device 5 data=1, model=1"
    assert {"data = 16", "model = 4", "z=3", "over x 4 ring: 187 GB/s a device"} <= set(said(svg))


def test_gpus_are_drawn_host_by_host_on_their_network() -> None:
    svg = drawn("2x8xh100", whole("2,8"))
    assert said(svg).count("host 1") == 2
    assert "over network 2: 22.8 GB/s a device" in said(svg)
    assert "nvlink 361 GB/s a device, network 22.8 GB/s a device" in said(svg)[0]
    data = titled(svg, "device ")[:16]
    assert {c.css for c in data[:8]} == {"r0"}
    assert {c.css for c in data[8:]} == {"r15"}


def test_submeshes_have_a_panel_of_their_own_and_outlines() -> None:
    meshes = [Submesh(MeshShape.of("2,4"), tuple(range(d, d + 8))) for d in range(0, 32, 8)]
    svg = drawn("4x8xh100", *meshes)
    assert said(svg)[1] == "submeshes"
    assert Counter(c.css for c in titled(svg, "device ")[:32]) == dict.fromkeys(
        ("c1", "c2", "c3", "c4"), 8
    )
    assert titled(svg, "device 9 mesh1 data=0, model=1")
    assert "over nvlink 4: 361 GB/s a device" in said(svg)


@pytest.mark.parametrize(
    ("cluster", "mesh"),
    [
        ("v5p:16x16x16", "16,16,16"),
        ("512x8xh100", "512,8"),
        ("2xv5e:16x16", "2,256"),
        ("v5e:16x16", "64,4"),
    ],
)
def test_thousands_of_devices_are_few_shapes_that_cover_them_all(cluster: str, mesh: str) -> None:
    svg = drawn(cluster, whole(mesh))
    assert element_count(svg) <= 5_000
    assert len(svg) <= 150_000
    shades = [s for s in read(svg) if s.css.startswith("r") and s.css[1:].isdigit()]
    devices, axes = Cluster.parse(cluster).device_count, mesh.count(",") + 1
    if shades[0].name == "rect":
        assert len(shades) == axes * devices
    else:
        areas = [box for shape in shades for box in boxes(shape.d)]
        cell = min(height for *_, height in areas)
        assert sum(w * h for _, _, w, h in areas) == axes * devices * cell * cell
        assert len(set(areas)) == len(areas)


@pytest.mark.parametrize(
    "name", ["v5p:2x2x4", "tpu7x:4x4x4", "v5e:4x8", "4x8xh100", "2x72xgb200", "3xcpu"]
)
def test_hosts_on_paper_are_the_clusters_hosts(name: str) -> None:
    cluster = Cluster.parse(name)
    places = cluster.topology.layout()
    assert places.size * places.blocks == cluster.device_count
    hosts = Counter(places.host_of(device) for device in range(cluster.device_count))
    assert len(hosts) == cluster.hosts
    assert len(set(hosts.values())) == 1
