"""Steps on virtual CPU devices, plain and planned, as functions of flat host arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from autopar.errors import VerifyError
from autopar.frontend.microbatch.part_trace import MicrobatchTrace
from autopar.frontend.trace.arguments import StepSpec, join_static, split_static
from autopar.frontend.trace.step import plain_steps
from autopar.frontend.traced import FlatProgram
from autopar.hlo.collectives import compiled_collectives
from autopar.ir.compiled import Compiled
from autopar.ir.compiler_options import CompilerOptions
from autopar.ir.program import Program
from autopar.ir.sharding import MeshShape
from autopar.ir.spmd_program import SpmdProgram
from autopar.ir.text import show_bytes
from autopar.runtime.bind import bind_mesh, is_key
from autopar.runtime.executor import Executor, Options
from autopar.runtime.parts import PartSource
from autopar.runtime.spmd_program import SpmdSource

# Flat arguments of the step, on the host, to its flat results there.
FlatStep = Callable[[Sequence[Any]], list[Any]]

_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


def open_cpu_devices(count: int) -> None:
    """Make this process show so many virtual CPU devices, unless JAX has started already."""
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # whoever runs a step says whether those that there are will do


def runs_here(count: int) -> bool:
    """True if a program of so many devices runs in this process.

    It must where what JAX writes programs with is not installed: no other process could read it.
    """
    return len(jax.devices("cpu")) >= count or find_spec("flatbuffers") is None


def cpu_devices(count: int) -> list[Any]:
    """So many CPU devices of this process; raises VerifyError where there are fewer."""
    found = jax.devices("cpu")
    if len(found) < count:
        raise VerifyError(
            f"comparing numbers needs {count} CPU devices and this process has {len(found)}: "
            f'call jax.config.update("jax_num_cpu_devices", {count}) before JAX starts, or use '
            "`autopar verify`, which does"
        )
    return list(found[:count])


def check_host_memory(nbytes: int) -> None:
    """Raise VerifyError where this machine has less memory than that."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > whole:
        raise VerifyError(
            f"comparing numbers would hold about {show_bytes(nbytes)} and this machine has "
            f"{show_bytes(whole)}: shrink the plan to fewer devices, or a smaller model to the "
            "same shardings; levels other than numerics hold nothing"
        )


def plain_step(spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> FlatStep:
    """The user's own step under `jax.jit` on one CPU device; of the arguments only trees count."""
    numbers, names = spec.static(args)
    tree = jax.tree_util.tree_structure(split_static(spec, args, kwargs))
    fun: Any = spec.fun
    if not isinstance(fun, jax.stages.Wrapped):
        fun = jax.jit(fun, static_argnums=numbers, static_argnames=names)
    (device,) = cpu_devices(1)

    def run(leaves: Sequence[Any]) -> list[Any]:
        # Copies, as the user may have jitted it with donation.
        placed = [jax.device_put(leaf, device, may_alias=False) for leaf in leaves]
        dynamic = jax.tree_util.tree_unflatten(tree, placed)
        given, named = join_static(spec, args, kwargs, dynamic)
        with plain_steps():
            return on_host(jax.tree_util.tree_leaves(fun(*given, **named)))

    return run


def planned_step(
    trace: MicrobatchTrace, lowered: Program | SpmdProgram, options: CompilerOptions = ()
) -> FlatStep:
    """A planned step on CPU devices; raises VerifyError where this process has too few."""
    program = lowered.program if isinstance(lowered, SpmdProgram) else lowered
    places = [s.devices or tuple(range(s.mesh.device_count)) for s in program.submeshes]
    devices = cpu_devices(1 + max(max(own) for own in places))
    pairs = zip(program.submeshes, places, strict=True)
    meshes = [bind_mesh(s.mesh, own, devices) for s, own in pairs]
    executor = Executor(trace, lowered, meshes, Options(compiler_options=options))
    return lambda leaves: on_host(jax.tree_util.tree_leaves(executor(leaves)))


def on_host(leaves: Sequence[Any]) -> list[Any]:
    """Arrays as NumPy's; typed random keys stay what they are, on one CPU device."""
    return [_on_host(leaf) for leaf in leaves]


def _on_host(leaf: Any) -> Any:
    if not is_key(leaf.dtype):
        return np.array(leaf)
    data: Any = np.asarray(jax.random.key_data(leaf))
    with jax.default_device(cpu_devices(1)[0]):
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))


