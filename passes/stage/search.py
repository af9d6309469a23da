"""The joint search: stages, submeshes, logical meshes, microbatches, schedule and recomputation."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cluster.submesh import submesh_families
from autopar.errors import InfeasibleError, MemoryLimitError
from autopar.ir.text import show_bytes, show_seconds
from autopar.passes.stage.dynamic import Part, least_memory
from autopar.passes.stage.prices import Choice, Ranked, StageTable, Wanted
from autopar.passes.stage.ranges import Ranges, read_ranges
from autopar.passes.stage.rank import Ranking
from autopar.passes.stage.seeds import Family, Space, chunk_seeds, flat_seeds, groups, one_stage
from autopar.schedule.table import SCHEDULES

# So many runners-up are told of.
_OTHERS = 8


def search(table: StageTable, wanted: Wanted = Wanted()) -> Ranked:
    """The choice that a simulation finds fastest of the best that the formula found.

    Raises MemoryLimitError where nothing fits the devices, with the least that any stages need;
    InfeasibleError where what is wanted cannot be made of these layers, devices or schedules.
    """
    table.verify()
    space = _space(table, wanted)
    ranking = Ranking(space)
    ranking.run(one_stage(space), (*flat_seeds(space), *chunk_seeds(space)))
    if not ranking.choices:
        raise _nothing(space, ranking)
    best, *others = ranking.ranked()
    sentence = _sentence(best, others, len(ranking.choices))
    return Ranked(best, tuple(others[:_OTHERS]), len(ranking.choices), sentence)


def _space(table: StageTable, wanted: Wanted) -> Space:
    """What is wanted of the table; refuses what the table cannot give."""
    batches = [b for b in table.batches if wanted.microbatches in (None, b.microbatches)]
    if not batches:
        priced = ", ".join(str(b.microbatches) for b in table.batches)
        raise InfeasibleError(
            f"{wanted.microbatches} microbatches cannot be had; this batch goes into {priced}"
        )
    schedules = tuple(s for s in SCHEDULES if s in table.schedules and wanted.schedule in (None, s))
    if not schedules:
        raise InfeasibleError(
            f"schedule {wanted.schedule!r} cannot run this step; it allows "
            f"{', '.join(table.schedules)}"
        )
    families = _families(table)
    if wanted.stages:
        _check_stages(table, families, wanted.stages)
    ranges = tuple(read_ranges(table, batch) for batch in batches)
    return Space(table, ranges, families, schedules, wanted.stages)


def _families(table: StageTable) -> tuple[Family, ...]:
    """The cluster's families, of the submeshes that the table prices."""
    number = {submesh: u for u, submesh in enumerate(table.submeshes)}
    found = (
        {number[s]: s.device_count for s in family if s in number}
        for family in submesh_families(table.cluster)
    )
    return tuple(family for family in found if family)


def _check_stages(table: StageTable, families: Sequence[Family], stages: int) -> None:
    pieces = table.layer_count - len(set(table.joined))
    every = table.cluster.device_count
    if stages > pieces:
        joined = f" ({pieces} that can be parted)" if pieces < table.layer_count else ""
        raise InfeasibleError(
            f"{stages} stages need as many layers, and there are {table.layer_count}{joined}; "
            f"ask for at most {pieces} stages, or for more layers"
        )
    counts = sorted(set[int]().union(*(_stage_counts(family, every) for family in families)))
    if stages not in counts:
        blocks = "; ".join(
            ", ".join(str(table.submeshes[submesh]) for submesh in family) for family in families
        )
        raise InfeasibleError(
            f"the {every} devices of {table.cluster.name} do not make {stages} stages of {blocks}; "
            f"possible are {', '.join(map(str, counts))} stages"
        )


