"""Puts what was predicted of a program beside what a compiler made of it, and judges.

A planned collective is matched with a compiled tensor by kind, axes, dtype and bytes; among equals
by the value's name, the user's line and how often they run. What is left over is matched by fewer
of these, and is then a difference: moved in another dtype, as another kind, over other axes. What
is left after that was dropped by the compiler, or added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from autopar.ir.compiled import CheckLevel, Compiled, CompiledCollective
from autopar.ir.listing import REDUCTIONS, Collective, Move, kind_order
from autopar.ir.text import columns, show_bytes
from autopar.ir.values import Value, item_bytes
from autopar.ir.verification import CompiledPart, Figure, Unit
from autopar.verifying.programs import PlannedProgram

# As what else a compiler may do a kind of collective; it then sends other bytes for the same end.
_BECOMES = {
    "all-reduce": ("reduce-scatter", "all-gather"),
    "reduce-scatter": ("all-reduce", "all-to-all"),
    "all-gather": ("all-reduce", "all-to-all", "collective-permute"),
    "all-to-all": ("all-gather", "collective-permute"),
    "collective-permute": ("all-gather", "all-to-all", "all-reduce"),
}


class Change(Enum):
    """The way in which the compiler departed from a plan."""

    LOOP = "loop"  # the same bytes in more or fewer runs: moved across the edge of a loop
    DTYPE = "dtype"  # a convert was moved across the collective
    KIND = "kind"
    AXES = "axes"
    BYTES = "bytes"  # the same line sends more or less: padded, or cut up otherwise
    MERGED = "merged"  # an equal one is compiled, but not as often as planned
    DROPPED = "dropped"
    AGAIN = "again"  # an equal one is planned, but not as often as compiled
    ADDED = "added"


@dataclass(frozen=True)
class PlannedCollective:
    """A collective of a plan with what it moves and for whom, `runs` times a step."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    nbytes: int
    runs: int
    value: Value
    region: str
    line: str

    @classmethod
    def of(cls, move: Move, collective: Collective) -> PlannedCollective:
        """The collective of a move, as `Listing.collectives` lists them."""
        return cls(
            collective.kind, collective.axes, move.value.dtype, collective.nbytes,
            collective.runs, move.value, move.region, move.line,
        )  # fmt: skip

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.region, self.line) if part)
        return f"{_what(self)} of {self.value} ({where})"


@dataclass(frozen=True)
class Difference:
    """A collective that is planned otherwise than compiled, in `runs` of its runs.

    One of `planned` and `compiled` is None where the compiler dropped or added it.
    """

    change: Change
    planned: PlannedCollective | None
    compiled: CompiledCollective | None
    runs: int

    @property
    def nbytes(self) -> int:
        """The bytes that it is about, of all its runs."""
        return self.runs * max(c.nbytes for c in (self.planned, self.compiled) if c)

    def __str__(self) -> str:
        planned, compiled = self.planned, self.compiled
        if planned and compiled:
            return f"{planned}: {_otherwise(self.change, planned, compiled)}{_at(compiled)}"
        if planned:
            return f"{planned}: {_missing(self.change, planned, self.runs)}"
        more = "more often than planned" if self.change is Change.AGAIN else "not planned"
        return f"{_what(compiled)}, {_times(self.runs)}: {more}{_at(compiled)}" if compiled else ""


@dataclass(frozen=True)
class Row:
    """Collectives of one kind over the same axes: bytes of a device and a step."""

    kind: str
    axes: tuple[str, ...]
    planned_bytes: int
    compiled_bytes: int

    @property
    def ratio(self) -> float | None:
        """Compiled over planned; None where none was planned."""
        return self.compiled_bytes / self.planned_bytes if self.planned_bytes else None


@dataclass(frozen=True)
class Realised:
    """A plan's collectives beside a compiler's: the rows in a fixed order, most bytes first."""

    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        cells = [("collective", "over", "planned", "compiled", "ratio")]
        cells += [
            (
                row.kind,
                " + ".join(row.axes) or "no axes",
                show_bytes(row.planned_bytes),
                show_bytes(row.compiled_bytes),
                "new" if row.ratio is None else f"{row.ratio:.3f}",
            )
            for row in self.rows
        ]
        return "\n".join([*columns(cells), *map(str, self.differences)])


