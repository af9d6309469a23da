"""The compiled step on its mesh: places what it is given, runs, hands state back in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar.frontend.traced import TracedStep
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import Sharding
from autopar.ir.spmd import SpmdProgram
from autopar.runtime.aliases import Aliases, repeats
from autopar.runtime.bind import mesh_shape, named_sharding, partition_spec
from autopar.runtime.callbacks import HostCalls
from autopar.runtime.emit import local_function
from autopar.runtime.place import Placer


class Executor:
    """One `jax.jit` over the whole mesh with in and out shardings; called on flat arguments.

    Within it every device runs its own listing under shard_map, so that the collectives are the
    plan's and no partitioner may add to them.
    """

    def __init__(
        self, traced: TracedStep, program: SpmdProgram, mesh: jax.sharding.Mesh, donate: bool
    ) -> None:
        self._traced, self._mesh = traced, mesh
        # One object for all that lie alike: whether state lies right is then seen at a glance.
        named = {
            s: named_sharding(s, mesh)
            for s in (*program.input_shardings, *program.output_shardings)
        }
        self._in = tuple(named[s] for s in program.input_shardings)
        self._out = tuple(named[s] for s in program.output_shardings)
        self._constants = tuple(
            jax.device_put(c, s)
            for c, s in zip(traced.constants, self._in[self._argument_count :], strict=True)
        )
        self._calls = HostCalls.of(traced.program)
        self._consumed = frozenset(traced.state_inputs if donate else ())
        kinds = traced.program.input_avals[: self._argument_count]
        aliases = Aliases(kinds, self._consumed, self._constants)
        aliases.trust(self._out)
        self._place = Placer(self._in[: self._argument_count], traced.state_inputs, aliases)
        paths = traced.input_paths[self._argument_count :]
        self._closed_over = list(zip(paths, self._constants, strict=True))
        self._jitted = self._jit(program, donate)
        self._compiled: Any = None

    @property
    def _argument_count(self) -> int:
        return len(self._in) - len(self._traced.constants)

    @property
    def _platform(self) -> str:
        return str(self._mesh.devices.flat[0].platform)

    def _jit(self, program: SpmdProgram, donate: bool) -> Any:
        shape = mesh_shape(self._mesh)
        mapped = mapped_step(self._traced, program, self._mesh, shape, self._platform, self._calls)
        return jax.jit(
            mapped,
            in_shardings=self._in,
            out_shardings=self._out,
            donate_argnums=self._traced.state_inputs if donate else (),
        )

    def input_sharding(self, index: int) -> jax.sharding.NamedSharding:
        """How flat argument `index` must lie."""
        return self._in[index]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run the step on flat arguments; the state among them is consumed."""
        self._calls.before()
        placed = self._place(leaves, repeats(leaves, self._consumed))
        flat = self.compile()(*placed, *self._constants)
        self._calls.after(flat)
        return jax.tree_util.tree_unflatten(self._traced.out_tree, flat)

    @property
    def closed_over(self) -> list[tuple[str, Any]]:
        """The closed-over arrays as every call is given them, each with its path."""
        return self._closed_over

    def compile(self) -> Any:
        """The compiled object that runs, with `.as_text()` and `.memory_analysis()`."""
        if self._compiled is None:
            program = self._traced.program
            shaped = [
                jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=s)
                for aval, s in zip(program.input_avals, self._in, strict=True)
            ]
            self._compiled = self._jitted.lower(*shaped).compile()
        return self._compiled


def mapped_step(
    traced: TracedStep,
    program: SpmdProgram,
    mesh: Any,
    shape: MeshShape,
    platform: str,
    calls: HostCalls | None = None,
) -> Any:
    """A planned step over a mesh, abstract or not: each device runs the listing on its pieces."""
    mapped = jax.shard_map(
        local_function(traced.program, program, shape, platform, calls),
        mesh=mesh,
        in_specs=tuple(partition_spec(s) for s in program.input_shardings),
        out_specs=tuple(partition_spec(s) for s in program.output_shardings),
        check_vma=False,
    )
    # jit's name is what profiles and HLO dumps show.
    mapped.__name__ = traced.name
    return mapped


def storage_sharding(shape: Sequence[int], axes: Sequence[str], count: int) -> Sharding:
    """Where to keep a leaf before there is a plan: its first largest dim that divides, cut up."""
    able = [n if n % count == 0 and n > 0 else 0 for n in shape]
    if not any(able):
        return Sharding(((),) * len(shape))
    best = able.index(max(able))
    return Sharding(tuple(tuple(axes) if d == best else () for d in range(len(shape))))