def _stage_counts(family: Family, every: int) -> set[int]:
    """How many submeshes can add up to all devices."""
    counts: list[set[int]] = [{0}, *(set[int]() for _ in range(every))]
    for total in range(1, every + 1):
        for devices in family.values():
            if devices <= total:
                counts[total] |= {count + 1 for count in counts[total - devices]}
    return counts[every]


def _nothing(space: Space, ranking: Ranking) -> InfeasibleError:
    """Why no candidate is left."""
    limit = space.table.memory_bytes
    least = _least_memory(space)
    if least and least[0] > limit:
        return MemoryLimitError(
            f"no stages fit the {show_bytes(limit)} of a device: the least that any need is "
            f"{show_bytes(least[0])}. {least[1]} Use more microbatches, more devices, or let "
            "forwards be recomputed"
        )
    if ranking.least_bytes < float("inf"):
        return MemoryLimitError(
            f"no stages fit the {show_bytes(limit)} of a device under "
            f"{' or '.join(space.schedules)}: the leanest that were tried need "
            f"{show_bytes(ranking.least_bytes)}. Allow a schedule that keeps fewer, as 1f1b"
        )
    if ranking.refusals:
        return InfeasibleError(ranking.refusals[0])
    chunked = space.chunked and not space.flat
    why = "with two stages on each of some equal submeshes" if chunked else "of priced submeshes"
    return InfeasibleError(
        f"no stages can be made {why} of {space.table.cluster.name} from "
        f"{space.table.layer_count} layers; ask for fewer stages or another schedule"
    )


def _least_memory(space: Space) -> tuple[int, str] | None:
    """The least bytes that the leanest schedule needs on some device, and what needs them."""
    least: tuple[int, str] | None = None
    for ranges in space.batches:
        most = 1 + int(ranges.bytes_at(ranges.microbatches).max())
        for group in groups(space.flat, ranges.microbatches, space.most_stages):
            for family in space.families:
                below = least[0] if least else most
                found = least_memory(ranges, family, group.flights, below, space.stages)
                if found:
                    nbytes, parts = found
                    least = nbytes, _binding(space, ranges, parts, group.flights)
    return least


def _binding(space: Space, ranges: Ranges, parts: Sequence[Part], flights: Sequence[int]) -> str:
    """Which stage needs the most, and of what."""
    stages = len(parts)

    def needed(s: int) -> int:
        part = parts[s]
        at = part.option, part.first, part.last
        return int(ranges.bytes_at(flights[stages - 1 - s])[at])

    s = max(range(stages), key=needed)
    part = parts[s]
    at = part.option, part.first, part.last
    option = ranges.options[part.option]
    submesh = space.table.submeshes[int(ranges.submesh[part.option])]
    again = ", forwards recomputed" if option.recompute else ""
    return (
        f"So stage {s} of {stages}, layers {part.first} to {part.last} on {submesh} "
        f"({option.mesh}{again}) with {ranges.microbatches} microbatches: "
        f"{show_bytes(int(ranges.fixed[at]))} throughout, {flights[stages - 1 - s]} in flight "
        f"of {show_bytes(int(ranges.activation[at]))}, and {show_bytes(int(ranges.working[at]))} "
        "to work in."
    )


def _sentence(best: Choice, others: Sequence[Choice], examined: int) -> str:
    """What was found, and the best of the other kind: a pipeline, or one stage."""
    alone = best.devices == 1
    rivals = [choice for choice in others if (choice.devices == 1) is not alone]
    rival = f"; {_told(rivals[0])}" if rivals else ""
    return f"{_told(best)}, the best of {examined} that were simulated{rival}."


def _told(choice: Choice) -> str:
    seconds = show_seconds(choice.seconds)
    if choice.devices == 1:
        return f"one stage with {choice.microbatches} microbatches takes {seconds}"
    chunks = f" in {choice.chunks} chunks each" if choice.chunks > 1 else ""
    return (
        f"{choice.devices} stages{chunks} with {choice.microbatches} microbatches under "
        f"{choice.schedule} take {seconds}"
    )
