"""The plain step with a plan's layouts as constraints, for calls inside JAX's transforms.

There is no running within `jit`, `grad` or `vmap`, only code to be transformed, and what a plan
compiles to cannot be: a derivative of its collectives is no derivative of the step. The plain step
can, and the compiler divides it among the devices as the constraints on its arguments and results
say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autopar.errors import ArgumentError
from autopar.frontend.trace.arguments import StepSpec, join_static, split_static
from autopar.ir.sharding import Sharding
from autopar.runtime.bind import named_sharding, with_axis
from autopar.runtime.state import even_layout

Layout = Callable[[Sequence[Any]], Sequence[NamedSharding]]  # of leaves: how each is to lie


def layout_of(shardings: Sequence[Sharding], mesh: Mesh) -> Layout:
    """The layout that a plan has for some leaves."""
    bound = with_axis(mesh)
    named = [named_sharding(s, bound) for s in shardings]
    return lambda leaves: named[: len(leaves)]


def spread_layout(mesh: Mesh) -> Layout:
    """Each leaf cut up evenly over all devices, where it divides."""
    return lambda leaves: even_layout(list(leaves), with_axis(mesh))


def constrained_step(spec: StepSpec, args: Sequence[Any], given: Layout, made: Layout) -> Any:
    """The plain step, jitted, its arguments and results held to layouts; it donates nothing.

    It is for calls with as many positional arguments as `args`.
    """
    numbers, names = spec.static(args)

    def step(*args: Any, **kwargs: Any) -> Any:
        dynamic = _held(split_static(spec, args, kwargs), given)
        positional, named = join_static(spec, args, kwargs, dynamic)
        return _held(spec.fun(*positional, **named), made)

    step.__name__ = spec.name
    return jax.jit(step, static_argnums=numbers, static_argnames=names)


def _held(tree: Any, layout: Layout) -> Any:
    """A tree's arrays where they are to lie; a scalar is everywhere."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    arrays = [leaf if getattr(leaf, "ndim", 0) else jax.numpy.asarray(leaf) for leaf in leaves]
    wanted = layout(arrays)
    held = [
        jax.lax.with_sharding_constraint(array, sharding) if array.ndim else leaf
        for leaf, array, sharding in zip(leaves, arrays, wanted, strict=True)
    ]
    return jax.tree_util.tree_unflatten(structure, held)


def check_surroundings(name: str) -> None:
    """Raise ArgumentError where other code than the step says how arrays lie.

    Inside shard_map and pmap each device runs code of its own; on a mesh with explicit axes
    layouts are part of types, which constraints cannot change.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.explicit_axes:
        raise ArgumentError(
            f"{name} was called inside a transform on a mesh with explicit axes "
            f"{mesh.explicit_axes}, and {name} says how its arrays lie by constraints, which such "
            "a mesh does not take. Call it outside the transform, set a mesh with "
            f"AxisType.Auto, or call {name}.__wrapped__, which is the plain step."
        )
    if mesh.manual_axes:
        raise ArgumentError(
            f"{name} was called inside jax.shard_map or jax.pmap, where code runs on each device's "
            f"piece, and {name} divides its arrays among all devices itself. Call it outside, or "
            f"call {name}.__wrapped__, which is the plain step."
        )
