"""Bridges to JAX's private modules and between JAX's versions: no other file has any."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from traceback import walk_tb
from types import CodeType
from typing import Any

import jax
import numpy as np
from jax._src import api_util, clusters, compiler, config, core, distributed, source_info_util
from jax._src.interpreters import mlir, pxla
from jax._src.lib import xla_client
from jaxlib.version import __version__ as jaxlib_version

from autopar.errors import shown
from autopar.ir.compiler_options import PIPELINED

_LIBRARIES = tuple(
    sorted({str(Path(sysconfig.get_paths()[k])) for k in ("purelib", "platlib", "stdlib")})
)
_OWN = str(Path(__file__).parents[1])


def jax_minor() -> str:
    """The JAX release without its patch number, as plans record it: "0.10"."""
    return ".".join(jax.__version__.split(".")[:2])


@lru_cache(maxsize=65536)
def _lines(traceback: Any) -> tuple[str, str]:
    """The innermost "file.py:line" in user code, and in any code that is not JAX's own."""
    first = ""
    for frame in source_info_util.user_frames(traceback):
        text = f"{Path(frame.file_name).name}:{frame.start_line}"
        if not frame.file_name.startswith(_LIBRARIES):
            return text, text
        first = first or text
    return "", first


def line_of(equation: Any, call: str = "") -> str:
    """The user's "file.py:line" of a jaxpr equation.

    Where no user code stands on its traceback, as in the body of a jitted library function, it
    is `call`, the line that called the function; failing that, a library's own line, or "".
    """
    traceback = equation.source_info.traceback
    own, library = _lines(traceback) if traceback is not None else ("", "")
    return own or call or library


def raised_at(error: BaseException) -> str:
    """The innermost line of the user's own on the way of an error: " (file.py:line)", or ""."""
    found, at = "", error.__traceback__
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, _OWN, "<")):
            found = f" ({Path(file).name}:{at.tb_lineno})"
        at = at.tb_next
    return found


def goes_through(error: BaseException, code: CodeType) -> bool:
    """True if an error was raised in a function, or in what it called."""
    return any(frame.f_code is code for frame, _ in walk_tb(error.__traceback__))


def name_stack_of(equation: Any) -> str:
    """The name stack of a jaxpr equation: "transpose(jvp(GPT))/Block_0/Dense_1"."""
    return str(equation.source_info.name_stack)


def params_of(equation: Any) -> dict[str, Any]:
    """The parameters of a jaxpr equation under the names that JAX 0.10 gave them.

    From JAX 0.12 on, scan keeps trees of its operands in place of their numbers.
    """
    params: dict[str, Any] = dict(equation.params)
    if equation.primitive.name == "scan" and "num_consts" not in params:
        consts, carry, _ = params["ft_in"].unpack()
        params["num_consts"], params["num_carry"] = len(list(consts)), len(list(carry))
    return params


def traced_beside(equation: Any, fun: Callable[..., Any]) -> Any:
    """The closed jaxpr of a function of a jaxpr equation's operands.

    Operations that have no line of their own stand on the equation's.
    """
    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in equation.invars
    ]
    with source_info_util.user_context(equation.source_info.traceback):
        return jax.make_jaxpr(fun)(*avals)


def is_kernel(primitive: Any) -> bool:
    """True if a primitive compiles as something else than a JAX function, on some platform."""
    private: Any = mlir
    lowering = getattr(private._lowerings.get(primitive), "rule", None)
    is_function = getattr(lowering, "__qualname__", "") == "lower_fun.<locals>.f_lowered"
    special = private._platform_specific_lowerings.values()
    return not is_function or any(primitive in own for own in special)


def options_for_devices(devices: Sequence[Any]) -> Any:
    """Compile options of a program that is one partition on each of these devices, in order."""
    return compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[d.id for d in devices]]),
    )


def compiler_options(plan: Iterable[tuple[str, bool | int | str]]) -> dict[str, bool | int | str]:
    """A plan's options of XLA under the names that this jaxlib's XLA has for them.

    Since 0.11.1 the pipelining of a kind of collectives is a mode and no longer a switch, of which
    XLA says: on is the mode "on", off the mode "default".
    """
    named = dict(plan)
    if tuple(map(int, re.findall(r"\d+", jaxlib_version)[:3])) < (0, 11, 1):
        return named
    for kind, name in PIPELINED.items():
        if isinstance(switch := named.get(name), bool):
            del named[name]
            mode = "ON" if switch else "DEFAULT"
            named[f"xla_gpu_pipeline_{kind.replace('-', '_')}"] = (
                f"COLLECTIVE_PIPELINING_MODE_{mode}"
            )
    return named


def trace_settings() -> tuple[Hashable, ...]:
    """JAX's settings in this thread on which it depends what a function traces and lowers to."""
    return tuple(config.trace_context())


def other_settings(now: Sequence[object], before: Sequence[object]) -> list[str]:
    """Such settings that are others than before, as "jax_enable_x64 is True and was False"."""
    if now == before:
        return []
    try:
        names = config.trace_context_names()
    except (AttributeError, NotImplementedError):  # JAX before 0.10.2 tells no names
        return ["JAX's settings have changed"]
    rows = zip(names, now, before, strict=False)
    return [f"{name} is {shown(a)} and was {shown(b)}" for name, a, b in rows if a != b]


def invalid_values() -> type[Exception]:
    """The error that a compiled program raises which makes nan or inf where JAX looks for them."""
    return api_util.InternalFloatingPointError