def compare_collectives(
    planned: Iterable[tuple[Move, Collective]], compiled: Iterable[CompiledCollective]
) -> Realised:
    """The comparison of `Listing.collectives()` with what `compiled_collectives` read."""
    plans = [PlannedCollective.of(move, collective) for move, collective in planned]
    found = list(compiled)
    differences = sorted(_Matching(plans, found).differences(), key=lambda d: -d.nbytes)
    return Realised(tuple(_rows(plans, found)), tuple(differences))


def _rows(
    planned: Iterable[PlannedCollective], compiled: Iterable[CompiledCollective]
) -> Iterator[Row]:
    mine, theirs = Counter[tuple[str, tuple[str, ...]]](), Counter[tuple[str, tuple[str, ...]]]()
    for p in planned:
        mine[p.kind, _sorted(p.axes)] += p.nbytes * p.runs
    for c in compiled:
        theirs[c.kind, _sorted(c.axes)] += c.nbytes * c.runs
    for kind, axes in sorted({*mine, *theirs}, key=kind_order):
        yield Row(kind, axes, mine[kind, axes], theirs[kind, axes])


# -- matching ------------------------------------------------------------------------------------

_Either = PlannedCollective | CompiledCollective
_Key = Callable[[_Either], Hashable]


def _exactly(c: _Either) -> Hashable:
    return c.kind, _sorted(c.axes), c.dtype, c.nbytes


def _of_value(key: _Key) -> _Key:
    return lambda c: (key(c), _name(c))


def _of_line(key: _Key) -> _Key:
    return lambda c: (key(c), c.line.rsplit("/", 1)[-1])  # without folders


def _anywhere(key: _Key) -> _Key:
    return key


def _as_often(key: _Key) -> _Key:
    return lambda c: (key(c), c.runs)


_CHANGED: tuple[tuple[Change, _Key], ...] = (
    (Change.DTYPE, lambda c: (c.kind, _sorted(c.axes), _items(c))),
    (Change.KIND, lambda c: (_sorted(c.axes), _items(c))),
    (Change.AXES, lambda c: (c.kind, c.dtype, c.nbytes)),
)
# Each stage pairs what no earlier one did.
_STAGES: tuple[tuple[Change | None, _Key], ...] = (
    *((None, _as_often(where(_exactly))) for where in (_of_value, _of_line)),
    *((None, where(_exactly)) for where in (_of_value, _of_line, _as_often)),
    (None, _exactly),
    (Change.LOOP, lambda c: (c.kind, _sorted(c.axes), c.dtype, c.nbytes * c.runs)),
    *(
        (change, where(key))
        for where in (_of_value, _of_line, _anywhere)
        for change, key in _CHANGED
    ),
    (Change.BYTES, _of_value(lambda c: (c.kind, _sorted(c.axes)))),
    (Change.BYTES, _of_line(lambda c: (c.kind, _sorted(c.axes)))),
)


