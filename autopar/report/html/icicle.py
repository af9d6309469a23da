"""Modules as bars within bars: how wide a module is says how much of the step it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.inspection import ModuleRow
from autopar.ir.text import show_bytes, show_count
from autopar.report.html.figures import percent, seconds

_LEAST = 0.2  # per cent of the width; less cannot be seen
_DEEPEST = 5


@dataclass(frozen=True)
class Bar:
    """A module: its place in per cent of the width, its row from the top, and what to say."""

    left: float
    width: float
    depth: int
    label: str
    title: str


def icicle(modules: Sequence[ModuleRow]) -> tuple[Bar, ...]:
    """A bar for each module that can be seen, inside that of the module around it.

    As wide as all is the whole step, whose path is ""; what is in no module is left blank.
    """
    step = next((m for m in modules if not m.path), None)
    if step is None or step.seconds <= 0:
        return ()
    return tuple(_bars(_inside(modules), step, step.seconds, 0.0, 0))


def _inside(modules: Sequence[ModuleRow]) -> Mapping[str, Sequence[ModuleRow]]:
    """The modules right inside each, those that take longest first."""
    found: dict[str, list[ModuleRow]] = {}
    for module in sorted(modules, key=lambda m: (-m.seconds, m.path)):
        if module.path:
            found.setdefault(module.path.rpartition("/")[0], []).append(module)
    return found


def _bars(
    inside: Mapping[str, Sequence[ModuleRow]],
    around: ModuleRow,
    whole: float,
    left: float,
    depth: int,
) -> Iterator[Bar]:
    for module in inside.get(around.path, ()):
        if not set(module.stages) <= set(around.stages):
            continue  # that of other stages, which has the same name
        width = 100 * module.seconds / whole
        if width < _LEAST:
            return
        name = module.path.rpartition("/")[2]
        times = f" \N{MULTIPLICATION SIGN} {module.count}" if module.count > 1 else ""
        yield Bar(left, width, depth, f"{name}{times}", _title(module, width / 100))
        if depth < _DEEPEST:
            yield from _bars(inside, module, whole, left, depth + 1)
        left += width


def _title(module: ModuleRow, share: float) -> str:
    times = f"{module.count} times, " if module.count > 1 else ""
    return (
        f"{module.path}: {times}{seconds(module.seconds)} of a step ({percent(share)}), "
        f"{show_count(module.flops, 'FLOP')}, parameters {show_bytes(module.parameter_bytes)}"
    )
