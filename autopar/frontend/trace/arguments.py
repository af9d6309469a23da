"""The step's signature: which arguments are static, and what each array in them is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from linecache import getline
from pathlib import Path
from types import CodeType
from typing import Any

import jax
import numpy as np

from autopar.errors import ArgumentError

_DECORATED = 40  # lines that decorators may take
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class StepSpec:
    """The user's function, with its static arguments and its state.

    `state_argnums` None means: found by matching arguments with outputs of the same tree. All
    numbers count the function's parameters, static ones too, and those below 0 from the end.
    Primitives named in `kept` stay as they are, though they stand for a program of others: the
    user has rules for them. Where `fun` stands in for a function of objects, `result_of` takes the
    trees that the user is given out of what it returns.
    """

    fun: Callable[..., Any]
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    state_argnums: tuple[int, ...] | None = None
    kept: frozenset[str] = frozenset()
    result_of: Callable[[Any], Any] | None = None

    @property
    def name(self) -> str:
        """The function's own name."""
        fun: Any = self.fun
        while isinstance(fun, partial):
            fun = fun.func
        return str(getattr(fun, "__name__", type(fun).__name__))

    @property
    def code(self) -> CodeType | None:
        """The code of the user's own function, whatever is wrapped around it."""
        fun: Any = self.fun
        while isinstance(fun, partial):
            fun = fun.func
        return getattr(inspect.unwrap(fun), "__code__", None)

    @property
    def place(self) -> str:
        """The place of the function's definition: " (file.py:line)", or ""."""
        code = self.code
        return f" ({Path(code.co_filename).name}:{defined_at(code)[0]})" if code else ""

    def parameters(self) -> tuple[str, ...]:
        """Names of the function's positional parameters."""
        return self._parameters

    @cached_property
    def _parameters(self) -> tuple[str, ...]:
        try:  # at every call this would be most of its time
            signature = inspect.signature(self.fun)
        except (TypeError, ValueError):
            return ()
        return tuple(n for n, p in signature.parameters.items() if p.kind in _POSITIONAL)

    def static(self, args: Sequence[Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Positions and names of the static arguments, each found from the other."""
        names = self.parameters()
        numbers = self._counted(self.static_argnums, args)
        named = {names.index(n) for n in self.static_argnames if n in names}
        positions = sorted(numbers | named)
        found = {names[i] for i in positions if i < len(names)} | set(self.static_argnames)
        return tuple(positions), tuple(sorted(found))

    def declares_state(self, argument: Argument, args: Sequence[Any]) -> bool:
        """True if `state_argnums` names the argument."""
        return argument.position in self._counted(self.state_argnums or (), args)

    def _counted(self, numbers: Sequence[int], args: Sequence[Any]) -> set[int]:
        count = max(len(args), len(self.parameters()))
        return {n + count if n < 0 else n for n in numbers}


def defined_at(code: CodeType) -> tuple[int, str]:
    """The line on which a function is defined, below its decorators, and the text there."""
    first = code.co_firstlineno
    lines = ((n, getline(code.co_filename, n).strip()) for n in range(first, first + _DECORATED))
    found = (at for at in lines if at[1].startswith(("def ", "async def ")))
    return next(found, (first, getline(code.co_filename, first).strip()))


@dataclass(frozen=True)
class Argument:
    """A dynamic argument: its name, its position in the signature (-1: none), its tree."""

    name: str
    position: int
    tree: Any


def split_static(
    spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that carry arrays: static ones left out."""
    positions, names = spec.static(args)
    positional = tuple(a for i, a in enumerate(args) if i not in positions)
    return positional, {k: v for k, v in kwargs.items() if k not in names}


def join_static(
    spec: StepSpec,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    dynamic: tuple[Sequence[Any], dict[str, Any]],
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with others in place of those that `split_static` gives."""
    numbers, _ = spec.static(args)
    positional, named = dynamic
    rest = iter(positional)
    return [a if i in numbers else next(rest) for i, a in enumerate(args)], {**kwargs, **named}


def dynamic_arguments(
    spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Argument, ...]:
    """The arguments that carry arrays, in the order in which JAX flattens them."""
    positions, _ = spec.static(args)
    names = spec.parameters()
    found = [
        Argument(names[i] if i < len(names) else f"arg{i}", i, tree)
        for i, tree in enumerate(args)
        if i not in positions
    ]
    for name, tree in sorted(split_static(spec, args, kwargs)[1].items()):
        found.append(Argument(name, names.index(name) if name in names else -1, tree))
    return tuple(found)


def leaf_paths(arguments: Sequence[Argument]) -> tuple[str, ...]:
    """The path of each array: the argument's name, then the keys of its tree."""
    return tuple(
        "/".join([a.name, *map(key_text, path)])
        for a in arguments
        for path, _ in jax.tree_util.tree_flatten_with_path(a.tree)[0]
    )


def key_text(key: Any) -> str:
    """A key of a tree's path: a dict's key, a field's name or an index."""
    for field in ("key", "name", "idx"):
        value = getattr(key, field, None)
        if value is not None:
            return str(value)
    return str(key)


def check_arrays(spec: StepSpec, arguments: Sequence[Argument]) -> None:
    """Raise ArgumentError unless every leaf is an array, a number or the shape of one."""
    leaves = jax.tree_util.tree_leaves([a.tree for a in arguments])
    for path, leaf in zip(leaf_paths(arguments), leaves, strict=True):
        fault = _fault(leaf)
        if fault:
            name = path.split("/")[0]
            raise ArgumentError(
                f"{path} of {spec.name} {fault}.\n"
                f"If {name} is a constant of the step, say static_argnames={name!r}; if {name} is "
                "a model that holds functions or settings, pass its arrays alone."
            )


def check_hashes(spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise ArgumentError where a static argument cannot be hashed: a trace is kept by it."""
    positions, names = spec.static(args)
    parameters = spec.parameters()
    static = [(parameters[i] if i < len(parameters) else f"arg{i}", args[i])
              for i in positions if i < len(args)]  # fmt: skip
    for name, value in [*static, *((k, v) for k, v in kwargs.items() if k in names)]:
        try:
            hash(value)
        except TypeError:
            raise ArgumentError(
                f"{name} of {spec.name} is static and of type {type(value).__name__}, which cannot "
                "be hashed. A constant of the step must be hashable: a tuple, a frozen dataclass."
            ) from None


def _fault(leaf: Any) -> str:
    """Why a leaf cannot be handed to a traced step, or ""."""
    try:
        type_of_leaf(leaf)
    except TypeError:
        kind = type(leaf).__name__
        dtype = getattr(leaf, "dtype", None)
        of = f" of dtype {dtype}" if dtype is not None else ""
        return f"is of type {kind}{of}, which is no array" + (" of numbers" if of else "")
    except OverflowError:
        return f"is the number {leaf}, too large for {jax.dtypes.result_type(leaf)}"
    return ""


def type_of_leaf(leaf: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an array, a number or the shape of an array."""
    if getattr(leaf, "dtype", None) is None or getattr(leaf, "shape", None) is None:
        leaf = jax.typeof(leaf)
    canonical_dtype(leaf.dtype)
    return tuple(leaf.shape), str(leaf.dtype)


@lru_cache(maxsize=256)
def canonical_dtype(dtype: Any) -> str:
    """A dtype as JAX computes in it; raises TypeError for text, dates, objects and records."""
    is_a = jax.dtypes.issubdtype
    if is_a(dtype, jax.dtypes.extended):
        return str(dtype)
    if not (is_a(dtype, np.number) or is_a(dtype, np.bool_) or dtype == jax.dtypes.float0):
        raise TypeError(f"JAX has no arrays of {dtype}")
    return str(jax.dtypes.canonicalize_dtype(dtype))
