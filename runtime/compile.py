"""Compiles every part of a program before the first step: equal ones once, several at a time.

1. Parts with one `program_cache_key` are one program: layers of a stack mostly are.
2. Each is lowered once, for any devices of its mesh's shape, and compiled on the first submesh.
3. On further submeshes the compiled program is loaded again (`Portable`), which takes no time;
   where the backend cannot do that it is compiled again.
"""

from __future__ import annotations

import io
import pickle
import re
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.extend import core as jex
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import ArgumentError
from autopar.frontend.compat import options_for_devices
from autopar.frontend.plain_data import type_of
from autopar.frontend.traced import Const, Equation, FlatProgram
from autopar.ir.compiler_options import CompilerOptions
from autopar.ir.listing import Block, Fence, ListingStep, LocalOp, Loop, Move
from autopar.runtime.bind import is_key
from autopar.runtime.parts import PartSource

Count = Callable[[int, int], None]  # how many are done, of how many
_THREADS = 4  # XLA compiles without the interpreter's lock
_REFUSED = re.compile("No such compile option|While setting option")


@dataclass(frozen=True)
class CompileReport:
    """The parts that were compiled, different ones among them, and how each of them came to be.

    A part that is equal to another on the same devices is that one; on other devices what was
    compiled is loaded again, or compiled again where the backend cannot load it.
    """

    parts: int
    distinct: int
    compiled: int
    loaded: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.parts} parts, {self.distinct} different: {self.compiled} compiled, "
            f"{self.loaded} loaded onto other devices, {self.seconds:.2f} s"
        )


@dataclass(frozen=True)
class _Copies:
    """Equal parts on different devices, and how many of them had to be compiled."""

    programs: tuple[Any, ...]
    compiled: int


def tell_nobody(done: int, total: int) -> None:
    """The listener where nobody looks on."""
    del done, total


def compile_parts(
    sources: Sequence[PartSource],
    meshes: Sequence[Mesh],
    told: Count = tell_nobody,
) -> tuple[tuple[Any, ...], CompileReport]:
    """A compiled program for each part, on the mesh of its submesh.

    `told` hears how many different ones there are, and are compiled.
    """
    start = time.perf_counter()
    places: dict[Hashable, dict[int, list[int]]] = {}
    for i, source in enumerate(sources):
        key = program_cache_key(source) if len(sources) > 1 else None
        places.setdefault(key, {}).setdefault(source.program.part.submesh, []).append(i)
    alike = list(places.values())
    made: list[_Copies] = []
    # All are lowered in this thread, whose settings of JAX the step is called under; a single one
    # is compiled here, too.
    lowered = (_lowered(sources, meshes, uses) for uses in alike)
    with ThreadPoolExecutor(_THREADS) as pool:
        for copies in (map if len(alike) == 1 else pool.map)(_copies, lowered):
            made.append(copies)
            told(len(made), len(alike))
    programs = dict(_by_part(alike, made))
    compiled = sum(c.compiled for c in made)
    report = CompileReport(
        parts=len(sources),
        distinct=len(alike),
        compiled=compiled,
        loaded=sum(len(c.programs) for c in made) - compiled,
        seconds=time.perf_counter() - start,
    )
    return tuple(programs[i] for i in range(len(sources))), report


