"""Compiles functions over flat arrays to machine code through numba, with their types kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., object])
_Compiler = Callable[..., Callable[[Callable[..., object]], object]]

# Minima are vectorized only where no value is taken to be a NaN; sums keep their order, so that
# every machine finds the same. Without a way in from Python a function compiles in half the time.
_compiler = cast(_Compiler, numba.njit)
_MATH = {"nnan", "nsz"}
_build = _compiler(cache=True, nogil=True, fastmath=_MATH)
_build_internal = _compiler(
    cache=True, nogil=True, fastmath=_MATH, no_cpython_wrapper=True, no_cfunc_wrapper=True
)


def compiled(function: _Function) -> _Function:
    """The function as machine code, kept in a cache beside its file, without Python's lock."""
    return cast(_Function, _build(function))


def internal(function: _Function) -> _Function:
    """The same for a function that only machine code calls."""
    return cast(_Function, _build_internal(function))
