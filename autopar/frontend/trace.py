"""Traces the user's step once, on shapes, and finds which arguments are state."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autopar.errors import ArgumentError, TraceError
from autopar.frontend.build import build
from autopar.frontend.inline import flatten
from autopar.frontend.traced import TracedStep
from autopar.ir.graph import Graph


@dataclass(frozen=True)
class StepSpec:
    """How to call the user's function: which arguments are static, which are state.

    `state_argnums` None means: found by matching arguments with outputs of the same tree.
    """

    fun: Callable[..., Any]
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    state_argnums: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The function's own name."""
        return str(getattr(self.fun, "__name__", type(self.fun).__name__))


def trace(spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedStep:
    """Trace the step on concrete or abstract arguments; no device is touched.

    Raises TraceError, with the user's own exception as its cause, where the function does not
    trace; ArgumentError where the declared state does not come back.
    """
    traced = _trace(spec, args, kwargs)
    closed = traced.jaxpr
    dynamic = split_static(spec, args, kwargs)
    flat, in_tree = jax.tree_util.tree_flatten_with_path(dynamic)
    if len(flat) != len(closed.jaxpr.invars):
        raise ArgumentError(
            f"{spec.name} was traced with {len(closed.jaxpr.invars)} arrays but its arguments hold "
            f"{len(flat)}: name its static arguments to autopar too (static_argnums=...)."
        )
    names = _argument_names(spec, args)
    pairs = _state_pairs(spec, dynamic, traced)
    donated = _declared_donations(traced) if pairs is None else pairs
    program = flatten(closed)
    sealed = TracedStep(
        name=spec.name,
        program=program,
        constants=tuple(closed.consts),
        in_tree=in_tree,
        out_tree=traced.out_tree,
        input_paths=(*(_path(p, names) for p, _ in flat), *(f"const/{i}" for i in _count(closed))),
        output_paths=tuple(_output_paths(traced.out_info)),
        state_inputs=tuple(sorted(i for _, i in donated)),
        donated=donated,
        key="",
    )
    return replace(sealed, key=structural_key(build(sealed)))


def _count(closed: Any) -> range:
    return range(len(closed.consts))


def _trace(spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    fun: Any = spec.fun
    if not hasattr(fun, "trace"):
        fun = jax.jit(
            fun, static_argnums=spec.static_argnums, static_argnames=spec.static_argnames
        )
    try:
        return fun.trace(*args, **kwargs)
    except Exception as error:
        raise TraceError(
            f"{spec.name} does not trace: {type(error).__name__}: {_first_line(error)}\n"
            f"It was called with {_shapes(args, kwargs)}.\n"
            "A step must run under jax.jit on these shapes; try jax.jit on it first."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _shapes(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    texts = [f"{getattr(x, 'dtype', type(x).__name__)}{list(getattr(x, 'shape', ()))}" for x in leaves]
    shown = ", ".join(texts[:6])
    return shown + (f" and {len(texts) - 6} more arrays" if len(texts) > 6 else "")


def split_static(
    spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that carry arrays: static ones left out."""
    static = {n % len(args) if n < 0 else n for n in spec.static_argnums} if args else set()
    names = _signature_names(spec)
    named = {i for i, n in enumerate(names[: len(args)]) if n in spec.static_argnames}
    positional = tuple(a for i, a in enumerate(args) if i not in static | named)
    return positional, {k: v for k, v in kwargs.items() if k not in spec.static_argnames}


def _signature_names(spec: StepSpec) -> list[str]:
    try:
        return list(inspect.signature(spec.fun).parameters)
    except (TypeError, ValueError):
        return []


def _argument_names(spec: StepSpec, args: Sequence[Any]) -> tuple[str, ...]:
    names = _signature_names(spec)
    padded = [names[i] if i < len(names) else f"arg{i}" for i in range(len(args))]
    positional, _ = split_static(spec, padded, {})
    return positional


def _path(path: tuple[Any, ...], names: Sequence[str]) -> str:
    """A key path into (args, kwargs) as text, the argument's name first."""
    where, which, *rest = path
    is_positional = getattr(where, "idx", 0) == 0
    head = names[which.idx] if is_positional else str(which.key)
    return "/".join([head, *(_key_text(k) for k in rest)])


def _key_text(key: Any) -> str:
    for field in ("key", "name", "idx"):
        value = getattr(key, field, None)
        if value is not None:
            return str(value)
    return str(key)


def _output_paths(out_info: Any) -> list[str]:
    flat, _ = jax.tree_util.tree_flatten_with_path(out_info)
    return ["/".join(_key_text(k) for k in path) or "out" for path, _ in flat]


def _declared_donations(traced: Any) -> tuple[tuple[int, int], ...]:
    """Pairs for a function that its user jitted with donation: same type, in order."""
    infos = jax.tree_util.tree_leaves(traced.args_info, is_leaf=lambda x: hasattr(x, "donated"))
    outs = jax.tree_util.tree_leaves(traced.out_info)
    free = dict(enumerate(outs))
    pairs: list[tuple[int, int]] = []
    for i, info in enumerate(infos):
        match = next((o for o, out in free.items() if info.donated and _alike(out, info)), None)
        if match is not None:
            del free[match]
            pairs.append((match, i))
    return tuple(sorted(pairs))


def _state_pairs(
    spec: StepSpec, dynamic: tuple[tuple[Any, ...], dict[str, Any]], traced: Any
) -> tuple[tuple[int, int], ...] | None:
    """(flat output, flat input) pairs of the state, or None if only donations tell.

    An argument is state when an output has its tree, shapes and dtypes. A lone array counts
    only as the first argument or next to other state: a batch may look like a prediction.
    """
    arguments = [*dynamic[0], *dynamic[1].values()]
    starts = _starts(arguments)
    pieces = _output_pieces(traced.out_info)
    pairs: list[tuple[int, int]] = []
    previous = True
    for position, argument in enumerate(arguments):
        wanted = spec.state_argnums is None or position in spec.state_argnums
        lone = jax.tree_util.tree_structure(argument).num_leaves == 1
        match = _matching(argument, pieces) if wanted and (previous or not lone) else None
        if match is None and spec.state_argnums is not None and wanted:
            raise ArgumentError(
                f"argument {position} of {spec.name} was declared state, but no output has its "
                "tree, shapes and dtypes. Return the new state, or leave it out of state_argnums."
            )
        previous = match is not None
        if match is not None:
            start, tree = pieces.pop(match)
            count = jax.tree_util.tree_structure(tree).num_leaves
            pairs.extend((start + k, starts[position] + k) for k in range(count))
    return tuple(sorted(pairs)) if pairs else None


def _starts(trees: Sequence[Any]) -> list[int]:
    starts, total = [], 0
    for tree in trees:
        starts.append(total)
        total += jax.tree_util.tree_structure(tree).num_leaves
    return starts


def _output_pieces(out: Any) -> list[tuple[int, Any]]:
    """The whole output and its children, each with its first flat index."""
    children = jax.tree_util.tree_leaves(out, is_leaf=lambda x: x is not out)
    return [(0, out), *zip(_starts(children), children, strict=True)]


def _matching(argument: Any, pieces: Sequence[tuple[int, Any]]) -> int | None:
    leaves, tree = jax.tree_util.tree_flatten(argument)
    if not leaves:
        return None
    for k, (_, piece) in enumerate(pieces):
        others, other_tree = jax.tree_util.tree_flatten(piece)
        if tree == other_tree and all(map(_alike, others, leaves)):
            return k
    return None


def _alike(left: Any, right: Any) -> bool:
    return _aval_of(left) == _aval_of(right)


def _aval_of(leaf: Any) -> tuple[tuple[int, ...], str]:
    shaped = leaf if hasattr(leaf, "dtype") else jax.typeof(leaf)
    return tuple(shaped.shape), str(shaped.dtype)


def structural_key(graph: Graph) -> str:
    """A hash of what the step computes: ops, shapes, params and paths, but no source lines."""
    digest = hashlib.sha256()
    for given in graph.inputs:
        digest.update(str(given).encode())
    for op in graph.walk():
        head = (op.kind, op.operands, op.results, op.params, op.origin.region)
        digest.update(repr(head).encode())
    digest.update(repr((graph.outputs, graph.donated)).encode())
    return digest.hexdigest()