@contextmanager
def telling_options(options: CompilerOptions) -> Generator[None]:
    """Raises ArgumentError where XLA knows no such option, or not that value of it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not options or _REFUSED.search(str(error)) is None:
            raise
        raise ArgumentError(
            f"the compiler cannot be given the options that the plan has: {error}. "
            "compiler_options={name: value} takes those of this jaxlib's XLA"
        ) from error


@dataclass(frozen=True)
class _Lowered:
    """Equal parts that are lowered, with the devices of each submesh that runs them.

    One program does for all, unless it needs to know its devices.
    """

    programs: tuple[Any, ...]
    devices: tuple[tuple[Any, ...], ...]
    options: CompilerOptions


def _lowered(
    sources: Sequence[PartSource], meshes: Sequence[Mesh], uses: dict[int, list[int]]
) -> _Lowered:
    source = sources[next(iter(uses.values()))[0]]
    found = [meshes[submesh] for submesh in uses]
    if source.needs_devices:
        programs = tuple(source.lower(mesh) for mesh in found)
    else:
        programs = (source.lower(found[0]),) * len(found)
    devices = tuple(tuple(mesh.devices.flat) for mesh in found)
    return _Lowered(programs, devices, source.options)


def _copies(lowered: _Lowered) -> _Copies:
    """Compile equal parts once, and for each submesh that cannot run what was compiled before."""
    portable: Portable | None = None
    programs: list[Any] = []
    compiled = 0
    for own, devices in zip(lowered.programs, lowered.devices, strict=True):
        program = portable.on(devices) if portable is not None else None
        if program is None:
            with telling_options(lowered.options):
                program = own.compile(device_assignment=devices)
            compiled += 1
        portable = portable or Portable(program)
        programs.append(program)
    return _Copies(tuple(programs), compiled)


def _by_part(alike: Sequence[dict[int, list[int]]], made: Sequence[_Copies]) -> Iterator[Any]:
    for uses, copies in zip(alike, made, strict=True):
        for parts, program in zip(uses.values(), copies.programs, strict=True):
            yield from ((i, program) for i in parts)


# -- equal programs ----------------------------------------------------------------------------


_Key = Hashable
# Where a jaxpr stands among the parameters it is read as the body that was flattened from it.
_FLATTENED = frozenset({"jaxpr", "call_jaxpr", "cond_jaxpr", "body_jaxpr", "branches"})


def program_cache_key(source: PartSource) -> _Key:
    """A key that two parts share if, and only if, one compiled program will do for both.

    Names of values, source lines and the stage are left out. What cannot be read, such as a
    callback, is only like itself.
    """
    part, listing = source.program.part, source.program.listing
    numbers = _Numbers()
    return (
        source.platform,
        source.mesh,
        source.inputs,
        source.outputs,
        source.donated,
        source.has_token,
        source.options,
        tuple(
            (a.combiner, a.dtype, i) for a, i in zip(part.accumulators, source.places, strict=True)
        ),
        _program_key(source.flat, numbers),
        _block_key(listing.block, numbers),
        listing.input_shardings,
        listing.output_shardings,
    )


def group_equal_parts(sources: Iterable[PartSource]) -> tuple[tuple[PartSource, ...], ...]:
    """Parts that are one program together, in the order of the first of each."""
    alike: dict[Hashable, list[PartSource]] = {}
    for source in sources:
        alike.setdefault(program_cache_key(source), []).append(source)
    return tuple(map(tuple, alike.values()))


class _Numbers:
    """Values by the order in which they are first met."""

    def __init__(self) -> None:
        self._seen: dict[int | str, int] = {}

    def of(self, names: Iterable[int | str | Const | None]) -> tuple[_Key, ...]:
        """Names as numbers; literals as what they are."""
        return tuple(
            _const_key(n) if isinstance(n, Const) else n if n is None else self._number(n)
            for n in names
        )

    def _number(self, name: int | str) -> int:
        return self._seen.setdefault(name, len(self._seen))


def _program_key(program: FlatProgram, numbers: _Numbers) -> _Key:
    return (
        numbers.of(program.inputs),
        tuple(map(type_of, program.input_avals)),
        tuple(_equation_key(e, numbers) for e in program.equations),
        numbers.of(program.outputs),
    )


def _equation_key(equation: Equation, numbers: _Numbers) -> _Key:
    skipped = _FLATTENED if equation.bodies else frozenset[str]()
    return (
        equation.primitive.name,
        tuple(
            (name, _param_key(value))
            for name, value in sorted(equation.params.items())
            if name not in skipped
        ),
        numbers.of(equation.operands),
        numbers.of(equation.results),
        tuple(map(type_of, equation.result_avals)),
        tuple(_program_key(body, numbers) for body in equation.bodies),
    )


def _param_key(value: Any) -> _Key:
    if isinstance(value, jex.Jaxpr | jex.ClosedJaxpr):
        consts = value.consts if isinstance(value, jex.ClosedJaxpr) else ()
        return str(value), tuple(map(_array_key, consts))
    if isinstance(value, np.ndarray | jax.Array):
        return _array_key(value)
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(map(_param_key, value))
    if isinstance(value, dict):
        return tuple((k, _param_key(v)) for k, v in sorted(value.items()))
    try:
        # A float is not equal to the whole number of its size here, as it is in a set.
        hash(value)
        return type(value).__name__, value
    except TypeError:
        return id(value)


def _const_key(const: Const) -> _Key:
    return type_of(const.aval), _array_key(const.value)


def _array_key(value: Any) -> _Key:
    if isinstance(value, jax.Array) and is_key(value.dtype):
        return str(value.dtype), _array_key(jax.random.key_data(value))
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()


def _block_key(block: Block, numbers: _Numbers) -> _Key:
    return (
        numbers.of(block.inputs),
        tuple(_step_key(s, numbers) for s in block.instructions),
        numbers.of(block.outputs),
    )


def _step_key(step: ListingStep, numbers: _Numbers) -> _Key:
    if isinstance(step, LocalOp):
        names = numbers.of(step.operands), numbers.of(step.results)
        laid = step.operand_shardings, step.result_shardings
        return "run", step.equation, names, laid, step.swapped, step.parts
    if isinstance(step, Move):
        moved = numbers.of((step.source, step.result))
        value = step.value.shape, step.value.dtype
        return "move", moved, value, step.before, step.after, step.steps, step.combiner, step.repeat
    if isinstance(step, Fence):
        names = numbers.of(step.sources), numbers.of(step.results)
        return "fence", names, step.tied, step.stored
    return _loop_key(step, numbers)


def _loop_key(loop: Loop, numbers: _Numbers) -> _Key:
    names = numbers.of(loop.operands), numbers.of(loop.results)
    bodies = tuple(_block_key(b, numbers) for b in loop.bodies)
    return "loop", loop.equation, names, loop.result_shardings, bodies, loop.runs, loop.turned


# -- the same program on other devices ---------------------------------------------------------


class Portable:
    """A compiled program that can be had on other devices too; it is written out once.

    JAX's own `deserialize_and_load` looks for the devices that the program came from, and on CPU
    what it loads still runs there; so the program is read here, with a device for each of them.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._devices_before: Sequence[Any] = compiled.runtime_executable().local_devices()

    def on(self, devices: Sequence[Any]) -> Any | None:
        """The same program on as many other devices; None where this JAX or backend cannot."""
        if len(self._devices_before) != len(devices) or not _is_able(devices[0].platform):
            return None
        try:
            return self.load(devices)
        except _REFUSALS:
            return None

    def load(self, devices: Sequence[Any]) -> Any:
        """Load as `on` does, without asking whether it would run."""
        data, in_tree, out_tree = self._written
        unloaded, info, no_kwargs = _Unpickler(data, self._devices_before, devices).load()
        return jax.stages.Compiled(
            unloaded.load(), [], in_tree.unflatten(info), out_tree, no_kwargs=no_kwargs
        )

    @cached_property
    def _written(self) -> tuple[bytes, Any, Any]:
        return serialize_executable.serialize(self._compiled)


