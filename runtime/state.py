"""Makes state where it will live, so that no leaf is ever whole on one device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import jax

from autopar.errors import PlanMismatchError
from autopar.ir.plan import Argument, Plan
from autopar.ir.sharding import Sharding
from autopar.ir.values import Role
from autopar.runtime.bind import named_sharding
from autopar.runtime.executor import storage_sharding
from autopar.runtime.pieces import StackedPieces

_Key = tuple[tuple[int, ...], ...]


# Rows of a leaf that stages share, as paths of a plan's arguments have them: "params/w[0:4]".
_ROWS = re.compile(r"\[(\d+):(\d+)\]$")


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the state, of which a plan may keep the rows on several submeshes."""

    path: str
    shape: tuple[int, ...]
    pieces: tuple[Argument, ...]


_Planned = TypeVar("_Planned", Argument, _Leaf)


def create_planned(
    create: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    plan: Plan,
    mesh: jax.sharding.Mesh,
) -> Any:
    """The state that `create` makes, each leaf born as the plan wants it."""
    abstract = jax.eval_shape(create, *args, **kwargs)
    layout = planned_layout(abstract, plan, mesh)
    return jax.jit(create, out_shardings=layout)(*args, **kwargs)


def create_on_submeshes(
    create: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    planned: Sequence[Argument],
    meshes: Sequence[jax.sharding.Mesh],
) -> Any:
    """The state that `create` makes, each leaf or piece of one born on the submesh that keeps it.

    `planned` are the plan's arguments. Every submesh runs all of `create` and is asked for its own
    leaves only, so that the rest need not be computed; random bits are those of the whole. Raises
    PlanMismatchError where the plan has no such state.
    """
    abstract, tree = jax.tree_util.tree_flatten(jax.eval_shape(create, *args, **kwargs))
    found = _matched(abstract, list(_whole_leaves(planned)))
    born: dict[tuple[int, str], Any] = {}
    for submesh, mesh in enumerate(meshes):
        own = {
            (i, piece.path): piece
            for i, leaf in enumerate(found)
            for piece in leaf.pieces
            if piece.submesh == submesh
        }
        if own:
            born.update(_born(create, args, kwargs, own, mesh))
    leaves = [tuple(born[i, p.path] for p in leaf.pieces) for i, leaf in enumerate(found)]
    whole = [StackedPieces(p) if len(p) > 1 else next(iter(p)) for p in leaves]
    return jax.tree_util.tree_unflatten(tree, whole)


def _whole_leaves(planned: Sequence[Argument]) -> Iterator[_Leaf]:
    """The leaves of the state, their pieces together."""
    state = [a for a in planned if a.role == Role.STATE.value]
    for path, own in groupby(state, lambda a: _ROWS.sub("", a.path)):
        pieces = tuple(own)
        shape = pieces[0].shape
        if len(pieces) > 1:
            shape = (sum(p.shape[0] for p in pieces), *shape[1:])
        yield _Leaf(path, shape, pieces)


def _born(
    create: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    own: dict[tuple[int, str], Argument],
    mesh: jax.sharding.Mesh,
) -> dict[tuple[int, str], Any]:
    """What one submesh keeps, by leaf and path."""

    def part(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        leaves = jax.tree_util.tree_leaves(create(*args, **kwargs))
        return [_rows(leaves[i], path) for i, path in own]

    whole = named_sharding(Sharding(()), mesh)
    there = jax.tree_util.tree_map(
        lambda x: jax.device_put(x, whole) if isinstance(x, jax.Array) else x, (args, kwargs)
    )
    layout = [named_sharding(piece.sharding, mesh) for piece in own.values()]
    return dict(zip(own, jax.jit(part, out_shardings=layout)(*there), strict=True))


def _rows(leaf: Any, path: str) -> Any:
    rows = _ROWS.search(path)
    return leaf if rows is None else leaf[int(rows[1]) : int(rows[2])]


def create_spread(
    create: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], mesh: jax.sharding.Mesh
) -> Any:
    """The state that `create` makes before there is a plan, cut up evenly over all devices."""
    abstract = jax.eval_shape(create, *args, **kwargs)
    return jax.jit(create, out_shardings=storage_layout(abstract, mesh))(*args, **kwargs)


def storage_layout(abstract: Any, mesh: jax.sharding.Mesh) -> Any:
    """A sharding for each leaf that cuts it evenly over all devices, where it divides."""
    count = mesh.devices.size

    def layout(leaf: Any) -> jax.sharding.NamedSharding:
        shape = () if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended) else leaf.shape
        sharding = storage_sharding(shape, mesh.axis_names, count)
        return named_sharding(sharding, mesh)

    return jax.tree_util.tree_map(layout, abstract)


def planned_layout(abstract: Any, plan: Plan, mesh: jax.sharding.Mesh) -> Any:
    """The plan's sharding for each leaf of the state.

    The state is the argument, or the arguments in order, whose leaves have these shapes. Raises
    PlanMismatchError where the plan has no such state.
    """
    leaves, tree = jax.tree_util.tree_flatten(abstract)
    found = _matched(leaves, [a for a in plan.arguments if a.role == Role.STATE.value])
    return jax.tree_util.tree_unflatten(tree, [named_sharding(a.sharding, mesh) for a in found])


def _matched(leaves: Sequence[Any], state: Sequence[_Planned]) -> Sequence[_Planned]:
    """The run of the plan's state that has the shapes of these leaves."""
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    found = _matching(shapes, state)
    if found is None:
        raise PlanMismatchError(
            f"the state has {len(shapes)} arrays, and the plan keeps {len(state)}, of other "
            f"shapes: {_first_difference(shapes, state)}. Plan for this state, or create the "
            "state that the plan is for."
        )
    return found


def _matching(shapes: _Key, state: Sequence[_Planned]) -> Sequence[_Planned] | None:
    """The run of consecutive state leaves with these shapes."""
    for start in range(len(state) - len(shapes) + 1):
        run = state[start : start + len(shapes)]
        if tuple(a.shape for a in run) == shapes:
            return run
    return None


def _first_difference(shapes: _Key, state: Sequence[_Planned]) -> str:
    for shape, planned in zip(shapes, state, strict=False):
        if shape != planned.shape:
            return f"{planned.path} is {list(planned.shape)} in the plan and {list(shape)} here"
    return "one has more arrays than the other"
