"""Reads drawings back: the shapes of an SVG text with their numbers."""

import re
from dataclasses import dataclass
from xml.etree import ElementTree

_SPACE = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Shape:
    """An element: its name, its class, its numbers, and what it says or hovers."""

    name: str
    css: str
    x: float
    y: float
    width: float
    height: float
    d: str
    words: str
    title: str


def read(svg: str) -> list[Shape]:
    """Every shape of a drawing in order; fails where the text is not ASCII or not well formed."""
    assert svg.isascii()
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label")
    return [
        _shape(e) for e in root.iter() if e.tag.removeprefix(_SPACE) in ("rect", "path", "text")
    ]


def titled(svg: str, words: str) -> list[Shape]:
    """The shapes whose title has some words."""
    return [shape for shape in read(svg) if words in shape.title]


def said(svg: str) -> list[str]:
    """Every line of text."""
    return [shape.words for shape in read(svg) if shape.name == "text"]


def element_count(svg: str) -> int:
    """How many elements there are, titles included."""
    return len(list(ElementTree.fromstring(svg).iter()))


def boxes(d: str) -> list[tuple[float, float, float, float]]:
    """The rectangles of a path: x, y, width, height."""
    number = r"(-?[\d.]+)"
    found = re.findall(rf"M{number} {number}h{number}v{number}h-?[\d.]+z", d)
    return [(float(x), float(y), float(w), float(h)) for x, y, w, h in found]


def _shape(element: ElementTree.Element) -> Shape:
    title = element.find(f"{_SPACE}title")
    x, y, width, height = (float(element.get(k, 0)) for k in ("x", "y", "width", "height"))
    words = "" if title is not None else "".join(element.itertext())
    return Shape(
        element.tag.removeprefix(_SPACE), element.get("class", ""), x, y, width, height,
        element.get("d", ""), words, (title.text or "") if title is not None else "",
    )  # fmt: skip
