"""Every collective of a plan: what it moves for whom, how long it takes, what is waited for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.inspecting.flow import Flow
from autopar.ir.inspection import AxisRole, CommRow
from autopar.ir.paths import common_path, unnumbered
from autopar.ir.spmd import Collective, Move

Roles = Mapping[tuple[int, str], tuple[AxisRole, ...]]  # of an axis of a submesh


def comm_rows(flows: Sequence[Flow], roles: Roles) -> tuple[CommRow, ...]:
    """Every collective, those that are alike in one row, in the order in which they first run.

    Seconds are as they are timed: neighbors that run as one share what that takes by their bytes.
    """
    groups: dict[tuple[object, ...], list[CommRow]] = {}
    for flow in flows:
        for row in comms_of(flow, roles):
            spot = replace(row.spot, module=unnumbered(row.spot.module))
            moved = unnumbered(row.value), row.shape, row.dtype, row.before, row.after, row.nbytes
            key = row.kind, row.axes, row.submesh, spot, row.reader, moved
            groups.setdefault(key, []).append(row)
    return tuple(map(_folded, groups.values()))


def comms_of(flow: Flow, roles: Roles) -> Iterator[CommRow]:
    """Every collective of a listing by itself."""
    listed = flow.listed
    spent = _spent(flow)
    for move, runs in flow.steps:
        if not isinstance(move, Move):
            continue
        reader = flow.reader(move.result)
        for j, made in enumerate(move.collectives):
            seconds, exposed = spent.get((move.result, j), (0.0, 0.0))
            subject = flow.subject(move.source)
            yield CommRow(
                kind=made.kind,
                axes=made.axes,
                roles=tuple(
                    dict.fromkeys(r for a in made.axes for r in roles.get((listed.submesh, a), ()))
                ),
                submesh=listed.submesh,
                spot=flow.spot(move),
                value=subject,
                shape=move.value.shape,
                dtype=move.value.dtype,
                before=move.before,
                after=move.after,
                reader=reader.kind if reader is not None else "",
                nbytes=made.nbytes,
                runs=runs,
                seconds=seconds * listed.runs,
                exposed_seconds=exposed * listed.runs,
                members=(subject,),
            )


def _spent(flow: Flow) -> dict[tuple[str, int], tuple[float, float]]:
    """Seconds and those waited for in one run of a listing, by move and number of collective."""
    moves = {m.result: m for m, _ in flow.steps if isinstance(m, Move)}
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for _, kernel, seconds in flow.timed.spent():
        if not seconds.communication:
            continue
        parts = [
            (name, j, c) for name in kernel.makes for j, c in enumerate(moves[name].collectives)
        ]
        weights = [_weight(c, len(kernel.makes) > 1) for _, _, c in parts]
        for (name, j, _), weight in zip(parts, weights, strict=True):
            share = weight / sum(weights)
            found[name, j] = seconds.communication * share, seconds.exposed * share
    return found


def _weight(collective: Collective, is_combined: bool) -> float:
    return float(collective.nbytes) if is_combined else collective.seconds


def _folded(rows: list[CommRow]) -> CommRow:
    first = rows[0]
    members = tuple(dict.fromkeys(row.value for row in rows))
    return replace(
        first,
        spot=replace(first.spot, module=common_path([row.spot.module for row in rows])),
        value=common_path(members),
        runs=sum(row.runs for row in rows),
        seconds=sum(row.seconds for row in rows),
        exposed_seconds=sum(row.exposed_seconds for row in rows),
        members=members,
    )
