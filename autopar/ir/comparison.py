"""Two plans side by side: which decisions differ, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.ir.explanation import TrafficChange
from autopar.ir.sharding import Sharding, spec_text
from autopar.ir.text import show_bytes, show_seconds

_SHOWN = 8


@dataclass(frozen=True)
class Change:
    """Something that two plans say otherwise, as each says it; "" where one says nothing."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class FigureChange:
    """A prediction that differs: of a step and of one device, in "seconds" or "bytes"."""

    name: str
    unit: str
    before: float
    after: float

    @property
    def share(self) -> float | None:
        """The increase as a share of the first figure; None where that is nothing."""
        return self.after / self.before - 1 if self.before else None

    @property
    def difference(self) -> str:
        """The increase in words: "+1.2 ms, +43.5%"."""
        more = self.after - self.before
        share = f", {self.share:+.1%}" if self.share is not None else ""
        return f"{'+' if more > 0 else '-'}{self.show(abs(more))}{share}"

    def show(self, value: float) -> str:
        """A value of the figure in its unit: "1.2 ms"."""
        return show_seconds(value) if self.unit == "seconds" else show_bytes(value)

    def __str__(self) -> str:
        before, after = self.show(self.before), self.show(self.after)
        return f"{self.name}: {before} -> {after}  ({self.difference})"


@dataclass(frozen=True)
class Place:
    """The place of arguments in one plan: type, sharding and submeshes.

    `local_bytes` are of one device's pieces of one of them.
    """

    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    local_bytes: int
    submeshes: tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """Arguments that changed alike and whose paths differ in numbers only; `path` has a star there.

    A place is None in the plan that has no such argument. Axes are those of the first plan.
    """

    path: str
    count: int
    role: str
    before: Place | None
    after: Place | None

    @property
    def nbytes(self) -> int:
        """The most that a device holds of all of them, in either plan."""
        return self.count * max(p.local_bytes for p in (self.before, self.after) if p is not None)


@dataclass(frozen=True)
class Comparison:
    """The differences of one plan to another, the first being the one to compare with.

    `asked` is what the plans were made for, `made_with` by what they were made and how sure they
    are, `decisions` what they decide but for shardings, `moves` the arguments that lie otherwise.
    Of the `inner_count` values within the step that do, `inner` tells the first; they are compared
    where both plans are of the `same_graph`. The second plan's axes go by the first's names, of
    which `renamed` has those that differ: (first's, second's). `peak_kinds` are the bytes at the
    peak by kind, where it differs, the largest differences first.
    """

    step: str
    same_graph: bool
    asked: tuple[Change, ...]
    made_with: tuple[Change, ...]
    decisions: tuple[Change, ...]
    moves: tuple[Move, ...]
    inner: tuple[Change, ...]
    inner_count: int
    traffic: tuple[TrafficChange, ...]
    figures: tuple[FigureChange, ...]
    renamed: tuple[tuple[str, str], ...] = ()
    peak_kinds: tuple[FigureChange, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.is_equal:
            yield f"{self.step}: the plans are equal"
            return
        yield f"{self.step}: first plan -> second plan"
        yield from (f"  {figure}" for figure in self.figures)
        if self.peak_kinds:
            yield f"  of the memory peak: {self.peak_text}"
        for c in (*self.asked, *self.decisions, *self.made_with):
            yield f"  {c.name}: {c.before or '-'} -> {c.after or '-'}"
        for m in self.moves[:_SHOWN]:
            specs = (
                spec_text(p.sharding) if p is not None else "none" for p in (m.before, m.after)
            )
            yield f"  {m.path}: {' -> '.join(specs)}"
        if (more := len(self.moves) - _SHOWN) > 0:
            yield f"  and {more} more arguments: .moves has them all"
        for t in self.traffic:
            axes = " + ".join(t.axes)
            yield f"  {t.kind} over {axes}: {' -> '.join(map(show_seconds, t.seconds))}"
        if self.inner_count:
            yield f"  {self.inner_count} values within the step: .inner has the first"

    @property
    def peak_text(self) -> str:
        """The kinds of which a device holds more or less at the peak: "gradient +1.00 MiB"."""
        return ", ".join(f"{k.name} {k.difference.split(',')[0]}" for k in self.peak_kinds)

    @property
    def decides_alike(self) -> bool:
        """True if both plans decide the same."""
        return not (
            self.decisions or self.moves or self.inner_count or any(map(_is_resent, self.traffic))
        )

    @property
    def is_equal(self) -> bool:
        """True if nothing differs."""
        told = self.asked or self.made_with or self.traffic or self.figures
        return self.same_graph and self.decides_alike and not told

    def beyond(self, tolerance: float) -> Comparison:
        """The differences that matter wherever a step is planned again.

        That leaves out the release of JAX and the graph that it traced, how sure the solver was,
        and the cluster's figures, which speak through what they predict.
        """
        return replace(
            self,
            same_graph=True,
            made_with=(),
            traffic=tuple(
                t for t in self.traffic if _is_resent(t) or _apart(*t.seconds, tolerance)
            ),
            figures=tuple(f for f in self.figures if _apart(f.before, f.after, tolerance)),
        )


def _is_resent(change: TrafficChange) -> bool:
    """True if other bytes are sent, or as many in other collectives."""
    return change.count[0] != change.count[1] or change.nbytes[0] != change.nbytes[1]


def _apart(before: float, after: float, tolerance: float) -> bool:
    return abs(after - before) > tolerance * abs(before)
