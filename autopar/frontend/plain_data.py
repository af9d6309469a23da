"""Types and parameters as plain data: float32 is f32, a typed random key is key<fry>."""

from __future__ import annotations

import dataclasses
import enum
import math
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autopar.ir.graph import Plain

_SHORT = {"float": "f", "int": "i", "uint": "u", "complex": "c", "bfloat": "bf"}


def type_of(aval: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an abstract value; one that is no array (a token) is a scalar."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return (), "token"
    return _plain_type(aval.shape, dtype)


@lru_cache(maxsize=65536)
def _plain_type(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], str]:
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


# -- parameters -----------------------------------------------------------------------------------


# Bodies travel as graphs; names and shardings of the user's own mesh mean nothing to the planner.
_DROPPED = frozenset(
    {
        "jaxpr", "call_jaxpr", "cond_jaxpr", "body_jaxpr", "branches", "update_jaxpr", "policy",
        "fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun", "num_consts_fun", "ctx_mesh", "ft_in", "ft_out",
        "np_printoptions", "_split_transpose",
    }
)  # fmt: skip


_PLAIN = frozenset({bool, int, str, type(None)})


def plain_params(params: dict[str, Any]) -> tuple[tuple[str, Plain], ...]:
    """Parameters as sorted (name, plain value) pairs; what has no plain form is left out.

    Named tuples (dimension numbers) become tuples of (field, value) pairs, enums their name,
    dtypes our short names; numbers that are not finite become text, as nan equals nothing.
    Nothing that could print an address gets through.
    """
    pairs: list[tuple[str, Plain]] = []
    for name in sorted(params):
        if name in _DROPPED:
            continue
        known, value = _plain(params[name])
        if known and value is not None:
            pairs.append((name, value))
    return tuple(pairs)


def _plain(value: Any) -> tuple[bool, Plain]:
    if type(value) in _PLAIN:  # nearly all
        return True, value
    if isinstance(value, enum.Enum):
        return True, value.name
    if isinstance(value, np.integer | np.floating | np.bool_):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return True, repr(value)
    if value is None or isinstance(value, bool | int | float | str):
        return True, value
    if isinstance(value, np.dtype):
        return True, dtype_name(value)
    if isinstance(value, type) and issubclass(value, np.generic):
        return True, dtype_name(np.dtype(value))
    fields = getattr(value, "_fields", None)
    if fields is not None:
        return _pairs([(f, getattr(value, f)) for f in fields])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _pairs([(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)])
    if isinstance(value, tuple | list):
        items = [_plain(v) for v in value]
        return all(k for k, _ in items), tuple(v for _, v in items)
    return False, None


def _pairs(fields: list[tuple[str, Any]]) -> tuple[bool, Plain]:
    items = [(name, _plain(value)) for name, value in fields]
    return all(k for _, (k, _) in items), tuple((name, v) for name, (_, v) in items)
