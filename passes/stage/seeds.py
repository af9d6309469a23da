"""Where candidates come from: the dynamic program's frontiers, and even cuts into chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.passes.stage.candidates import Candidate, chunks_of
from autopar.passes.stage.chunks import even_chunks
from autopar.passes.stage.dynamic import Field, Pace, Part, find_frontier, time_field, trace_back
from autopar.passes.stage.prices import StageTable
from autopar.passes.stage.ranges import Ints, Ranges
from autopar.schedule.table import SCHEDULES, Bubble, device_order, in_flight

# The devices of submeshes, by number, that tile the cluster in any mixture.
Family = Mapping[int, int]


@dataclass(frozen=True, eq=False)
class Space:
    """The part of a table that is searched: what the user wants of it.

    `batches` are the ranges of each number of microbatches; `stages` is None for any number.
    """

    table: StageTable
    batches: tuple[Ranges, ...]
    families: tuple[Family, ...]
    schedules: tuple[str, ...]
    stages: int | None

    @property
    def flat(self) -> tuple[str, ...]:
        """The schedules with one stage on a device."""
        return tuple(s for s in self.schedules if chunks_of(s) == 1)

    @property
    def chunked(self) -> tuple[str, ...]:
        """The schedules with more."""
        return tuple(s for s in self.schedules if chunks_of(s) > 1)

    @property
    def most_stages(self) -> int:
        """The most stages of a flat schedule."""
        pieces = self.table.layer_count - len(set(self.table.joined))
        return self.stages or min(pieces, self.table.cluster.device_count)


@dataclass(frozen=True, eq=False)
class FlatSeed:
    """A number of stages at the threshold that is best for it.

    `schedules` are those that the formula does not tell apart.
    """

    space: Space
    schedules: tuple[str, ...]
    field: Field
    ranges: Ranges
    family: int
    devices: int
    threshold: float
    formula_seconds: float

    @property
    def microbatches(self) -> int:
        """m, microbatches of a step."""
        return self.ranges.microbatches

    def candidates(self) -> Iterator[Candidate]:
        """Its stages under each of its schedules."""
        parts = trace_back(self.field, self.devices, self.threshold)
        for schedule in self.schedules:
            yield Candidate(self.space.table, self.ranges, self.family, parts, schedule, False)


@dataclass(frozen=True, eq=False)
class ChunkSeed:
    """Equal submeshes under one logical mesh, for one schedule of several chunks."""

    space: Space
    ranges: Ranges
    family: int
    devices: int
    options: tuple[int, ...]
    schedule: str

    @property
    def microbatches(self) -> int:
        """m, microbatches of a step."""
        return self.ranges.microbatches

    @property
    def formula_seconds(self) -> float:
        """If the layers could be cut so that all devices take the same, and there were no gaps."""
        whole = self.ranges.seconds[list(self.options), 0, -1].min()
        return self.microbatches * float(whole) / self.devices

    def candidates(self) -> Iterator[Candidate]:
        """Its most even chunks, as if memory were plentiful."""
        count = self.devices * chunks_of(self.schedule)
        parts = even_chunks(self.ranges, self.options, count)
        if parts:
            yield Candidate(self.space.table, self.ranges, self.family, parts, self.schedule, False)


Seed = FlatSeed | ChunkSeed


@dataclass(frozen=True)
class Group:
    """Flat schedules that the formula does not tell apart.

    `flights` are the microbatches in flight s = 1.. stages before the end, `windows` those on the
    first of s stages in all.
    """

    schedules: tuple[str, ...]
    bubble: Bubble
    flights: tuple[int, ...]
    windows: tuple[int, ...]


def groups(schedules: Sequence[str], microbatches: int, most: int) -> tuple[Group, ...]:
    """The schedules, those together that have in flight as many of `microbatches`.

    A count that depends on how many stages come before is the least over them, so that nothing is
    left out that may fit.
    """
    found: dict[tuple[Bubble, tuple[int, ...], tuple[int, ...]], tuple[str, ...]] = {}
    for name in schedules:
        counts = [in_flight(name, stages, microbatches, 1) for stages in range(1, most + 1)]
        flights = tuple(
            min(row[len(row) - s] for row in counts[s - 1 :]) for s in range(1, most + 1)
        )
        key = SCHEDULES[name].bubble, flights, tuple(row[0] for row in counts)
        found[key] = (*found.get(key, ()), name)
    return tuple(Group(names, *key) for key, names in found.items())


def flat_seeds(space: Space) -> tuple[FlatSeed, ...]:
    """For every number of microbatches and stages, and every group of schedules, the best.

    Large numbers of microbatches come first: they soon give the bound that cuts the others short.
    """
    seeds: list[FlatSeed] = []
    cutoff = math.inf
    for ranges in sorted(space.batches, key=lambda r: -r.microbatches):
        for group in groups(space.flat, ranges.microbatches, space.most_stages):
            for f in range(len(space.families)):
                field = _field(space, ranges, f, group.flights, group.bubble)
                pace = Pace(ranges.microbatches, group.windows, group.bubble)
                found = find_frontier(field, pace, cutoff, space.stages)
                cutoff = found.cutoff
                # Where a gap is less than a stage, the slowest stage is counted with both.
                twice = np.where(group.bubble is Bubble.WHOLE, 0.0, found.threshold)
                for stages in np.flatnonzero(np.isfinite(found.seconds)).tolist():
                    threshold = float(found.threshold[stages])
                    seconds = float(found.seconds[stages] - twice[stages])
                    seeds.append(
                        FlatSeed(
                            space, group.schedules, field, ranges, f, stages, threshold, seconds
                        )
                    )
    return tuple(seeds)


def one_stage(space: Space) -> Candidate | None:
    """The best of one stage, under a schedule that keeps least; None where it is not to be had."""
    if space.stages not in (None, 1) or not space.flat:
        return None
    candidates = (
        Candidate(space.table, ranges, 0, (Part(0, ranges.layer_count - 1, o),), schedule, False)
        for ranges in space.batches
        for o, option in enumerate(ranges.options)
        if option.mesh.device_count == space.table.cluster.device_count
        for schedule in space.flat
    )
    fit = (c for c in candidates if max(c.formula_bytes) <= space.table.memory_bytes)
    return min(fit, key=lambda c: (c.formula_seconds, c.formula_bytes), default=None)


def chunk_seeds(space: Space) -> tuple[ChunkSeed, ...]:
    """For every chunked schedule, number of microbatches, submesh and logical mesh."""
    return tuple(
        ChunkSeed(space, ranges, f, every // devices, options, schedule)
        for schedule in space.chunked
        for ranges in space.batches
        for f, family in enumerate(space.families)
        for every in (space.table.cluster.device_count,)
        for submesh, devices in family.items()
        if _divides(space, every, devices, schedule)
        for options in _same_mesh(ranges, submesh)
    )


def tightened(space: Space, candidate: Candidate) -> Candidate | None:
    """The best of as many stages that fits under the candidate's own schedule; None if none does.

    Chunks each get an equal part of a device's memory, which is stricter than need be.
    """
    ranges, name = candidate.ranges, candidate.schedule
    flights = in_flight(name, candidate.devices, candidate.microbatches, candidate.chunks)
    if candidate.chunks > 1:
        first = candidate.parts[0].option
        (options,) = [o for o in _same_mesh(ranges, int(ranges.submesh[first])) if first in o]
        bears = _shared(candidate, flights)
        parts = even_chunks(ranges, options, len(candidate.parts), bears)
    else:
        count = candidate.devices
        bubble = SCHEDULES[name].bubble
        field = _field(space, ranges, candidate.family, flights[::-1], bubble)
        windows = tuple(in_flight(name, p, ranges.microbatches, 1)[0] for p in range(1, count + 1))
        pace = Pace(ranges.microbatches, windows, bubble)
        frontier = find_frontier(field, pace, math.inf, count)
        found = math.isfinite(frontier.seconds[count])
        parts = trace_back(field, count, float(frontier.threshold[count])) if found else None
    return replace(candidate, parts=parts, tight=True) if parts else None


def _shared(candidate: Candidate, flights: tuple[int, ...]) -> list[Ints]:
    """For each chunk which options fit in its part of a device."""
    ranges, chunks = candidate.ranges, candidate.chunks
    order = device_order(candidate.schedule, candidate.devices, chunks)
    spare = candidate.table.memory_bytes - ranges.working
    shares = [-(-flights[device] // chunks) for device in order]
    return [
        (chunks * (ranges.fixed + share * ranges.activation) <= spare).astype(np.int64)
        for share in shares
    ]


def _divides(space: Space, every: int, devices: int, schedule: str) -> bool:
    """Whether equal submeshes of so many devices give a wanted number of stages."""
    count = every // devices
    pieces = space.table.layer_count - len(set(space.table.joined))
    wanted = count == space.stages if space.stages else count > 1 or every == 1
    return every % devices == 0 and wanted and count * chunks_of(schedule) <= pieces


def _same_mesh(ranges: Ranges, submesh: int) -> list[tuple[int, ...]]:
    """The options of a submesh, those of one logical mesh together."""
    groups: dict[object, tuple[int, ...]] = {}
    for o in np.flatnonzero(ranges.submesh == submesh).tolist():
        mesh = ranges.options[o].mesh
        groups[mesh] = (*groups.get(mesh, ()), o)
    return list(groups.values())


def _field(
    space: Space, ranges: Ranges, family: int, flights: Sequence[int], bubble: Bubble
) -> Field:
    return time_field(ranges, space.families[family], flights, space.table.memory_bytes, bubble)
