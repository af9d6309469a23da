"""Compiles functions over flat arrays to machine code through numba, with their types kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., object])

# Minima are vectorized only where no value is taken to be a NaN; sums keep their order, so that
# every machine finds the same. Inner loops go along slices: of an index that is a sum it is asked
# at every step if it is below zero, and so counts from the end.
_OPTIONS = {"cache": True, "nogil": True, "fastmath": {"nnan", "nsz"}}


def compiled(function: _Function) -> _Function:
    """The function as machine code, kept in a cache beside its file, without Python's lock.

    It is compiled at its first call: importing numba takes a second.
    """

    @cache
    def build() -> Callable[..., object]:
        return _build(function)

    @wraps(function)
    def run(*args: object) -> object:
        return build()(*args)

    return cast(_Function, run)


def internal(function: _Function) -> _Function:
    """The same for a function that only machine code calls; it imports numba at once."""
    # Without a way in from Python a function compiles in half the time.
    return cast(_Function, _build(function, no_cpython_wrapper=True, no_cfunc_wrapper=True))


def _build(function: Callable[..., object], **more: bool) -> Callable[..., object]:
    import numba

    compiler = cast(Callable[..., Callable[[object], Callable[..., object]]], numba.njit)
    return compiler(**_OPTIONS, **more)(function)