_REFUSALS = (AttributeError, KeyError, NotImplementedError, TypeError, ValueError, RuntimeError)


class _Unpickler(pickle.Unpickler):
    """Reads what JAX wrote of an executable; of its devices each becomes another one."""

    def __init__(self, data: bytes, homes: Sequence[Any], devices: Sequence[Any]) -> None:
        pickle.Unpickler.__init__(self, io.BytesIO(data))
        self._devices = tuple(devices)
        self._instead = {h.id: d for h, d in zip(homes, devices, strict=True)}

    def persistent_load(self, pid: Any) -> Any:
        """The object that the data names only: the executable, a device, the client."""
        client = self._devices[0].client
        if pid[0] == "device":
            return self._instead[pid[1]]
        if pid[0] == "client":
            return client
        return client.deserialize_executable(
            pid[1],
            executable_devices=self._devices,
            compile_options=options_for_devices(self._devices),
        )


@lru_cache(maxsize=8)
def _is_able(platform: str) -> bool:
    """True if a small program, moved from one device to another, runs there."""
    devices = jax.local_devices(backend=platform)
    if len(devices) < 2:
        return False
    here, there = (NamedSharding(Mesh(np.array([d]), ("x",)), _WHOLE) for d in devices[:2])
    shaped = jax.ShapeDtypeStruct((2,), np.float32, sharding=here)
    compiled = jax.jit(_doubled, in_shardings=here, out_shardings=here).lower(shaped).compile()
    try:
        moved = Portable(compiled).load(devices[1:2])
        result = moved(jax.device_put(np.ones(2, np.float32), there))
        return bool(result.devices() == {devices[1]} and float(result[1]) == _TWO)
    except _REFUSALS:
        return False


_WHOLE, _TWO = PartitionSpec(), 2.0


def _doubled(x: jax.Array) -> jax.Array:
    return x + x
