"""The collectives of a plan: what each moves for whom, how long, how much of it is waited for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.cost.listing import Seconds
from autopar.cost.overlap import sent
from autopar.inspecting.flow import Flow
from autopar.ir.inspection import AxisRole, CommRow
from autopar.ir.paths import common_path, unnumbered
from autopar.ir.spmd import Move

Roles = Mapping[tuple[int, str], tuple[AxisRole, ...]]  # of an axis of a submesh


def comm_rows(flows: Sequence[Flow], roles: Roles) -> tuple[CommRow, ...]:
    """The collectives, those that are alike in one row, in the order in which they first run.

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
    """The collectives of a listing, each by itself."""
    listed = flow.listed
    spent = {(move.result, j): seconds for move, j, seconds in sent(flow.timed)}
    for move, runs in flow.steps:
        if not isinstance(move, Move):
            continue
        reader = flow.reader(move.result)
        for j, made in enumerate(move.collectives):
            seconds = spent.get((move.result, j), Seconds())
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
                seconds=seconds.communication * listed.runs,
                exposed_seconds=seconds.exposed * listed.runs,
                members=(subject,),
            )


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
