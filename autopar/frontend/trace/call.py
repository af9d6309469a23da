"""The arguments of a call, flat, and the signature that a trace depends on."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from autopar.errors import ArgumentError, shown
from autopar.frontend.compat import trace_settings
from autopar.frontend.trace.arguments import (
    StepSpec,
    canonical_dtype,
    check_arrays,
    check_hashes,
    dynamic_arguments,
    leaf_paths,
    split_static,
)
from autopar.frontend.trace.objects import PureCall, changed_in_place, pure_call
from autopar.frontend.traced import TracedStep


@dataclass(frozen=True)
class CallFacts:
    """The facts of a call that its trace depends on, by path: the types of arrays, and constants.

    It keeps no array of the call alive.
    """

    types: Mapping[str, str]
    constants: Mapping[str, Any]

    def other_types(self, before: CallFacts) -> list[str]:
        """The arrays that are of another type than before, such as "x is f32[8] and was f32[4]"."""
        old = before.types
        return [f"{p} is {t} and was {old[p]}" for p, t in self.types.items() if old.get(p, t) != t]

    def other_constants(self, before: CallFacts) -> list[str]:
        """The constants that are others than before; of objects with no text of their own, that."""
        old = before.constants
        pairs = ((p, v, old[p]) for p, v in self.constants.items() if p in old)
        return [_another(p, now, was) for p, now, was in pairs if now is not was and now != was]


class Signature(NamedTuple):
    """The types of a call's arguments, its constants, and JAX's settings in its thread.

    A `with` block may change these for one thread.
    """

    arguments: Hashable
    settings: tuple[Hashable, ...]


@dataclass(frozen=True)
class Call:
    """A call as trees of arrays, its arrays in order, and the signature that its trace depends on.

    It makes objects of its result, where the `pure` call stands for one of objects.
    """

    pure: PureCall
    leaves: tuple[Any, ...]
    signature: Signature

    @property
    def spec(self) -> StepSpec:
        """The step on trees of arrays."""
        return self.pure.spec

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments by position."""
        return self.pure.args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments by name."""
        return self.pure.kwargs

    def facts(self) -> CallFacts:
        """The types of its arrays, and its constants."""
        paths = leaf_paths(dynamic_arguments(self.spec, self.args, self.kwargs))
        pairs = zip(paths, map(_type_of, self.leaves), strict=True)
        types = {path: f"{dtype}{list(shape)}" for path, (shape, dtype) in pairs}
        return CallFacts(types, dict(self.pure.constants()))

    def changes(self, traced: TracedStep) -> Iterator[str]:
        """The paths of what the step changes in place of nnx objects: arrays, static attributes."""
        if not self.pure.token:
            return
        outputs, given = traced.program.outputs, {*traced.program.inputs}
        numbers = jax.tree_util.tree_unflatten(traced.out_tree, range(len(outputs)))
        for path, found in changed_in_place(self.pure, numbers):
            if not isinstance(found, int) or outputs[found] not in given:
                yield path

    def rebuild(self, result: Any) -> Any:
        """Make the user's objects of a result, and bring those that were given up to date."""
        return result if self.pure.close is None else self.pure.close(result)


def read_call(spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """Flatten a call's dynamic arguments; static ones are part of the signature as they are.

    Raises ArgumentError where an argument is no tree of arrays, or a static one has no hash.
    """
    try:
        pure = pure_call(spec, args, kwargs)
        positional, named = split_static(spec, pure.args, pure.kwargs)
        leaves, tree = jax.tree_util.tree_flatten((positional, named))
    except (TypeError, ValueError) as error:
        raise ArgumentError(_no_tree(spec, args, kwargs, error)) from error
    try:
        types = _types_of(leaves)
    except (TypeError, OverflowError):
        check_arrays(spec, dynamic_arguments(spec, pure.args, pure.kwargs))
        raise
    static = tuple((type(args[i]), args[i]) for i in spec.static(args)[0] if i < len(args))
    extra = tuple((k, type(v), v) for k, v in sorted(kwargs.items()) if k not in named)
    if static or extra:
        check_hashes(spec, args, kwargs)
    signature = Signature((tree, types, static, extra, pure.token), trace_settings())
    return Call(pure, tuple(leaves), signature)


def _another(path: str, value: object, old: object) -> str:
    """A constant that differs, in words; functions by the name that they have in the source."""
    now, before = (getattr(v, "__qualname__", None) or shown(v) for v in (value, old))
    if now == before or " at 0x" in now:
        return f"{path} is another {type(value).__name__} object"
    return f"{path} is {now} and was {before}"


def _no_tree(spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any], error: Exception) -> str:
    """Describe the first argument that JAX cannot take apart."""
    for argument in dynamic_arguments(spec, args, kwargs):
        try:
            jax.tree_util.tree_structure(argument.tree)
        except (TypeError, ValueError) as own:
            return f"{argument.name} of {spec.name} is no tree that JAX can take apart: {own}"
    return f"the arguments of {spec.name} are no trees that JAX can take apart: {error}"


def _types_of(leaves: Sequence[Any]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """The type of each leaf; in one go where all are arrays, for this is done at every call."""
    try:
        return tuple([(leaf.shape, canonical_dtype(leaf.dtype)) for leaf in leaves])
    except AttributeError:
        return tuple(map(_type_of, leaves))


def _type_of(leaf: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype as JAX will see them: a Python scalar is the array it becomes in a step.

    A count that starts as the number 0 so comes back from the first step with the same type.
    Raises TypeError or OverflowError where JAX has no such array.
    """
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None or shape is None:
        return (), str(jax.typeof(leaf).dtype)
    return tuple(shape), canonical_dtype(dtype)
