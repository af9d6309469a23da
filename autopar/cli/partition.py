"""`autopar partition`: cuts a profiled model into pipeline stages, as PipeDream does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from autopar.cli.console import out, print_json
from autopar.errors import InputError
from autopar.inspecting.partition import (
    Level,
    Partition,
    PipelineStage,
    Sync,
    bytes_per_ms,
    partition,
    read_level,
)
from autopar.ir.codec import Json
from autopar.ir.profile import Chain, Profile
from autopar.ir.profile_file import load_profile
from autopar.report.style import ACCENT, BAD, QUIET, facts
from autopar.report.table import Cell, Table

_MOST_WORKERS = 4096


def partition_profile(
    profile_path: str,
    workers: int | None,
    bandwidth: str | None,
    levels: str | None,
    sync: Sync,
    as_json: bool,
) -> None:
    """Print the stages of a profiled model and their replicas."""
    wanted = _levels(workers, bandwidth, levels)
    profile = load_profile(profile_path)
    chain = profile.chain()
    found = partition(chain, wanted, sync)
    if as_json:
        print_json(_data(profile, chain, found))
        return
    console = out()
    console.print(_headline(profile, chain, found, wanted))
    console.print()
    console.print(_table(chain, found))


def _levels(workers: int | None, bandwidth: str | None, levels: str | None) -> list[Level]:
    """The levels that the options describe, innermost first."""
    if levels is not None:
        if workers is not None or bandwidth is not None:
            raise InputError("--levels says it all: leave out --workers and --bandwidth")
        found = [read_level(part) for part in levels.split(",")]
    elif workers is None or bandwidth is None:
        missing = "--workers" if workers is None else "--bandwidth"
        raise InputError(
            f"{missing} is missing: give --workers 8 --bandwidth 10Gbit/s, or for a cluster of "
            "servers --levels 4x100Gbit/s,8x10Gbit/s"
        )
    else:
        found = [Level(workers, bytes_per_ms(bandwidth))]
    for level in found:
        level.verify()
        if level.count > _MOST_WORKERS:
            raise InputError(
                f"{level.count} workers on one level are more than {_MOST_WORKERS}: group them in "
                "servers, as --levels 8x600GB/s,128x25GB/s"
            )
    return found


def _data(profile: Profile, chain: Chain, found: Partition) -> dict[str, Json]:
    return {
        "model": profile.model,
        "workers": found.workers,
        "sync": found.sync,
        "first_layer": 1,
        "layers": len(chain.layers),
        "bottleneck_ms": found.bottleneck_ms,
        "one_worker_ms": chain.compute_ms,
        "stages": [_stage_data(stage) for stage in found.stages],
    }


def _stage_data(stage: PipelineStage) -> dict[str, Json]:
    return {
        "first": stage.first,
        "last": stage.last,
        "replicas": stage.replicas,
        "compute_ms": stage.compute_ms,
        "sync_ms": stage.sync_ms,
        "transfer_ms": stage.transfer_ms,
        "in_flight": stage.in_flight,
        **({"stages": [_stage_data(s) for s in stage.stages]} if stage.stages else {}),
    }


def _headline(
    profile: Profile, chain: Chain, found: Partition, levels: Sequence[Level]
) -> RenderableType:
    alone, bottleneck = chain.compute_ms, found.bottleneck_ms
    faster = f", {alone / bottleneck:.2f} times as fast" if bottleneck > 0 else ""
    # As `4 at 12.5 GB/s, in each of 8 at 1.25 GB/s`.
    workers = (f"{level.count} at {level.bytes_per_ms / 1e6:.4g} GB/s" for level in levels)
    return facts(
        [
            ("model", Text(f"{profile.model or '(no name)'}, {len(chain.layers)} layers")),
            ("workers", Text(", in each of ".join(workers))),
            ("sync", found.sync),
            ("one worker", f"{alone:.3f} ms a minibatch"),
            ("bottleneck", Text.assemble(
                (f"{bottleneck:.3f} ms", f"bold {ACCENT}"),
                f" between minibatches, {_reason(found)}{faster}",
            )),
        ]
    )  # fmt: skip


def _reason(found: Partition) -> str:
    """The part that everything waits for, as `compute of stage 0`."""
    for i, stage in enumerate(found.stages):
        kinds = (
            ("compute of", stage.compute_ms),
            ("sync of", stage.sync_ms),
            ("transfer behind", stage.transfer_ms),
        )
        for kind, ms in kinds:
            if ms == found.bottleneck_ms:
                return f"{kind} stage {i}"
    raise AssertionError("the bottleneck is one of these times")


def _table(chain: Chain, found: Partition) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, stage, is_outer in _numbered(found.stages):
        slowest = found.bottleneck_ms if is_outer else None
        first, last = chain.layers[stage.first - 1].name, chain.layers[stage.last - 1].name
        names = first if stage.first == stage.last else f"{first} .. {last}"
        # The time that everything waits for stands out.
        times = (
            Text(f"{ms:.3f}", style=f"bold {BAD}" if ms == slowest and ms > 0 else "")
            for ms in (stage.compute_ms, stage.sync_ms, stage.transfer_ms)
        )
        cells: tuple[str | Text, ...] = (
            name, f"{stage.first}..{stage.last}", names, str(stage.replicas), *times,
            str(stage.in_flight),
        )  # fmt: skip
        style = "" if is_outer else QUIET
        rows.append(tuple(c if isinstance(c, Text) else Text(c, style=style) for c in cells))
    columns = (
        "#", "layers", "names", ">replicas", ">compute", ">sync", ">transfer", ">in flight"
    )  # fmt: skip
    return Table("Stages, ms per minibatch", columns, rows, lead=3)


def _numbered(
    stages: Sequence[PipelineStage], outer: str = ""
) -> Iterator[tuple[str, PipelineStage, bool]]:
    """Stages with their numbers, each before those within it: 0, 0.0, 0.1, 1."""
    for i, stage in enumerate(stages):
        yield f"{outer}{i}", stage, not outer
        yield from _numbered(stage.stages, f"{outer}{i}.")