def packed(leaf: Any) -> tuple[str, Any]:
    """An array as another process can read it: the kind of its random keys or "", and numbers."""
    if not is_key(leaf.dtype):
        return "", np.asarray(leaf)
    return str(jax.random.key_impl(leaf)), np.asarray(jax.random.key_data(leaf))


def unpacked(leaf: tuple[str, Any]) -> Any:
    """The array that was packed."""
    impl, numbers = leaf
    return jax.random.wrap_key_data(numbers, impl=impl) if impl else numbers


def as_numbers(leaf: Any) -> np.ndarray[Any, Any]:
    """An array's numbers, of keys their bits."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf)


def drawn_keys(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Typed random keys of a dtype; raises VerifyError for a kind that JAX does not ship."""
    with jax.default_device(cpu_devices(1)[0]):
        for name in _KEYS:
            key = jax.random.key(seed, impl=name)
            if key.dtype == dtype:
                return jax.random.split(key, shape) if shape else key
    raise VerifyError(f"random keys of kind {dtype} cannot be drawn: give the argument itself")


def with_created(create: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments with what `create(key)` makes in the place of the first that is its type.

    The arguments as they are where it makes nothing from one key, or nothing of any one's type.
    """
    key = jax.random.key(0)
    try:
        made = _types(jax.eval_shape(create, key))
    except TypeError:
        return tuple(args)
    at = next((i for i, a in enumerate(args) if _types(a) == made and _is_abstract(a)), None)
    if at is None:
        return tuple(args)
    return (*args[:at], jax.jit(create)(key), *args[at + 1 :])


def _types(tree: Any) -> Any:
    leaves, structure = jax.tree_util.tree_flatten(tree)
    shapes = [(getattr(a, "shape", None), getattr(a, "dtype", None)) for a in leaves]
    return structure, shapes


def _is_abstract(tree: Any) -> bool:
    leaves = jax.tree_util.tree_leaves(tree)
    return bool(leaves) and all(isinstance(a, jax.ShapeDtypeStruct) for a in leaves)


def rounding_of(program: FlatProgram) -> float:
    """The relative rounding of the narrowest floats that a program computes."""
    made = (a for e in program.walk() for a in e.result_avals)
    kinds = {a.dtype for a in (*program.input_avals, *made) if getattr(a, "dtype", None)}
    floats = (d for d in kinds if jax.dtypes.issubdtype(d, jax.numpy.inexact))
    info: Any = jax.numpy.finfo
    return max((float(info(d).eps) for d in floats), default=0.0)


# -- compiled, but not run ---------------------------------------------------------------------


@dataclass(frozen=True)
class CpuProgram:
    """A program of one mesh that is yet to be compiled for CPU devices."""

    mesh: MeshShape
    compile: Callable[[], Any]

    def compiled(self) -> Compiled:
        """XLA's figures for it; its peak leaves temporaries out, so these are added."""
        made = self.compile()
        memory = made.memory_analysis()
        order = range(self.mesh.device_count)
        return Compiled(
            target=f"{self.mesh.device_count} virtual CPU devices",
            compiler=f"jaxlib {version('jaxlib')}",
            argument_bytes=memory.argument_size_in_bytes,
            peak_bytes=laid_out_bytes(memory),
            collectives=compiled_collectives(made.as_text(), self.mesh, order),
        )


def laid_out_bytes(memory: Any) -> int:
    """Bytes of all that XLA lays out by a program's `memory_analysis()`, what is donated once."""
    given = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return int(given - memory.alias_size_in_bytes + memory.temp_size_in_bytes)


def cpu_program_of_stages(source: SpmdSource, kept: Collection[tuple[int, int]]) -> CpuProgram:
    """The one program of all stages; raises VerifyError where there are too few CPU devices."""
    mesh = source.mesh
    bound = bind_mesh(mesh, range(mesh.device_count), cpu_devices(mesh.device_count))
    jitted = source.jitted(bound, source.donated(kept))
    return CpuProgram(mesh, lambda: jitted.lower(*source.given(bound)).compile())


def cpu_program_of_part(source: PartSource) -> CpuProgram:
    """A part of a planned step; raises VerifyError where this process has too few CPU devices."""
    mesh = source.mesh
    devices = cpu_devices(mesh.device_count)
    bound = bind_mesh(mesh, range(mesh.device_count), devices)
    return CpuProgram(mesh, lambda: source.lower(bound).compile(device_assignment=tuple(devices)))
