"""The few shapes that drawings are made of, as SVG text: colours by class, lengths in pixels.

Every colour is a CSS variable with a fallback, so that a page may set its own and a drawing alone
looks right. The hues are those of Okabe and Ito, which colour-blind readers tell apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from xml.sax.saxutils import escape

Show = Callable[[float], str]

SIZE = 11  # of letters
_PAD = 12  # pixels around a drawing that stands alone
_LETTER = 0.58  # mean width of a letter, by its size
HUES, SHADES = 8, 16  # classes c1 to c8 for what differs, r0 to r15 for what is in order
_RAMP = ((72, 36, 117), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_LIGHT = {
    "ink": "#1b2430", "quiet": "#5d6875", "paper": "#ffffff", "idle": "#e6eaee",
    "rule": "#ccd3da", "c1": "#0072b2", "c2": "#e69f00", "c3": "#009e73", "c4": "#cc79a7",
    "c5": "#56b4e9", "c6": "#d55e00", "c7": "#8a7fd1", "c8": "#8c8c8c",
}  # fmt: skip
_DARK = {
    "ink": "#e6ebf1", "quiet": "#9aa7b4", "paper": "#12171d", "idle": "#2a323b",
    "rule": "#3b4651", "c1": "#3a9bd9", "c2": "#e9ab2e", "c3": "#2bb58c", "c4": "#d98fb8",
    "c5": "#7cc6f2", "c6": "#ee7a35", "c7": "#a59bea", "c8": "#9b9b9b",
}  # fmt: skip


def _use(name: str) -> str:
    return f"var(--{name},{_LIGHT[name]})"


def _shade(i: int) -> str:
    """A colour between those of the ramp, from dark to bright."""
    at = i / (SHADES - 1) * (len(_RAMP) - 1)
    low = min(int(at), len(_RAMP) - 2)
    pairs = zip(_RAMP[low], _RAMP[low + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in pairs)


_DARK_VARIABLES = "".join(f"--{name}:{hue};" for name, hue in _DARK.items())
STYLE = "".join(
    (
        ".ap{max-width:100%;height:auto;font-family:'Helvetica Neue',Helvetica,Arial,"
        "'Liberation Sans','DejaVu Sans','Noto Sans',sans-serif;font-size:11px}",
        f".ap text{{fill:{_use('ink')}}}",
        ".ap text.small{font-size:9px}",
        f".ap .strong{{font-weight:bold;fill:{_use('ink')}}}",
        ".ap .crisp{shape-rendering:crispEdges}",
        ".ap text.end{text-anchor:end}.ap text.mid{text-anchor:middle}",
        f".ap text.on{{fill:{_use('paper')}}}.ap text.off{{fill:#14191f}}",
        ".ap text.white{fill:#ffffff}",
        f".ap .quiet{{fill:{_use('quiet')}}}",
        f".ap .idle{{fill:{_use('idle')}}}.ap .faint{{fill-opacity:.55}}",
        *(
            f".ap .c{i}{{fill:{_use(f'c{i}')}}}.ap .s{i}{{stroke:{_use(f'c{i}')};fill:none}}"
            for i in range(1, HUES + 1)
        ),
        *(f".ap .r{i}{{fill:{_shade(i)}}}" for i in range(SHADES)),
        f".ap .rule{{stroke:{_use('rule')};fill:none}}.ap .edge{{stroke:{_use('ink')}}}",
        ".ap .hollow{fill:none}.ap .thin{stroke-width:.5}",
        f".ap .gap{{stroke:{_use('paper')};stroke-width:.6}}.ap .dash{{stroke-dasharray:4 3}}",
    )
)
_ALONE = (
    f"{STYLE}.ap{{background:{_use('paper')}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_DARK_VARIABLES}}}}}"
)


def svg(
    width: float, height: float, label: str, parts: Iterable[str], standalone: bool = False
) -> str:
    """A drawing for a page that has STYLE, or `standalone` with the style inside; ASCII."""
    style, pad = (f"<style>{_ALONE}</style>", _PAD) if standalone else ("", 0)
    wide, tall = num(width + 2 * pad), num(height + 2 * pad)
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ap" role="img" width="{wide}" '
        f'height="{tall}" viewBox="{-pad} {-pad} {wide} {tall}" aria-label="{escaped(label)}">'
        f"{style}{''.join(parts)}</svg>"
    )
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def num(length: float) -> str:
    """A length to a tenth of a pixel: 3.0 -> '3'."""
    text = f"{length:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def escaped(words: str) -> str:
    """Words as they may stand in SVG, quoted or not."""
    printable = "".join(c if c.isprintable() else " " for c in words)
    return escape(printable, {'"': "&quot;"})


def rect(css: str, x: float, y: float, width: float, height: float, title: str = "") -> str:
    """A rectangle; `title` is what a reader sees who points at it."""
    box = f'x="{num(x)}" y="{num(y)}" width="{num(width)}" height="{num(height)}"'
    return _shape(f'rect class="{css}" {box}', "rect", title)


def path(css: str, d: str, title: str = "") -> str:
    """A path by its commands."""
    return _shape(f'path class="{css}" d="{d}"', "path", title)


def line(css: str, x: float, y: float, to_x: float, to_y: float) -> str:
    """A straight line."""
    return path(css, wire(x, y, to_x - x, to_y - y))


def text(css: str, x: float, y: float, words: str) -> str:
    """Words whose line is at y; classes `mid` and `end` put their middle or end at x."""
    name = f' class="{css}"' if css else ""
    return f'<text{name} x="{num(x)}" y="{num(y)}">{escaped(words)}</text>'


def line_of(css: str, x: float, y: float, parts: Iterable[tuple[str, str]]) -> str:
    """A line of text whose parts have classes of their own."""
    spans = (
        f'<tspan class="{name}">{escaped(part)}</tspan>' if name else escaped(part)
        for part, name in parts
    )
    return f'<text class="{css}" x="{num(x)}" y="{num(y)}">{"".join(spans)}</text>'


def heading(label: str, name: str) -> str:
    """The label of a drawing at its top, its name in bold."""
    rest = label.removeprefix(name).removeprefix(":").strip()
    return line_of("quiet", 0, 14, [(name, "strong"), (f" {rest}", "")])


def _shape(head: str, name: str, title: str) -> str:
    return f"<{head}><title>{escaped(title)}</title></{name}>" if title else f"<{head}/>"


def block(x: float, y: float, width: float, height: float) -> str:
    """The commands of a rectangle, for a path of many."""
    return f"M{num(x)} {num(y)}h{num(width)}v{num(height)}h{num(-width)}z"


def wire(x: float, y: float, dx: float, dy: float) -> str:
    """The commands of a line from a place on, for a path of many."""
    return f"M{num(x)} {num(y)}l{num(dx)} {num(dy)}"


def hatch(x: float, y: float, width: float, height: float, step: float = 5) -> str:
    """The commands of slanting lines that fill a rectangle."""
    lines: list[str] = []
    at = step
    while at < width + height:
        x1, y1 = (x + at, y) if at <= width else (x + width, y + at - width)
        x2, y2 = (x, y + at) if at <= height else (x + at - height, y + height)
        lines.append(wire(x1, y1, x2 - x1, y2 - y1))
        at += step
    return "".join(lines)


def steps(points: Iterable[tuple[float, float]], end: float, base: float) -> str:
    """The commands of an area whose outline goes at each x to a height above its base, to `end`."""
    commands: list[str] = []
    last = num(base)
    for x, height in points:
        if (level := num(base - height)) != last or not commands:
            commands.append(f"{'H' if commands else 'M'}{num(x)}")
            commands[-1] += f"V{level}" if len(commands) > 1 else f" {num(base)}V{level}"
            last = level
    return "".join(commands) + f"H{num(end)}V{num(base)}z" if commands else ""


def width_of(words: str, size: float = SIZE) -> float:
    """About how wide words are, in pixels."""
    return len(words) * size * _LETTER


def clipped(words: str, width: float, size: float = SIZE) -> str:
    """Words cut in their middle to about a width."""
    most = max(3, int(width / (size * _LETTER) + 1e-6))
    if len(words) <= most:
        return words
    head = (most - 1) // 2
    return f"{words[:head]}\N{HORIZONTAL ELLIPSIS}{words[head + 1 - most :]}"


@dataclass(frozen=True)
class Axis:
    """Times from `start` to `end` along some pixels from `left` on."""

    left: float
    width: float
    start: float
    end: float

    @property
    def scale(self) -> float:
        """Pixels a second."""
        return self.width / ((self.end - self.start) or 1.0)

    def at(self, time: float) -> float:
        """The x of a time."""
        return self.left + (time - self.start) * self.scale

    def ruled(self, top: float, bottom: float, show: Show) -> Iterator[str]:
        """A line at each round time, and what `show` calls it under the line."""
        for tick in ticks(self.end, 8):
            x = self.at(tick)
            yield line("rule", x, top, x, bottom)
            yield text("quiet mid", x, bottom + 14, tidy(show(tick)))


def ticks(end: float, most: int, base: int = 10) -> list[float]:
    """Round numbers from 0 to `end`, at most so many steps: 1, 2 or 5 times a power of ten.

    With base 2 they are powers of two apart, as bytes are read.
    """
    factors, least = ((1, 2, 5), -40) if base == 10 else ((1,), 0)
    rising = (factor * float(base) ** power for power in count(least) for factor in factors)
    step = next(size for size in rising if size * most >= end)
    return [i * step for i in range(int(end / step + 1e-9) + 1)]


def tidy(shown: str) -> str:
    """A figure without zeros that say nothing: '5.00 ms' -> '5 ms', '0 s' -> '0'."""
    number, _, unit = shown.partition(" ")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return f"{number} {unit}".rstrip() if number != "0" else "0"


def legend(x: float, y: float, entries: Iterable[tuple[str, str]]) -> list[str]:
    """Small boxes of classes with what they stand for, from left to right; "" is words alone."""
    parts: list[str] = []
    for css, words in entries:
        if css:
            parts.append(rect(css, x, y - 9, 10, 10))
            x += 14
        parts.append(text("quiet", x, y, words))
        x += width_of(words) + 16
    return parts
