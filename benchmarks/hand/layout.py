"""A train step sharded by hand in plain JAX: NamedSharding, sharding constraints, nothing else."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.models import Model
from benchmarks.zoo.functional import Marks

SpecOf = Callable[[str, tuple[int, ...]], PartitionSpec]
Pin = Callable[[jax.Array, PartitionSpec], jax.Array]
Around = Callable[[nn.Module, jax.Array, Pin], Any]  # an array, or NotImplemented

WHOLE = PartitionSpec()


def whole(path: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Every parameter on every device."""
    del path, shape
    return WHOLE


@dataclass(frozen=True)
class Flow:
    """What an activation is pinned to, one spec after the other, and its gradient likewise."""

    forward: tuple[PartitionSpec, ...] = ()
    backward: tuple[PartitionSpec, ...] = ()

    @classmethod
    def both(cls, spec: PartitionSpec) -> Flow:
        """The same for the value and for its gradient."""
        return cls((spec,), (spec,))


def flow_freely(module: nn.Module) -> Flow:
    """No constraint."""
    del module
    return Flow()


@dataclass(frozen=True)
class Layout:
    """Where each array of a step lies, by the parameter's path and shape, or by its module.

    A parameter is `stored` between steps and `used` by matmuls in bfloat16; its gradient and
    moments are `updated`. `enters` and `leaves` are the flows of what a module takes and returns.
    `module`, where there is one, runs modules of one input in its own way, or leaves them as they
    are with NotImplemented. `flows`, where there is one, says the flow of each kind of activation
    of a model that marks them (`benchmarks.zoo.functional`); a stack of layers lies as its rows do.
    """

    axes: tuple[tuple[str, int], ...]
    batch: PartitionSpec
    stored: SpecOf = whole
    used: SpecOf = whole
    updated: SpecOf = whole
    enters: Callable[[nn.Module], Flow] = flow_freely
    leaves: Callable[[nn.Module], Flow] = flow_freely
    module: Around | None = None
    flows: Callable[[str], Flow] | None = None

    @property
    def mesh_text(self) -> str:
        """The mesh's sizes, such as "2x4"."""
        return "x".join(str(size) for _, size in self.axes)


@dataclass(frozen=True)
class HandStep:
    """A jitted step of flat arguments, of which the first `state_count` are the state."""

    jitted: Any
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    state_count: int

    @property
    def argument_bytes(self) -> int:
        """Bytes of one device's pieces of the arguments."""
        return sum(
            math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in self.arguments
        )


def hand_step(model: Model, layout: Layout, mesh: Any) -> HandStep:
    """The step of a model on a mesh, concrete or abstract, whose axes are the layout's."""
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    arguments, tree = jax.tree.flatten((state, model.example_batch))
    constrained = constrained_step(model, layout, mesh)

    def step(*leaves: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(constrained(*jax.tree.unflatten(tree, leaves))))

    paths = jax.tree_util.tree_flatten_with_path((state, model.example_batch))[0]
    placed = [NamedSharding(mesh, spec_of(p, leaf.shape, layout)) for p, leaf in paths]
    count = len(jax.tree.leaves(state))
    outputs = len(jax.eval_shape(step, *arguments)) - count
    out = (*placed[:count], *[NamedSharding(mesh, WHOLE)] * outputs)
    jitted = jax.jit(
        step, in_shardings=tuple(placed), out_shardings=out, donate_argnums=tuple(range(count))
    )
    shapes = (
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip(arguments, placed, strict=True)
    )
    return HandStep(jitted, tuple(shapes), count)


def constrained_step(model: Model, layout: Layout, mesh: Any) -> Callable[[Any, Any], Any]:
    """A model's step with a layout's constraints on weights and activations."""

    def step(given: Any, batch: Any) -> Any:
        def apply(variables: Any, *args: Any, **options: Any) -> Any:
            if layout.flows is not None:
                return given.apply_fn(variables, *args, marks=_marks(layout, mesh), **options)
            params = _used(variables["params"], layout, mesh)
            return given.apply_fn({**variables, "params": params}, *args, **options)

        with nn.intercept_methods(_constraints(layout, mesh)):
            new, metrics = model.step(given.replace(apply_fn=apply), batch)
        return new.replace(apply_fn=given.apply_fn), metrics

    return step


def pins_of(model: Model, layout: Layout) -> dict[str, PartitionSpec]:
    """Where a layout stores the arrays of the state, by their paths, as autopar takes pins."""
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    found = jax.tree_util.tree_flatten_with_path((state, {}))[0]
    return {
        "/".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", "")))) for k in p[1:]):
            spec_of(p, leaf.shape, layout)
        for p, leaf in found
    }  # fmt: skip


