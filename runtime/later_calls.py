"""Makes the calls of Python that were taken out of a step, with what it gives at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from autopar.frontend.traced import Const, Equation, FlatProgram
from autopar.runtime.local.rebind import rebind


class LaterCaller:
    """One program of one device, which JAX runs as it does the calls of a plain step."""

    def __init__(self, calls: FlatProgram, device: Any) -> None:
        self._device = device
        self._run = jax.jit(lambda *given: _evaluated(calls, given) and None)

    def __call__(self, operands: Sequence[Any]) -> None:
        """Make the calls, on the whole values of these arrays."""
        self._run(*(self._whole(o) for o in operands))

    def _whole(self, array: Any) -> Any:
        if isinstance(array, jax.Array) and array.is_fully_replicated:
            array = array.addressable_data(0)  # moved without waiting for it
        return jax.device_put(array, self._device)


def _evaluated(program: FlatProgram, given: Sequence[Any]) -> list[Any]:
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
        _evaluated(body, [*given[:consts], *slices])
        return carry, None

    lax.scan(trip, None, list(given[consts:]), scan.params["length"], scan.params["reverse"])
    return ()


def _cond(cond: Equation, given: Sequence[Any]) -> Sequence[Any]:
    def branch(body: FlatProgram) -> Any:
        return lambda *operands: _evaluated(body, operands) and None

    lax.switch(given[0], [branch(b) for b in cond.bodies], *given[1:])
    return ()
