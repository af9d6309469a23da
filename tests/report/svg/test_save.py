"""Drawings in files: SVG text, PNG pixels, and what is missing is named."""

import struct
import sys
import zlib
from functools import partial
from pathlib import Path

import pytest
import resvg_py

from autopar.errors import InputError
from autopar.report.svg import draw
from autopar.report.svg.save import png_of, save_drawing

BOX = draw.rect("c1", 10, 10, 20, 20)


def pixel(png: bytes, x: int, y: int) -> bytes:
    """Red, green, blue and alpha of a pixel, read by the PNG specification."""
    data, at = b"", 8
    width = struct.unpack(">I", png[16:20])[0]
    assert png[24:26] == b"\x08\x06"  # eight bits of each
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        data += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    raw, stride = zlib.decompress(data), 4 * width
    row = bytes(stride)
    for line in range(y + 1):
        start = line * (stride + 1)
        row = _unfiltered(raw[start], raw[start + 1 : start + 1 + stride], row)
    return row[4 * x : 4 * x + 4]


def _unfiltered(kind: int, line: bytes, above: bytes) -> bytes:
    done = bytearray(4)  # nothing is left of the first pixel
    for i, byte in enumerate(line):
        a, b, c = done[i], above[i], above[i - 4] if i >= 4 else 0
        nearest = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
        done.append((byte + (0, a, b, (a + b) // 2, nearest)[kind]) % 256)
    return bytes(done[4:])


def test_a_png_is_twice_the_drawing_in_its_light_colours() -> None:
    png = png_of(draw.svg(60, 40, "label", [BOX], standalone=True))
    assert struct.unpack(">II", png[16:24]) == (2 * 84, 2 * 64)
    assert pixel(png, 2, 2) == b"\xff\xff\xff\xff"
    assert pixel(png, 2 * (12 + 20), 2 * (12 + 20)) == b"\x00\x72\xb2\xff"


def test_letters_are_on_a_png() -> None:
    with_words, without = (
        png_of(draw.svg(60, 40, "label", parts, standalone=True))
        for parts in ([draw.text("", 5, 20, "words")], [])
    )
    assert with_words != without


def test_files_by_their_endings(tmp_path: Path) -> None:
    svg = draw.svg(60, 40, "label", [BOX], standalone=True)
    save_drawing(svg, tmp_path / "a.svg")
    save_drawing(svg, tmp_path / "a.png")
    assert (tmp_path / "a.svg").read_text() == f"{svg}\n"
    assert (tmp_path / "a.png").read_bytes() == png_of(svg)
    with pytest.raises(InputError, match=r"a\.pdf' is no name for a picture: write NAME\.svg or"):
        save_drawing(svg, tmp_path / "a.pdf")
    for name in ("a.svg", "a.png"):
        with pytest.raises(InputError, match=r"cannot write .*nowhere.*: there is no folder"):
            save_drawing(svg, tmp_path / "nowhere" / name)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(InputError, match=r"pip install 'autopar\[png\]', or write NAME\.svg"):
        png_of(draw.svg(9, 9, "label", []))


def test_missing_fonts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fontless = partial(resvg_py.svg_to_bytes, skip_system_fonts=True)
    monkeypatch.setattr(resvg_py, "svg_to_bytes", fontless)
    with pytest.raises(InputError, match="PNG needs a font, and this machine has none: install"):
        png_of(draw.svg(9, 9, "label", []))
