"""Arguments with what mirrors them: a parameter and the moments that an optimizer keeps of it."""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.report.rows import ArgumentRow, rows_of


def mirrored(plan: Plan) -> tuple[tuple[ArgumentRow, ...], ...]:
    """The step's arguments by row; after a parameter's row those that mirror it.

    A mirror holds tensors of the same paths and types that lie the same: opt_state/mu/x of
    params/x.
    """
    rows = rows_of(plan)
    parameters = {_key(row, suffix): row for row in rows if (suffix := suffix_of(row))}
    found: dict[ArgumentRow, list[ArgumentRow]] = {}
    for row in rows:
        keys = (_key(row, row.path.split("/", i)[-1]) for i in range(1, row.path.count("/") + 1))
        own = next((parameters[key] for key in keys if key in parameters), row)
        found.setdefault(own, [own])
        if own is not row:
            found[own].append(row)
    return tuple(map(tuple, found.values()))


def suffix_of(row: ArgumentRow) -> str:
    """The path within the tree of parameters, "" for what is none."""
    before, found, after = f"/{row.path}".partition("/params/")
    return after if found and "/" not in before.strip("/") else ""


def _key(row: ArgumentRow, path: str) -> tuple[object, ...]:
    """The part that two rows which mirror each other share."""
    return path, row.shape, row.dtype, row.sharding, row.count, row.submeshes
