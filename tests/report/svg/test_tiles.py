"""Tensors cut up: device 0's piece, cuts, copies and sums."""

import math

import pytest

from autopar.ir.sharding import MeshShape, Sharding
from autopar.report.svg.tiles import tiles_svg
from tests.report.svg.reading import read, said, titled

MESH = MeshShape.of("data=16,x=2,y=2")


def test_the_piece_of_device_0_is_its_share_of_the_face() -> None:
    svg = tiles_svg((4096, 16384), Sharding((("data",), ("x", "y"))), MESH)
    (piece,) = titled(svg, "device 0 has 256x4096")
    face = next(s for s in read(svg) if s.css.startswith("idle"))
    assert piece.width == pytest.approx(face.width / 4, abs=0.06)
    assert piece.height == pytest.approx(face.height / 16, abs=0.06)
    assert (piece.x, piece.y) == (face.x, face.y)
    assert said(svg) == ["4096 / data 16 = 256", "16384 / x 2 y 2 = 4096"]
    (cuts,) = [s for s in read(svg) if s.name == "path"]
    assert cuts.d.count("l") == 15 + 3


def test_a_longer_dim_is_drawn_longer() -> None:
    wide, tall, even = (
        next(
            s for s in read(tiles_svg(shape, Sharding(((), ())), MESH)) if s.css.startswith("idle")
        )
        for shape in ((256, 1024), (1024, 256), (512, 512))
    )
    assert wide.width == pytest.approx(2 * wide.height, abs=0.1)
    assert (tall.width, tall.height) == (wide.height, wide.width)
    assert even.width == even.height


def test_leading_dims_are_sheets_of_which_device_0_has_its_part() -> None:
    layers = (24, 2048, 8192)
    whole = tiles_svg(layers, Sharding(((), ("data",), ("x",))), MESH)
    assert len(titled(whole, "device 0 has 24x128x4096")) == 5
    cut = tiles_svg(layers, Sharding((("data",), (), ())), MeshShape.of("data=4"))
    assert len(titled(cut, "device 0 has 6x2048x8192")) == 2
    assert said(cut) == ["24 / data 4 = 6", "2048 whole", "8192 whole"]


def test_copies_are_counted_and_partial_sums_hatched() -> None:
    svg = tiles_svg((256, 1024), Sharding(((), ()), ("data",)), MESH)
    assert said(svg)[2:] == ["4 copies over x y", "to be summed over data"]
    (piece,) = titled(svg, "device 0")
    hatch = next(s for s in read(svg) if s.name == "path")
    assert hatch.d.count("M") == math.ceil((piece.width + piece.height) / 5) - 1
    assert len([s for s in read(tiles_svg((8,), Sharding(((),)), MESH)) if s.name == "path"]) == 1


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 5, 7)])
def test_any_rank_is_drawn(shape: tuple[int, ...]) -> None:
    svg = tiles_svg(shape, Sharding(((),) * len(shape)), MESH)
    assert said(svg)[-1] == "64 copies over data x y"
    assert titled(svg, f"device 0 has {'x'.join(map(str, shape)) or 'the scalar'}")