def inside_transform() -> bool:
    """True if JAX is tracing or transforming the code that asks, or is told not to compile it."""
    return not core.trace_state_clean() or runs_uncompiled()


def runs_uncompiled() -> bool:
    """True if `jax.disable_jit()` holds: everything is to run op by op."""
    own: Any = jax.config
    return bool(own.jax_disable_jit)


def compilation_cache_folder() -> str | None:
    """The folder in which JAX keeps compiled programs, where one is set."""
    own: Any = jax.config
    return own.jax_compilation_cache_dir or None


def buffers_of(array: Any) -> frozenset[int]:
    """The addresses of an array's pieces; nobody waits for what they will hold.

    Arrays whose backend tells no addresses share nothing that can be seen.
    """
    whole: Any = array
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        whole = jax.random.key_data(array)
    try:
        return frozenset(piece.unsafe_buffer_pointer() for piece in whole._arrays)
    except jax.errors.JaxRuntimeError:
        return frozenset()


def local_pieces(array: Any) -> Sequence[Any]:
    """An array's piece on each of this process's devices, in the order of its mesh.

    `addressable_data` gives the first one's, whatever it is asked for, where all are alike.
    """
    pieces: Sequence[Any] = array._arrays
    return pieces


def assembler(
    shape: Sequence[int], dtype: Any, sharding: Any
) -> Callable[[Sequence[Any]], jax.Array]:
    """A function that makes one array of its pieces, in the order of its mesh.

    That is `jax.make_array_from_single_device_arrays`, with all that is known before told once.
    """
    private: Any = core
    kind = private.ShapedArray(tuple(shape), np.dtype(dtype))
    aval = private.update_aval_with_sharding(kind, sharding)
    handler: Any = xla_client.array_result_handler
    made: Callable[[Sequence[Any]], jax.Array]
    try:
        made = handler(aval, sharding, committed=True, _skip_checks=True)
    except TypeError:  # JAX from 0.12 on never checks
        made = handler(aval, sharding, committed=True)
    return made


def direct(compiled: Any) -> Callable[..., Any]:
    """A compiled program as JAX calls it in the end, without the Python that stands before that.

    A program that calls Python has nothing of the kind, and stays as it is.
    """
    call: Callable[..., Any] | None = compiled._executable.create_cpp_call(compiled._params)
    return compiled if call is None else call


@lru_cache(maxsize=4096)
def host_putter(shape: Sequence[int], dtype: Any, sharding: Any) -> Callable[[Any], jax.Array]:
    """A function that lays out host arrays of one type on devices of this process.

    That is what `jax.device_put` comes to in the end, at a sixth of its time on the host.
    """
    private: Any = core
    kind = private.ShapedArray(tuple(shape), np.dtype(dtype))
    aval = private.update_aval_with_sharding(kind, sharding)
    placed = sharding.addressable_devices_indices_map(tuple(shape))
    devices, boxes = list(placed), list(placed.values())
    put: Any = pxla.batched_device_put

    def laid(host: Any) -> jax.Array:
        with config.explicit_device_put_scope():  # for jax.transfer_guard
            made: jax.Array = put(aval, sharding, [host[box] for box in boxes], devices)
        return made

    return laid


def key_impl(dtype: Any) -> str:
    """The name of the generator that typed random keys of a dtype are for."""
    return str(dtype._impl.name)


def job_store() -> Any:
    """The key-value store that the processes of a job share; None where there is one process."""
    return distributed.global_state.client


def launched_job(wait_seconds: int) -> tuple[str | None, int | None, int | None]:
    """The job that a launcher which JAX knows has started this process in; None where none has.

    That is the "host:port" of process 0, the number of processes, and the number of this one.
    """
    detect: Any = clusters.ClusterEnv.auto_detect_unset_distributed_params
    address, count, number, _ = detect(None, None, None, [], None, wait_seconds)
    return address, count, number


def coordinator_address() -> str | None:
    """The "host:port" of the process that runs the job's coordination service."""
    return distributed.global_state.coordinator_address


def copier(shardings: Sequence[Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that copies arrays to devices on which they are to lie exactly as they do.

    That is what `jax.device_put` comes to in the end, at a tenth of its time on the host. Typed
    random keys are not arrays in this sense.
    """
    devices: list[Any] = [s._internal_device_list for s in shardings]
    semantics = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(devices)
    copy: Any = xla_client.batched_copy_array_to_devices_with_sharding

    def copied(arrays: Sequence[Any]) -> Sequence[Any]:
        with config.explicit_device_put_scope():  # for jax.transfer_guard
            return copy(list(arrays), devices, list(shardings), semantics)

    return copied


def offerer(server: Any) -> Callable[[int, list[Any]], None]:
    """A transfer server's offer of arrays under a number, without the Python before it."""
    offer: Callable[[int, list[Any]], None] = server._await_pull_flat
    return offer


def puller(connection: Any, kinds: Sequence[Any]) -> Callable[[int], Sequence[Any]]:
    """A function that pulls arrays of these types, offered under a number, over a connection.

    That is what `pull` comes to in the end, at two thirds of its time on the host.
    """
    pull: Any = connection._pull_flat
    backend, listed = next(iter(kinds[0].sharding.device_set)).client, list(kinds)

    def pulled(number: int) -> Sequence[Any]:
        return pull(number, backend, listed)

    return pulled