@dataclass
class _Matching:
    """Planned and compiled collectives, each with the runs that are not matched yet."""

    planned: list[PlannedCollective]
    compiled: list[CompiledCollective]

    def __post_init__(self) -> None:
        self._open_planned = [p.runs for p in self.planned]
        self._open_compiled = [c.runs for c in self.compiled]

    def differences(self) -> Iterator[Difference]:
        """The differences; runs that differ in nothing are passed over."""
        for change, key in _STAGES:
            for at, other, runs in self._pairs(key, change):
                if change is not None:
                    yield Difference(change, self.planned[at], self.compiled[other], runs)
        theirs, mine = set(map(_exactly, self.compiled)), set(map(_exactly, self.planned))
        for p, runs in zip(self.planned, self._open_planned, strict=True):
            if runs:
                change = Change.MERGED if _exactly(p) in theirs else Change.DROPPED
                yield Difference(change, p, None, runs)
        for c, runs in zip(self.compiled, self._open_compiled, strict=True):
            if runs:
                yield Difference(
                    Change.AGAIN if _exactly(c) in mine else Change.ADDED, None, c, runs
                )

    def _pairs(self, key: _Key, change: Change | None) -> Iterator[tuple[int, int, int]]:
        """Places of what is alike by a key, in order, and how many runs of both that is."""
        alike: dict[Hashable, list[int]] = {}
        for other, c in enumerate(self.compiled):
            if self._open_compiled[other]:
                alike.setdefault(key(c), []).append(other)
        for at, p in enumerate(self.planned):
            for other in alike.get(key(p), ()) if self._open_planned[at] else ():
                if _may_be(p, self.compiled[other], change) and (
                    runs := self._take(at, other, change)
                ):
                    yield at, other, runs

    def _take(self, at: int, other: int, change: Change | None) -> int:
        """Match as many runs of both as are open, and say how many."""
        mine, theirs = self._open_planned[at], self._open_compiled[other]
        if change is Change.LOOP:  # all of both, or nothing: their runs are of other sizes
            whole = mine == self.planned[at].runs and theirs == self.compiled[other].runs
            if whole:
                self._open_planned[at] = self._open_compiled[other] = 0
            return mine if whole else 0
        runs = min(mine, theirs)
        self._open_planned[at] -= runs
        self._open_compiled[other] -= runs
        return runs


def _may_be(
    planned: PlannedCollective, compiled: CompiledCollective, change: Change | None
) -> bool:
    if change is Change.KIND:
        return compiled.kind in _BECOMES.get(planned.kind, ())
    # Without a line the same kind over the same axes says nothing.
    return change is not Change.BYTES or bool(compiled.line)


def _sorted(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(axes))


def _items(c: _Either) -> int:
    return c.nbytes // item_bytes(c.dtype)


def _name(c: _Either) -> str:
    """The value's name; of a compiled one it is the outermost scope, where that was kept."""
    return c.value.name if isinstance(c, PlannedCollective) else c.op.split("/", 1)[0]


# -- sentences -----------------------------------------------------------------------------------


def _what(c: _Either) -> str:
    over = f" over {' + '.join(c.axes)}" if c.axes else ""
    return f"{c.kind}{over}, {show_bytes(c.nbytes)} of {c.dtype}"


def _at(compiled: CompiledCollective) -> str:
    where = ", ".join(part for part in (compiled.op, compiled.line) if part)
    return f" [{where}]" if where else ""


def _times(runs: int) -> str:
    return "once a step" if runs == 1 else f"{runs} times a step"


def _otherwise(change: Change, planned: PlannedCollective, compiled: CompiledCollective) -> str:
    if change is Change.LOOP:
        instead = f"{show_bytes(compiled.nbytes)} {_times(compiled.runs)}"
        return f"planned {_times(planned.runs)}, compiled as {instead}"
    if change is Change.DTYPE:
        return f"compiled in {compiled.dtype}, planned in {planned.dtype}"
    if change is Change.KIND:
        told = "" if compiled.dtype == planned.dtype else f" in {compiled.dtype}"
        return f"compiled as {compiled.kind}{told}"
    if change is Change.AXES:
        over = " + ".join(compiled.axes) or "devices that are no axes of the mesh"
        return f"compiled over {over}"
    return f"compiled with {show_bytes(compiled.nbytes)} of {compiled.dtype}"


def _missing(change: Change, planned: PlannedCollective, runs: int) -> str:
    share = f"{runs} of {planned.runs} runs " if planned.runs > runs else ""
    if change is Change.DROPPED:
        return f"{share}not compiled"
    how = "added to it before it is sent" if planned.kind in REDUCTIONS else "done once for all"
    return f"{share}merged with an equal one, {how}"


BYTES_SHARE = 0.05  # by which bytes of collectives and arguments may be off
UNDER_SHARE = 0.02  # of the compiler's peak, by which a prediction may be below it
# Of a device's memory, as compilers pad small arrays, and of all that a program sends: what is less
# decides nothing.
NEGLIGIBLE_SHARE = 0.001


