"""Submeshes that are alike share all that is priced on one of them."""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.ir.sharding import MeshShape
from autopar.ir.stages import Submesh
from autopar.planner.placed_stages import SubmeshContexts

MESH = MeshShape.of((2, 4))


def test_submeshes_of_one_shape_and_mesh_share_their_prices() -> None:
    contexts = SubmeshContexts(Cluster.parse("2x8xh100"))
    first = contexts.of(Submesh(MESH, tuple(range(8))))
    second = contexts.of(Submesh(MESH, tuple(range(8, 16))))
    assert first.tables is second.tables
    assert first.op_shardings is second.op_shardings
    assert first.checker is second.checker
    assert first.cluster is second.cluster
    assert (first.block.start, second.block.start) == (0, 8)
    assert contexts.at(first.block.shape, MESH).tables is first.tables


def test_other_meshes_and_shapes_have_prices_of_their_own() -> None:
    contexts = SubmeshContexts(Cluster.parse("2x8xh100"))
    host = contexts.of(Submesh(MESH, tuple(range(8))))
    turned = contexts.of(Submesh(MeshShape.of((4, 2)), tuple(range(8))))
    half = contexts.of(Submesh(MeshShape.of((4,)), tuple(range(4))))
    whole = contexts.of(Submesh(MeshShape.of((2, 8))))
    tables = [host.tables, turned.tables, half.tables, whole.tables]
    assert len({id(t) for t in tables}) == 4
    assert [c.cluster.device_count for c in (host, turned, half, whole)] == [8, 8, 4, 16]
    assert whole.cluster is contexts.cluster


def test_options_are_those_of_the_prices() -> None:
    asked = (("xla_gpu_enable_pipelined_all_gather", False),)
    contexts = SubmeshContexts(Cluster.parse("8xh100"), asked)
    assert contexts.of(Submesh(MESH)).tables.prices.options == asked
