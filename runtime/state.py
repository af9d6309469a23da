"""Makes state where it will live, so that no leaf is ever whole on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.errors import PlanMismatchError
from autopar.ir.plan import Argument, Plan
from autopar.ir.values import Role
from autopar.runtime.bind import named_sharding
from autopar.runtime.executor import storage_sharding

_Key = tuple[tuple[int, ...], ...]


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
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    state = [a for a in plan.arguments if a.role == Role.STATE.value]
    found = _matching(shapes, state)
    if found is None:
        raise PlanMismatchError(
            f"the state has {len(shapes)} arrays, and the plan for {plan.origin.step} keeps "
            f"{len(state)}, of other shapes: {_first_difference(shapes, state)}. Plan for this "
            "state, or create the state that the plan is for."
        )
    return jax.tree_util.tree_unflatten(tree, [named_sharding(a.sharding, mesh) for a in found])


def _matching(shapes: _Key, state: Sequence[Argument]) -> Sequence[Argument] | None:
    """The run of consecutive state leaves with these shapes."""
    for start in range(len(state) - len(shapes) + 1):
        run = state[start : start + len(shapes)]
        if tuple(a.shape for a in run) == shapes:
            return run
    return None


def _first_difference(shapes: _Key, state: Sequence[Argument]) -> str:
    for shape, planned in zip(shapes, state, strict=False):
        if shape != planned.shape:
            return f"{planned.path} is {list(planned.shape)} in the plan and {list(shape)} here"
    return "one has more arrays than the other"