def split_more(spec: PartitionSpec, shape: Sequence[int], axis: str, size: int) -> PartitionSpec:
    """A spec with the largest dim that is still whole and divides cut up over one more axis."""
    dims = [*spec, *[None] * (len(shape) - len(spec))]
    able = [d for d, n in enumerate(shape) if dims[d] is None and n % size == 0 and n >= size]
    if able and math.prod(shape) > size:
        dims[max(able, key=lambda d: shape[d])] = axis
    return PartitionSpec(*dims)


def spec_of(path: Any, shape: tuple[int, ...], layout: Layout) -> PartitionSpec:
    """Where an argument lies: the moments of a parameter end in the parameter's own path."""
    if path[0].idx == 1:
        return layout.batch
    fields = [k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)]
    name = "/".join(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey))
    if not name:
        return WHOLE
    found = layout.stored if {"params", "base"} & set(fields) else layout.updated
    if layout.flows is not None and "layers/" in name:
        return PartitionSpec(None, *found(name, shape[1:]))
    return found(name, shape)


def _marks(layout: Layout, mesh: Any) -> Marks:
    """A layout's constraints, where a model marks its weights and activations."""

    def weight(name: str, p: jax.Array) -> jax.Array:
        specs = (where(name, p.shape) for where in (layout.stored, layout.used, layout.updated))
        in_half = name.endswith(("kernel", "embedding", "narrow", "wide"))
        lies = tuple(NamedSharding(mesh, spec) for spec in specs)
        return _gathered(p, jnp.bfloat16 if in_half else p.dtype, lies)

    def value(kind: str, x: jax.Array) -> jax.Array:
        assert layout.flows is not None  # only such layouts have marks
        return _flowing(x, layout.flows(kind), mesh)

    return Marks(weight, value)


def _used(params: Any, layout: Layout, mesh: Any) -> Any:
    """The parameters as the forward pass takes them: cast first, so that half as much is sent."""

    def used(path: Any, p: jax.Array) -> jax.Array:
        name = "/".join(str(k.key) for k in path)
        specs = (where(name, p.shape) for where in (layout.stored, layout.used, layout.updated))
        in_half = p.ndim >= 2 and not name.endswith("experts/gate/kernel")
        lies = tuple(NamedSharding(mesh, spec) for spec in specs)
        return _gathered(p, jnp.bfloat16 if in_half else p.dtype, lies)

    return jax.tree_util.tree_map_with_path(used, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: jax.Array, dtype: Any, specs: tuple[NamedSharding, ...]) -> jax.Array:
    """A parameter where it is used; its gradient is summed into where it is updated.

    Without the first constraint the partitioner gathers before it casts, which sends twice as
    much.
    """
    stored, used, _ = specs
    cast = jax.lax.with_sharding_constraint(x.astype(dtype), stored)
    gathered: jax.Array = jax.lax.with_sharding_constraint(cast, used)
    return gathered


def _gathered_fwd(
    x: jax.Array, dtype: Any, specs: tuple[NamedSharding, ...]
) -> tuple[jax.Array, None]:
    return _gathered(x, dtype, specs), None


def _gathered_bwd(
    dtype: Any, specs: tuple[NamedSharding, ...], _: None, g: jax.Array
) -> tuple[jax.Array]:
    del dtype
    return (jax.lax.with_sharding_constraint(g, specs[2]).astype(jnp.float32),)


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


def _constraints(layout: Layout, mesh: Any) -> Callable[..., Any]:
    """What flax runs round each module's call."""

    def intercept(call: Any, args: Any, options: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return call(*args, **options)
        module, out = context.module, NotImplemented
        first: Any = _flowing(args[0], layout.enters(module), mesh)
        if layout.module is not None:
            out = layout.module(module, first, functools.partial(_pinned, mesh=mesh))
        if out is NotImplemented:
            out = call(first, *args[1:], **options)
        return jax.tree.map(lambda x: _flowing(x, layout.leaves(module), mesh), out)

    return intercept


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _flowing(x: jax.Array, flow: Flow, mesh: Any) -> jax.Array:
    """An activation on its way; its gradient comes back on a way of its own."""
    for spec in flow.forward:
        x = _pinned(x, spec, mesh)
    return x


def _flowing_fwd(x: jax.Array, flow: Flow, mesh: Any) -> tuple[jax.Array, None]:
    return _flowing(x, flow, mesh), None


def _flowing_bwd(flow: Flow, mesh: Any, _: None, g: jax.Array) -> tuple[jax.Array]:
    for spec in flow.backward:
        g = _pinned(g, spec, mesh)
    return (g,)


_flowing.defvjp(_flowing_fwd, _flowing_bwd)


def _pinned(x: jax.Array, spec: PartitionSpec, mesh: Any) -> jax.Array:
    """A value that lies as a spec says."""
    pinned: jax.Array = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return pinned
