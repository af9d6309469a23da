"""Python that a step calls on the host: called from one device, so once, with whole values.

Under shard_map JAX calls it from every device. Here the first device along all axes that the call
leaves idle makes it, inside a `cond`, and the listing's all-reduce hands its results on: the
others have nothing that could change them.

A function that raises would end its device's program while the others wait in a collective, and
XLA then ends the process. So what it raises is kept, the step goes on with placeholders, and the
executor raises it when no device waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from autopar.frontend.traced import Const, Equation, FlatProgram
from autopar.ir.host_calls import HOST_CALLS, is_ordered_call
from autopar.runtime.local import Local, rebind


class HostCalls:
    """The calls of a compiled step, and what their functions have raised."""

    def __init__(self, equations: Iterable[Equation] = ()) -> None:
        found = tuple(equations)
        self._are_any, self._give_results = bool(found), any(e.results for e in found)
        self._raised: list[BaseException] = []
        self._shown = jax.jit(lambda _: io_callback(self._show, None), keep_unused=True)

    @classmethod
    def of(cls, program: FlatProgram) -> HostCalls:
        """The calls of a program, bodies included."""
        return cls(e for e in program.walk() if e.primitive.name in HOST_CALLS)

    def guarded(self, fun: Callable[..., Any], kinds: Sequence[Any]) -> Callable[..., Any]:
        """The function with placeholders for its results where it raises."""

        def call(*given: Any) -> Any:
            try:
                return _fitting(fun(*given), kinds)
            except BaseException as error:  # also what ends a debugger or a program
                self._raised.append(error)
                return [np.zeros(k.shape, k.dtype) for k in kinds]

        return call

    def before(self) -> None:
        """Raise what a function raised in an earlier step, before another starts."""
        self._raise_kept()

    def after(self, outputs: Sequence[Any]) -> None:
        """See that what a function raises is heard of, given a step's outputs.

        A step that uses results of calls is waited for, as all that it gives may be made of
        placeholders. For any other a program of one device raises it once the step has run, so
        that `jax.effects_barrier` does.
        """
        if not self._are_any:
            return
        if self._give_results:
            jax.block_until_ready(outputs)
            self._raise_kept()
        elif here := [array for array in outputs if array.addressable_shards]:
            smallest = min(here, key=lambda array: array.nbytes)
            self._shown(smallest.addressable_data(0))

    def _raise_kept(self) -> None:
        kept, self._raised = self._raised, []
        if kept:
            raise kept[0]

    def _show(self) -> None:
        if self._raised:
            raise self._raised[0]


def _fitting(results: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
    """Results as JAX would take them; raises RuntimeError where they are not what was declared."""
    arrays = [np.asarray(r) for r in results]
    arrays = [a.astype(jax.dtypes.canonicalize_dtype(a.dtype), copy=False) for a in arrays]
    found, declared = ([(tuple(k.shape), k.dtype) for k in side] for side in (arrays, kinds))
    if found != declared:
        raise RuntimeError(f"a callback was to return {declared} (shape, dtype), and gave {found}")
    return arrays


def run_host_call(
    equation: Equation, operands: Sequence[Any], local: Local, calls: HostCalls
) -> Sequence[Any]:
    """The call on this device's pieces, made by the first device along the idle axes."""
    used = {a for s in (*local.operands, *local.results) for dim in s.dims for a in dim}
    idle = [a for a in local.mesh.names if a not in used and local.mesh.size((a,)) > 1]
    kinds = [
        jax.ShapeDtypeStruct(local.result_shape(i), aval.dtype)
        for i, aval in enumerate(equation.result_avals)
    ]
    call = _call(equation, kinds, calls)
    if not idle:
        return list(call(*operands))
    return list(
        lax.cond(
            local.shard_index(idle) == 0,
            lambda *given: list(call(*given)),
            lambda *_: [_nothing(k) for k in kinds],
            *map(jnp.asarray, operands),
        )
    )


def _nothing(kind: Any) -> Any:
    """A value that changes none that it is combined with: by the largest, or, or sum."""
    least: Any = 0
    if jnp.issubdtype(kind.dtype, jnp.floating):
        least = jnp.asarray(-jnp.inf, kind.dtype)
        info: Any = jnp.finfo
        least = jnp.where(jnp.isnan(least), info(kind.dtype).min, least)  # some f8 have no infinity
    elif jnp.issubdtype(kind.dtype, jnp.integer):
        info = jnp.iinfo
        least = info(kind.dtype).min
    return jnp.full(kind.shape, least, kind.dtype)


def _call(equation: Equation, kinds: Sequence[Any], calls: HostCalls) -> Callable[..., Any]:
    """The call as JAX is to make it.

    An ordered print becomes an ordered io_callback, as JAX has no ordered prints on several
    devices; then all ordered calls are in one order.
    """
    kind, params = equation.primitive.name, equation.params
    if kind == "buffer_callback":
        return lambda *given: rebind(equation, given)
    if kind in ("io_callback", "pure_callback"):
        fun = calls.guarded(params["callback"], kinds)
    else:
        impl: Any = equation.primitive.impl
        fun = calls.guarded(lambda *given: impl(*given, **params), kinds)
    if kind == "pure_callback":
        return lambda *given: jax.pure_callback(fun, kinds, *given)
    return lambda *given: io_callback(fun, kinds, *given, ordered=is_ordered_call(params))


# -- calls that wait for the end of the step ---------------------------------------------------


class LaterCaller:
    """A program of one device, which JAX runs as it does the calls of a plain step."""

    def __init__(self, calls: FlatProgram, device: Any) -> None:
        self._device = device
        self._run = jax.jit(lambda *given: _evaluate(calls, given) and None)

    def __call__(self, operands: Sequence[Any]) -> None:
        """Make the calls, on the whole values of these arrays."""
        self._run(*(self._whole(o) for o in operands))

    def _whole(self, array: Any) -> Any:
        if isinstance(array, jax.Array) and array.is_fully_replicated:
            array = array.addressable_data(0)  # moved without waiting for it
        return jax.device_put(array, self._device)


def _evaluate(program: FlatProgram, given: Sequence[Any]) -> list[Any]:
    env = dict(zip(program.inputs, given, strict=True))

    def read(operand: int | Const) -> Any:
        return operand.value if isinstance(operand, Const) else env[operand]

    for equation in program.equations:
        run = {"scan": _scan, "cond": _cond}.get(equation.primitive.name, rebind)
        made = run(equation, [read(o) for o in equation.operands])
        env.update(zip(equation.results, made, strict=True))
    return [read(o) for o in program.outputs]


def _scan(scan: Equation, given: Sequence[Any]) -> Sequence[Any]:
    consts, body = scan.params["num_consts"], scan.bodies[0]

    def trip(carry: None, slices: Sequence[Any]) -> tuple[None, None]:
        _evaluate(body, [*given[:consts], *slices])
        return carry, None

    lax.scan(trip, None, list(given[consts:]), scan.params["length"], scan.params["reverse"])
    return ()


def _cond(cond: Equation, given: Sequence[Any]) -> Sequence[Any]:
    def branch(body: FlatProgram) -> Any:
        return lambda *operands: _evaluate(body, operands) and None

    lax.switch(given[0], [branch(b) for b in cond.bodies], *given[1:])
    return ()
