"""The best plan of one program over some meshes.

every mesh without a limit  ->  it fits: the fastest
                            ->  it does not: within the limit, where that promises more
the fastest of all          ->  or a faster one beside it: what is moved longest lies otherwise,
                                a recipe, or under a limit an argument
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from autopar.errors import InfeasibleError
from autopar.passes.base import NO_LIMIT_BYTES
from autopar.planner.memory_fit import (
    MeshContext,
    MeshPlan,
    TriedMesh,
    around_arguments,
    around_moves,
    best_recipe,
    plan_on,
    try_mesh,
)
from autopar.planner.remat import Form

_NO_GAIN = 1e-9
_KEPT = 20_000_000  # prices of a step on all meshes that are kept until one is chosen
_MESHES = 8  # where memory binds, that are gone into
_NEAREST = 2  # meshes that are gone into before it is said that none has a plan


def try_meshes(contexts: Sequence[MeshContext], plain: Form) -> dict[int, TriedMesh]:
    """The plan without a limit on each mesh, by its number; pins may leave none on some."""
    tried: dict[int, TriedMesh] = {}
    kept = 0
    for n, context in enumerate(contexts):
        start = time.perf_counter()
        with suppress(InfeasibleError):
            on_mesh = try_mesh(context, plain)
            kept += on_mesh.entries
            tried[n] = on_mesh if kept <= _KEPT or len(contexts) == 1 else on_mesh.put_by()
        for watcher in context.watchers:
            text = f"{n + 1} of {len(contexts)}"
            watcher.after("mesh", text, tried.get(n), time.perf_counter() - start)
    return tried


def best_of(
    tried: Mapping[int, TriedMesh], fastest: float = math.inf
) -> tuple[MeshContext, MeshPlan] | None:
    """The fastest plan with its mesh; None where no plan is found, or none as fast.

    The recipes are told beside it.
    """
    found = _fastest_mesh(tried, fastest)
    if found is None:
        return None
    on_mesh, best = found
    if on_mesh.fits:  # where memory binds, the recipes were looked at with all else
        if not on_mesh.step.is_small:
            best = best.told(on_mesh.step, NO_LIMIT_BYTES)
        best = best_recipe(on_mesh, best, best) or best
    own = on_mesh.step.in_form(best.form)
    if not on_mesh.fits:
        best = around_arguments(own, best)
    limit = NO_LIMIT_BYTES if on_mesh.fits else on_mesh.context.request.budget_bytes
    return on_mesh.context, best.told(own, limit)


def _fastest_mesh(
    tried: Mapping[int, TriedMesh], fastest: float
) -> tuple[TriedMesh, MeshPlan] | None:
    """The mesh of the fastest plan with it; None where no plan is found, or none as fast.

    Meshes where the plan without a limit does not fit take long: they are gone into where a plan is
    known that comes near, and where they promise more than a plan that fits.
    """
    found: dict[int, MeshPlan] = {}

    def may_be_faster(seconds: float) -> bool:
        return seconds <= fastest and all(seconds < f.seconds for f in found.values())

    # 1. Where that fits: those that promise most first, and no others of a deep step that cannot be
    #    faster than these.
    roomy = [n for n, t in tried.items() if t.fits]
    for n in sorted(roomy, key=lambda n: (tried[n].roomy.seconds, n)):
        found[n] = plan_on(tried[n], min([fastest, *(f.seconds for f in found.values())]))

    # Of a mesh it is not known how little a plan may wait: the one that would be the fastest if it
    # waited for nothing is looked around, too.
    if found:
        soonest = min(found, key=lambda n: (found[n].seconds, n))
        promising = min(found, key=lambda n: (found[n].seconds - found[n].spent.exposed, n))
        for n in dict.fromkeys((soonest, promising)):
            found[n] = around_moves(tried[n].step.in_form(found[n].form), found[n])

    # 2. Nothing comes close to the limit: the meshes that come nearest have a plan, or none has.
    tight = {n: t for n, t in tried.items() if not t.fits and may_be_faster(t.least_seconds)}
    near = sorted((n for n, t in tight.items() if t.is_near), key=lambda n: tight[n].nearest_bytes)
    gone: list[int] = []
    if not found and near and not tight[near[0]].is_close:
        for n in near[:_NEAREST]:
            gone.append(n)
            with suppress(InfeasibleError):
                found[n] = plan_on(tight[n])
                break
        else:
            return None
    # 3. The most promising of the others. A single one may yet be faster by recomputing.
    others = [n for n in near if n not in gone]
    limited = {n: tight[n].limited() if len(tight) > 1 else tight[n] for n in others}
    for n in sorted(limited, key=lambda n: (limited[n].promise, n))[:_MESHES]:
        if may_be_faster(limited[n].least_seconds):
            with suppress(InfeasibleError):
                most = min([fastest, *(f.seconds for f in found.values())])
                found[n] = plan_on(limited[n], most)
    best: int | None = None
    for n in sorted(found):
        if best is None or found[n].seconds < found[best].seconds * (1 - _NO_GAIN):
            best = n
    return (tried[best], found[best]) if best is not None else None
