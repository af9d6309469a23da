"""The shardings of a plan as JAX has them: for the arguments and results of a step, or for a tree.

plan    state/w: [64 over data, 32]      step    train_step({"w": [64, 32]}, batch)
        batch:   [16 over data, 64]
args    ({"w": NamedSharding(mesh, P("data"))}, NamedSharding(mesh, P("data")))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.cluster import device_order
from autopar.cluster.planned import planned_cluster
from autopar.errors import InputError, PlanMismatchError
from autopar.frontend.trace.arguments import StepSpec, key_text
from autopar.frontend.trace.objects import without_constants
from autopar.frontend.traced import Piece, TracedStep
from autopar.ir.plan import Argument, Plan, leaf_arguments
from autopar.runtime import bind
from autopar.runtime.bind import bind_mesh, named_sharding, with_axis

_SHOWN = 4


@dataclass(frozen=True)
class StackedSharding:
    """The sharding of a leaf whose rows lie on several submeshes: one for each run of rows.

    Such a leaf comes back from a step as StackedPieces, which has an array for each.
    """

    shardings: tuple[NamedSharding, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Shardings:
    """The shardings of a step's arguments and results, as trees like theirs.

    Each leaf is a NamedSharding; with stages, one whose rows lie on several submeshes is a
    StackedSharding. Static arguments are left out, as in `jax.jit(in_shardings=...)`. An nnx object
    is here the state that nnx splits off, and what it becomes is no result.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any


def bind_plan(plan: Plan, order: Sequence[int] | None = None) -> tuple[Mesh, ...]:
    """The meshes of a plan's submeshes on their devices; `order` is a whole mesh's own."""
    return tuple(
        bind_mesh(s.mesh, s.devices or order or device_order(planned_cluster(plan), s.mesh))
        for s in plan.submeshes
    )


def step_shardings(
    plan: Plan, spec: StepSpec, user: TracedStep, whole: TracedStep, meshes: Sequence[Mesh]
) -> Shardings:
    """The shardings of a step under a plan.

    `user` is the step as it was written, and `whole` the same where leaves may be cut into pieces.
    """
    given = _by_leaf(plan, plan.arguments, whole.input_pieces, meshes)
    made = _by_leaf(plan, plan.outputs, whole.output_pieces, meshes)
    args, kwargs = user.in_tree.unflatten(given[: user.in_tree.num_leaves])
    results = user.out_tree.unflatten(made[: user.out_tree.num_leaves])
    results = spec.result_of(results) if spec.result_of is not None else results
    return Shardings(without_constants(args), without_constants(kwargs), results)


def _by_leaf(
    plan: Plan, listed: Sequence[Argument], pieces: Sequence[Piece], meshes: Sequence[Mesh]
) -> list[Any]:
    """A sharding for each leaf; without pieces every argument is one."""
    if not pieces:
        return [_sharding(plan, (a,), meshes) for a in listed]
    pairs = zip(listed, pieces, strict=True)
    grouped = groupby(pairs, lambda pair: pair[1].leaf)
    return [_sharding(plan, [a for a, _ in own], meshes) for _, own in grouped]


def _sharding(
    plan: Plan, pieces: Sequence[Argument], meshes: Sequence[Mesh]
) -> NamedSharding | StackedSharding:
    """The sharding of a leaf in one or more pieces."""
    # Programs of parts are on meshes with at least one axis: see Executor.
    held = tuple(
        named_sharding(
            a.sharding,
            meshes[a.submesh] if plan.is_one_program else with_axis(meshes[a.submesh]),
        )
        for a in pieces
    )
    if len(held) == 1:
        return held[0]
    return StackedSharding(held, tuple(a.shape[0] for a in pieces))


def partition_spec(argument: Argument) -> PartitionSpec:
    """The sharding of one of a plan's arguments or outputs as JAX's PartitionSpec."""
    return bind.partition_spec(argument.sharding)


# -- for any tree ------------------------------------------------------------------------------


def shardings(plan: Plan, tree: Any, at: str | None = None) -> Any:
    """The NamedSharding of each leaf of a tree of arrays or shapes, on the devices of JAX.

    The tree is an argument of the plan's step, or part of one; where the plan has several such
    trees that lie otherwise, `at` is the path of one, such as "state/params". A leaf whose rows lie
    on several submeshes has a StackedSharding. Devices are in autopar's order: of a step planned on
    a `jax.sharding.Mesh` of your own take `ParallelStep.shardings`. Raises PlanMismatchError where
    the plan has no such tree, and InputError where it has several that lie otherwise.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    wanted = [("/".join(map(key_text, keys)), tuple(leaf.shape)) for keys, leaf in leaves]
    known = {leaf.path: leaf for leaf in leaf_arguments(plan.arguments)}
    meshes = bind_plan(plan)
    found: dict[str, list[Any]] = {}
    for head in _heads(known, wanted) if at is None else [at.strip("/")]:
        own = [known.get("/".join(p for p in (head, path) if p)) for path, _ in wanted]
        shapes = [leaf.shape if leaf is not None else None for leaf in own]
        if shapes == [shape for _, shape in wanted]:
            found[head] = [_sharding(plan, leaf.arguments, meshes) for leaf in own if leaf]
    if not found:
        raise PlanMismatchError(_no_tree(known, wanted, at))
    first = next(iter(found.values()))
    if any(other != first for other in found.values()):
        raise InputError(
            f"the plan of {plan.origin.step} has {len(found)} such trees, and they lie otherwise: "
            f"{', '.join(list(found)[:_SHOWN])}. Say which, as in "
            f"autopar.shardings(plan, tree, at={next(iter(found))!r})."
        )
    return jax.tree_util.tree_unflatten(structure, first)


def _heads(known: dict[str, Any], wanted: Sequence[tuple[str, Any]]) -> list[str]:
    """The paths under which the first leaf is found."""
    first = wanted[0][0] if wanted else ""
    if not first:  # the tree is one array
        return list(known)
    heads = [path.removesuffix(first) for path in known if path.endswith(first)]
    return [head.rstrip("/") for head in heads if not head or head.endswith("/")]


def _no_tree(known: dict[str, Any], wanted: Sequence[tuple[str, Any]], at: str | None) -> str:
    """Tell which leaf the plan has not."""
    below = f" below {at!r}" if at is not None else ""
    if not wanted:
        return "the tree has no arrays"
    head = f"{at.strip('/')}/" if at is not None else ""
    own = [(p.removeprefix(head), leaf) for p, leaf in known.items() if p.startswith(head)]
    path, shape = wanted[0]
    for path, shape in wanted:
        if not any(p.endswith(path) and leaf.shape == shape for p, leaf in own):
            break
    near = ", ".join(f"{p} {list(leaf.shape)}" for p, leaf in list(known.items())[:_SHOWN])
    return (
        f"the plan has no tree{below} with {path or 'an array'} {list(shape)} among its leaves; "
        f"it has {near}{', ...' if len(known) > _SHOWN else ''}. Give an argument of the step that "
        "it was made for, or part of one."
    )
