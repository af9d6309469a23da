"""Short names of dtypes: float32 is f32, a typed random key is key<fry>."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax

_SHORT = {"float": "f", "int": "i", "uint": "u", "complex": "c", "bfloat": "bf"}


def type_of(aval: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an abstract value; one that is no array (a token) is a scalar."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return (), "token"
    return _typed(aval.shape, dtype)


@lru_cache(maxsize=65536)
def _typed(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], str]:
    return tuple(int(n) for n in shape), dtype_name(dtype)


@lru_cache(maxsize=1024)
def dtype_name(dtype: Any) -> str:
    """The short name that graphs print: bf16, f32, i32, bool, key<fry>, f8e4m3fn."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return str(dtype)
    if dtype == jax.dtypes.float0:
        return "float0"
    name = str(jax.numpy.dtype(dtype))
    if name.startswith("float8_"):
        return "f8" + name.removeprefix("float8_")
    stem = name.rstrip("0123456789")
    return _SHORT.get(stem, stem) + name[len(stem) :]