@dataclass(frozen=True)
class Judge:
    """The rules of agreement, for devices of so many bytes and of a platform."""

    level: CheckLevel
    platform: str
    device_bytes: int

    def part(self, program: PlannedProgram, compiled: Compiled) -> CompiledPart:
        """The figures of the level: collectives, arguments and the peak decide.

        Of a program that does not fit a TPU its compiler tells no more than that.
        """
        planned = program.collectives
        found = compare_collectives(planned or (), compiled.collectives)
        is_whole = planned is not None and (not compiled.out_of_memory or bool(compiled.hlo))
        figures = list(_traffic(found)) if is_whole else []
        if self.level is not CheckLevel.COLLECTIVES:
            figures += [*self._memory(program, compiled), *self._seconds(program, compiled)]
        return CompiledPart(
            name=program.name,
            figures=tuple(figures),
            compiled=compiled,
            device_bytes=self.device_bytes,
            differences=tuple(map(str, found.differences)) if is_whole else (),
            alike=program.alike,
        )

    def _memory(self, program: PlannedProgram, compiled: Compiled) -> Iterator[Figure]:
        mine, theirs = program.argument_bytes, compiled.argument_bytes
        if theirs:
            near = abs(mine - theirs) <= BYTES_SHARE * theirs
            yield self._held("arguments", mine, theirs, near)
        mine, theirs = program.peak_bytes, compiled.peak_bytes
        if self.platform == "cpu":
            yield Figure("peak", Unit.BYTES, mine, theirs)
        else:
            yield self._held("peak", mine, theirs, mine >= theirs * (1 - UNDER_SHARE))

    def _held(self, name: str, mine: int, theirs: int, near: bool) -> Figure:
        negligible = not near and abs(mine - theirs) <= NEGLIGIBLE_SHARE * self.device_bytes
        return Figure(name, Unit.BYTES, mine, theirs, near or negligible, negligible)

    def _seconds(self, program: PlannedProgram, compiled: Compiled) -> Iterator[Figure]:
        # XLA's GPU compiler takes about 10 us for a convolution, whatever it does: that is no time.
        if compiled.seconds is None or "__cudnn$conv" in compiled.hlo:
            return
        if self.platform == "tpu":  # kernels alone: its collectives have no cycles
            yield Figure(
                "work, collectives left out", Unit.SECONDS, program.busy_seconds, compiled.seconds
            )
            return
        yield Figure("all of it", Unit.SECONDS, program.seconds, compiled.seconds)
        if compiled.exposed_seconds is not None:
            yield Figure(
                "waiting for collectives", Unit.SECONDS, program.exposed_seconds,
                compiled.exposed_seconds,
            )  # fmt: skip


def _traffic(found: Realised) -> Iterator[Figure]:
    """Bytes by kind and axes, those of collectives that the compiler added or dropped as well.

    Of a kind of which some groups of devices are those of no axes only the sum can be compared.
    """
    unplaced = {r.kind for r in found.rows if not r.axes and r.compiled_bytes}
    planned, real = Counter[tuple[str, tuple[str, ...]]](), Counter[tuple[str, tuple[str, ...]]]()
    for row in found.rows:
        key = row.kind, () if row.kind in unplaced else row.axes
        planned[key] += row.planned_bytes
        real[key] += row.compiled_bytes
    all_bytes = max(planned.total(), real.total())
    for kind, axes in sorted({*planned, *real}, key=kind_order):
        mine, theirs = planned[kind, axes], real[kind, axes]
        where = f" over {' + '.join(axes)}" if axes else ""
        near = abs(mine - theirs) <= BYTES_SHARE * theirs
        negligible = not near and abs(mine - theirs) <= NEGLIGIBLE_SHARE * all_bytes
        yield Figure(
            f"{kind}{where}", Unit.BYTES, mine, theirs, near or negligible, negligible, kind, axes
        )
