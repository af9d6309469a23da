"""The mesh axes of a plan for a terminal: what each is used for, and what shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from autopar.ir.inspection import AxisRole, AxisUse
from autopar.ir.plan import Plan
from autopar.ir.sharding import Sharding
from autopar.ir.values import Role
from autopar.report.listing import Cell, Listing
from autopar.report.style import QUIET
from autopar.report.view import numbers_text

Roles = Mapping[tuple[int, str], tuple[AxisRole, ...]]

_OF_STATE = (AxisRole.FSDP, AxisRole.TENSOR, AxisRole.EXPERT)
_OF_BATCH = (AxisRole.DATA, AxisRole.SEQUENCE)


def axes(uses: Sequence[AxisUse], plan: Plan | None = None) -> Listing:
    """Every axis with its size and roles; axes of several submeshes that are used alike are one."""
    alike: dict[tuple[str, int, tuple[AxisRole, ...]], list[AxisUse]] = {}
    for use in uses:
        alike.setdefault((use.axis, use.size, use.roles), []).append(use)
    cut = plan is not None and len(plan.submeshes) > 1
    rows: list[tuple[Cell, ...]] = [_row(group, cut) for group in alike.values()]
    if plan is not None and cut:
        count = len(plan.submeshes)
        note = f"{len(plan.stages)} stages run on {count} submeshes."
        row = ("stage", str(count), "stage", f"mesh0..{count - 1}", Text(note, style=QUIET))
        rows.insert(0, row)
    columns = ("axis", ">size", "roles", "mesh", "what shows it")
    return Listing("Mesh axes and what they are used for", columns, rows, lead=4)


def _row(group: list[AxisUse], cut: bool) -> tuple[Cell, ...]:
    first = group[0]
    same = all(use.evidence == first.evidence for use in group)
    where = "" if same else f"mesh{first.submesh}: "
    evidence = Text(where + " ".join(first.evidence), style=QUIET)
    meshes = f"mesh{numbers_text([use.submesh for use in group])}" if cut else ""
    return (first.axis, str(first.size), roles_text(first.roles), meshes, evidence)


def roles_of(uses: Sequence[AxisUse]) -> Roles:
    """(submesh, axis) -> roles."""
    return {(use.submesh, use.axis): use.roles for use in uses}


def roles_text(roles: Sequence[AxisRole]) -> str:
    """Roles as words."""
    return ", ".join(role.value for role in roles)


def axis_roles(sharding: Sharding, role: str, submesh: int, roles: Roles) -> str:
    """What the axes that an argument lies over are used for: of their roles those that fit it."""
    fitting = _OF_BATCH if role == Role.BATCH.value else _OF_STATE
    found: dict[str, None] = {}
    for axis in sharding.axes():
        all_of = roles.get((submesh, axis), ())
        found.update(dict.fromkeys(r.value for r in [r for r in all_of if r in fitting] or all_of))
    return ", ".join(found)
