"""Trace of the user's step, once, on shapes, sealed."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import jax

from autopar.errors import ArgumentError, AutoparError, TraceError, listing
from autopar.frontend.compat import raised_at
from autopar.frontend.trace.arguments import (
    StepSpec,
    check_arrays,
    dynamic_arguments,
    join_static,
    key_text,
    leaf_paths,
    split_static,
)
from autopar.frontend.trace.graph import build, structural_key
from autopar.frontend.trace.inline import flatten
from autopar.frontend.trace.state import donated_pairs, state_pairs
from autopar.frontend.traced import FlatProgram, TracedStep
from autopar.ir.graph import Graph

_SHOWN_SHAPES = 6
# Set while a step is traced, for the code that is called in it; never for longer.
_PLAIN = ContextVar("plain", default=False)


@contextmanager
def plain_steps() -> Generator[None]:
    """Within it a parallel step that is called is the plain function: the outer plan holds."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def wants_plain_steps() -> bool:
    """True if the code that asks runs within `plain_steps`."""
    return _PLAIN.get()


def trace(spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedStep:
    """Trace the step on concrete or abstract arguments; no device is touched.

    Raises TraceError, with the user's own exception as its cause, where the function does not
    trace; ArgumentError where an argument is neither array nor declared static, or where the
    declared state does not come back.
    """
    sealed = seal(spec, args, kwargs)
    graph = build(sealed)
    return replace(sealed, key=structural_key(graph), graph=graph)


def with_state(traced: TracedStep, paths: Collection[str]) -> TracedStep:
    """The step with the inputs of these paths as state too, though they may not come back."""
    state = {i for i, path in enumerate(traced.input_paths) if path in paths}
    if state <= set(traced.state_inputs):
        return traced
    held = replace(traced, state_inputs=tuple(sorted(state | {*traced.state_inputs})))
    graph = build(held)
    return replace(held, key=structural_key(graph), graph=graph)


def seal(spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedStep:
    """The step as `trace` gives it, but with no graph and no key yet."""
    arguments = dynamic_arguments(spec, args, kwargs)
    check_arrays(spec, arguments)
    traced = _trace(spec, args, kwargs)
    closed = traced.jaxpr
    paths = leaf_paths(arguments)
    if len(paths) != len(closed.jaxpr.invars):
        raise ArgumentError(
            f"{spec.name} was traced with {len(closed.jaxpr.invars)} arrays but its arguments hold "
            f"{len(paths)}: name its static arguments to autopar too (static_argnums=...)."
        )
    program, constants = flatten(closed, spec.kept)
    _check_checks(spec, program)
    outputs, _ = jax.tree_util.tree_flatten_with_path(traced.out_info)
    donated = state_pairs(spec, args, arguments, traced.out_info, program) or donated_pairs(traced)
    return TracedStep(
        name=spec.name,
        program=program,
        constants=constants,
        in_tree=jax.tree_util.tree_structure(split_static(spec, args, kwargs)),
        out_tree=traced.out_tree,
        input_paths=(*paths, *(f"const/{i}" for i in range(len(constants)))),
        output_paths=tuple("/".join(map(key_text, path)) or "out" for path, _ in outputs),
        state_inputs=tuple(sorted(i for _, i in donated)),
        donated=donated,
        key="",
        graph=Graph(spec.name, (), (), ()),
    )


def _trace(spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    fun: Any = spec.fun
    numbers, names = spec.static(args)
    shapes, named = unplaced(spec, args, kwargs)
    try:
        if not isinstance(fun, jax.stages.Wrapped):
            fun = jax.jit(fun, static_argnums=numbers, static_argnames=names)
        with plain_steps():
            return fun.trace(*shapes, **named)
    except AutoparError:
        raise
    except (Exception, SystemExit) as error:
        raise TraceError(
            f"{spec.name} does not trace: {type(error).__name__}: "
            f"{(str(error).strip().splitlines() or [''])[0]}{raised_at(error)}\n"
            f"It was called with {_shapes(spec, args, kwargs)}.\n"
            "A step must run under jax.jit on these shapes (nnx.jit or eqx.filter_jit where it "
            "takes such objects); try that on it first."
        ) from error


def unplaced(
    spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with arrays as their types alone.

    Where arrays lie would add reshards of its own to the trace, and who keeps them would keep
    their memory.
    """
    types = jax.tree_util.tree_map(_type_alone, split_static(spec, args, kwargs))
    return join_static(spec, args, kwargs, types)


def _check_checks(spec: StepSpec, program: FlatProgram) -> None:
    """Raise TraceError for a `checkify.check` that nothing has made a value of: no jit takes it."""
    lines = [e.line or "?" for e in program.walk() if e.primitive.name == "check"]
    if lines:
        raise TraceError(
            listing(
                f"{spec.name} calls checkify.check, which jax.jit does not run as it stands.",
                [f"at {line}" for line in dict.fromkeys(lines)],
                "Return its error from the step: err, out = checkify.checkify(f)(*args).",
            )
        )


def _type_alone(leaf: Any) -> Any:
    is_array = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    if not is_array and getattr(leaf, "__jax_array__", None) is None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def _shapes(spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The types of the arguments; of those with many arrays, such as a model, their number."""
    texts: list[str] = []
    for argument in dynamic_arguments(spec, args, kwargs):
        leaves = jax.tree_util.tree_leaves(argument.tree)
        if len(leaves) > _SHOWN_SHAPES:
            texts.append(f"{argument.name} ({len(leaves)} arrays)")
            continue
        for path, leaf in zip(leaf_paths([argument]), leaves, strict=True):
            kind, shape = getattr(leaf, "dtype", type(leaf).__name__), getattr(leaf, "shape", ())
            texts.append(f"{path} {kind}{list(shape)}")
    return ", ".join(texts) or "no arrays"
