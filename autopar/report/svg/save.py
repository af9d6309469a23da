"""Drawings in files of their own: as SVG, or by resvg as PNG, which takes no browser."""

from __future__ import annotations

import re
from pathlib import Path

from autopar.errors import InputError
from autopar.ir.text_file import write_bytes, write_text
from autopar.report.svg import draw

_ZOOM = 2.0  # pixels of a PNG for each of the drawing
_VARIABLE = re.compile(r"var\(--\w+,(#\w+)\)")


def save_drawing(svg: str, path: Path) -> None:
    """Write a standalone drawing to a path that ends in .svg or .png.

    Raises InputError for other endings, where the file cannot be written, and for PNG where resvg
    or any font is missing.
    """
    if path.suffix not in (".svg", ".png"):
        raise InputError(f"{str(path)!r} is no name for a picture: write NAME.svg or NAME.png")
    if path.suffix == ".svg":
        write_text(f"{svg}\n".encode("ascii", "xmlcharrefreplace").decode(), path)
    else:
        write_bytes(png_of(svg), path)


def png_of(svg: str) -> bytes:
    """A drawing in its light colours on white as a PNG file, twice its size.

    Letters are those of the first font on the machine that the drawing's style names.
    Raises InputError where resvg or any font is missing.
    """
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise InputError(
            "PNG needs the package resvg-py: pip install 'autopar[png]', or write NAME.svg"
        ) from error
    blank, lettered = (
        svg_to_bytes(svg_string=_plain(draw.svg(20, 20, "", parts, standalone=True)))
        for parts in ([], [draw.text("", 2, 15, "F")])
    )
    if blank == lettered:
        raise InputError(
            "PNG needs a font, and this machine has none: install one (the system's package "
            "fonts-dejavu or liberation-fonts), or write NAME.svg"
        )
    return svg_to_bytes(svg_string=_plain(svg), background="#ffffff", zoom=_ZOOM)


def _plain(svg: str) -> str:
    """The drawing without CSS variables, which resvg does not know: each is its light colour."""
    return _VARIABLE.sub(r"\1", svg)
