"""A compiled program that is called without JAX's Python gives the same, whatever it calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.frontend import compat


def _plain(x: Any) -> Any:
    return jnp.sin(x) + 1.0


def _calling_python(x: Any) -> Any:
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1.0


@pytest.mark.parametrize("fun", [_plain, _calling_python])
def test_it_gives_what_the_compiled_program_gives(fun: Any) -> None:
    compiled = jax.jit(fun).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()
    given = jnp.arange(4, dtype=jnp.float32)
    call = compat.direct(compiled)
    for _ in range(3):  # what JAX does at a first call it does not do later
        np.testing.assert_array_equal(call(given), compiled(given))


def test_it_refuses_what_the_compiled_program_refuses() -> None:
    compiled = jax.jit(_plain).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()
    with pytest.raises(TypeError, match=r"float32\[4\].*float32\[5\]"):
        compat.direct(compiled)(jnp.zeros(5, jnp.float32))
