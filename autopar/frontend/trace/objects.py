"""Objects of equinox and flax.nnx among a step's arguments, as trees of arrays and back.

JAX hands a step trees of arrays. An equinox model also holds constants as leaves, such as its
activation functions; an nnx model is a graph of objects that the step changes in place. Here both
become trees of arrays before anything is traced, and what a step returns becomes objects again.
Neither library is imported: where the user has not done so, there are no objects of it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeGuard

import jax

from autopar.errors import ArgumentError, TraceError
from autopar.frontend.trace.arguments import StepSpec, dynamic_arguments, key_text

_IN_PLACE = "autopar.in_place"  # the tag under which nnx tells what becomes of which object


@dataclass(frozen=True)
class PureCall:
    """A step and its arguments as trees of arrays, and what makes objects of its result.

    `token` is what else a trace depends on: the graph of each argument of nnx objects, by its name.
    A call with no objects is as it was.
    """

    spec: StepSpec
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    token: tuple[tuple[str, Any], ...] = ()
    close: Callable[[Any], Any] | None = None

    def constants(self) -> Iterator[tuple[str, Any]]:
        """The static arguments, and the static parts of objects, by path."""
        numbers, names = self.spec.static(self.args)
        parameters = self.spec.parameters()
        for i in numbers:
            if i < len(self.args):
                yield parameters[i] if i < len(parameters) else f"arg{i}", self.args[i]
        yield from ((k, v) for k, v in self.kwargs.items() if k in names)
        for argument in dynamic_arguments(self.spec, self.args, self.kwargs):
            leaves, _ = jax.tree_util.tree_flatten_with_path(argument.tree, is_leaf=_is_constant)
            for path, leaf in leaves:
                if _is_constant(leaf):
                    yield "/".join([argument.name, *map(key_text, path)]), leaf.value
        for name, graph in self.token:
            yield from _attributes(name, iter(graph.nodes), iter(graph.attributes))


def pure_call(spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any]) -> PureCall:
    """The call as trees of arrays.

    Raises ArgumentError where a constant cannot be hashed, or a library has no way to say it.
    """
    plain = PureCall(spec, tuple(args), kwargs)
    nnx, eqx = _imported("flax.nnx"), _imported("equinox")
    if nnx is None and eqx is None:
        return plain
    dynamic = {a.name: a.tree for a in dynamic_arguments(spec, args, kwargs)}
    if nnx is not None:
        changing = tuple(name for name, tree in dynamic.items() if _holds_graph(tree, nnx))
        if changing:
            return _nnx_call(nnx, plain, changing)
    if eqx is not None:
        is_filtered = _is_filtered(spec.fun)
        structures = map(jax.tree_util.tree_structure, dynamic.values())
        if is_filtered or any(_structure_holds(s, (eqx.Module,), ()) for s in structures):
            return _equinox_call(eqx, plain, is_filtered)
    return plain


def pure_creation(
    create: Callable[..., Any],
) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """A function that makes a state's arrays alone, and one that makes objects of those."""
    nnx, eqx = _imported("flax.nnx"), _imported("equinox")

    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        made = create(*args, **kwargs)
        if nnx is not None and _holds_graph(made, nnx):
            graph, state = nnx.split(made)
            return state, Constant(graph)
        return made if eqx is None else _with_constants(eqx, made, _is_filtered(create))

    def closed(made: Any) -> Any:
        match made:
            case (state, Constant(graph)) if nnx is not None and isinstance(graph, nnx.GraphDef):
                return nnx.merge(graph, state)
            case _:
                return without_constants(made)

    return created, closed


def opened_state(state: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A state's arrays alone, as a tree, and what makes its objects of such a tree again."""
    created, closed = pure_creation(lambda: state)
    match created():
        case (arrays, Constant() as graph) if _imported("flax.nnx") is not None:
            return arrays, lambda made: closed((made, graph))
        case arrays:
            return arrays, closed


def is_array(leaf: Any) -> bool:
    """True if a leaf is an array of any make, or the shape of one; Python numbers are none."""
    return getattr(leaf, "dtype", None) is not None and getattr(leaf, "shape", None) is not None


# -- finding objects -----------------------------------------------------------------------


def _imported(name: str) -> ModuleType | None:
    """A module that the user's program has imported, whole."""
    module = sys.modules.get(name)
    partly = module is not None and getattr(module.__spec__, "_initializing", False)
    return None if partly else module


def _holds_graph(tree: Any, nnx: ModuleType) -> bool:
    """True if a tree has nodes that nnx lets a step change; a State is handed over by value.

    Modules that are no pytrees are leaves to JAX.
    """
    kinds = (nnx.Pytree, nnx.Variable)
    leaves, structure = jax.tree_util.tree_flatten(tree)
    return _structure_holds(structure, kinds, (nnx.State, nnx.GraphDef)) or any(
        isinstance(leaf, kinds) for leaf in leaves
    )


@functools.lru_cache(maxsize=256)
def _structure_holds(structure: Any, kinds: tuple[type, ...], closed: tuple[type, ...]) -> bool:
    data = structure.node_data()
    if data is None or issubclass(data[0], closed):
        return False
    return issubclass(data[0], kinds) or any(
        _structure_holds(child, kinds, closed) for child in structure.children()
    )


# -- equinox -------------------------------------------------------------------------------


class Constant:
    """A node of a tree with no arrays in it: a value that is part of the tree's structure."""

    __match_args__ = ("value",)
    __slots__ = ("_key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        # 0.0 == -0.0 and 1 == True, which make other programs.
        exact = repr(value) if isinstance(value, float | complex) else value
        self._key = (type(value), exact)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return False
        return self.value is other.value or bool(self._key == other._key)

    def __repr__(self) -> str:
        return f"Constant({self.value!r})"


jax.tree_util.register_static(Constant)


def _is_constant(node: Any) -> TypeGuard[Constant]:
    return isinstance(node, Constant)


def _is_filtered(fun: Any) -> bool:
    """True if equinox's filter_jit made the function: it takes anything, anywhere."""
    kind = type(fun)
    return kind.__module__.startswith("equinox.") and getattr(kind, "lower", None) is not None


def _equinox_call(eqx: ModuleType, call: PureCall, everywhere: bool) -> PureCall:
    """Leaves of equinox modules that are no arrays become constants; under filter_jit all do.

    Numbers are among them: an equinox layer may ask whether its dropout rate is 0.
    """
    spec, fun = call.spec, call.spec.fun
    numbers, names = spec.static(call.args)
    if isinstance(fun, jax.stages.Wrapped):  # jax.jit itself takes arrays alone
        return call

    def given(tree: Any) -> Any:
        return _with_constants(eqx, tree, everywhere)

    @functools.wraps(fun, updated=())
    def step(*args: Any, **kwargs: Any) -> Any:
        args = tuple(a if i in numbers else without_constants(a) for i, a in enumerate(args))
        named = {k: a if k in names else without_constants(a) for k, a in kwargs.items()}
        return given(fun(*args, **named))

    step.__name__ = spec.name
    return PureCall(
        replace(spec, fun=step, result_of=without_constants),
        tuple(a if i in numbers else given(a) for i, a in enumerate(call.args)),
        {k: a if k in names else given(a) for k, a in call.kwargs.items()},
        close=without_constants,
    )


def _with_constants(eqx: ModuleType, tree: Any, everywhere: bool) -> Any:
    def kept(leaf: Any) -> Any:
        return leaf if is_array(leaf) or _is_constant(leaf) else _constant(leaf)

    def opened(node: Any) -> Any:
        if everywhere or isinstance(node, eqx.Module):
            return jax.tree_util.tree_map(kept, node, is_leaf=_is_constant)
        return node

    return jax.tree_util.tree_map(
        opened, tree, is_leaf=lambda n: isinstance(n, eqx.Module | Constant)
    )


def _constant(value: Any) -> Constant:
    made = Constant(value)
    try:
        hash(made)
    except TypeError:
        raise ArgumentError(
            f"a model holds a {type(value).__name__}, which is no array and cannot be hashed, so a "
            "step cannot be told from another by it. Make it a field with "
            "eqx.field(static=True) of a type that can, such as a tuple, or an array."
        ) from None
    return made


def without_constants(tree: Any) -> Any:
    """The tree with every Constant as the value that it holds."""
    return jax.tree_util.tree_map(
        lambda node: node.value if _is_constant(node) else node, tree, is_leaf=_is_constant
    )


# -- nnx -----------------------------------------------------------------------------------


def _nnx_call(nnx: ModuleType, call: PureCall, changing: tuple[str, ...]) -> PureCall:
    """The arrays of nnx objects apart from their graph, which the step returns anew.

    It is what nnx.jit does: objects that several arguments share stay shared, a step may change
    variables, replace them and add new ones, and what it returns may be one of its arguments.
    Arguments of which nothing has changed are not returned.
    """
    spec = call.spec
    held = [a for a in dynamic_arguments(spec, call.args, call.kwargs) if a.name in changing]
    nodes = tuple(a.tree for a in held)
    with nnx.split_context() as context:
        graphs, states = _split(context, nodes)
    fun, bare = spec.fun, None
    # jax.jit drops changes in place, so the function that it was given runs; nnx.jit carries them.
    if isinstance(fun, jax.stages.Wrapped) and not type(fun).__module__.startswith("flax."):
        bare = getattr(fun, "__wrapped__", None)

    def taken(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(kwargs[a.name] if a.name in kwargs else args[a.position] for a in held)

    def put(
        args: Sequence[Any], kwargs: dict[str, Any], values: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        placed, named = list(args), dict(kwargs)
        for argument, value in zip(held, values, strict=True):
            if argument.name in named:
                named[argument.name] = value
            else:
                placed[argument.position] = value
        return tuple(placed), named

    @functools.wraps(fun, updated=())
    def step(*args: Any, **kwargs: Any) -> Any:
        given = taken(args, kwargs)
        with nnx.merge_context() as context:
            outer = _merged(context, graphs, given)
        with nnx.update_context(_IN_PLACE):
            with nnx.split_context(_IN_PLACE) as context:
                context_graphs, copies = _split(context, outer)
            with nnx.merge_context(_IN_PLACE, inner=True) as context:
                inner = _merged(context, context_graphs, copies)
            args, kwargs = put(args, kwargs, inner)
            result = (bare or fun)(*args, **kwargs)
            with nnx.split_context(_IN_PLACE) as context:
                made, after = _split(context, inner)
                if _holds_graph(result, nnx):
                    (graph,), (result,) = _split(context, (result,))
                    made = (*made, graph)
        # A state is unchanged if the very same values are in the same places.
        changed: dict[str, Any] = {}
        for argument, old, new in zip(held, given, after, strict=True):
            before, now = jax.tree_util.tree_leaves(old), jax.tree_util.tree_leaves(new)
            structures: list[Any] = [jax.tree_util.tree_structure(tree) for tree in (old, new)]
            same = structures[0] == structures[1]
            if not same or any(a is not b for a, b in zip(before, now, strict=True)):
                changed[argument.name] = new
        if changed and bare is not None:
            raise TraceError(
                f"{spec.name} changes {' and '.join(changed)} in place, and jax.jit drops such "
                "changes: it would never learn. Let nnx carry them:\n"
                "    @autopar.parallelize\n"
                "    @nnx.jit\n"
                f"    def {spec.name}(...): ..."
            )
        return result, changed, Constant(made)

    step.__name__ = spec.name

    def close(result: Any) -> Any:
        out, changed, made = result
        after = [changed.get(a.name, old) for a, old in zip(held, states, strict=True)]
        is_object = len(made.value) > len(held)
        if is_object:
            after.append(out)
        with nnx.update_context(_IN_PLACE):
            with nnx.split_context(_IN_PLACE) as context:
                _split(context, nodes)
            with nnx.merge_context(_IN_PLACE, inner=False) as context:
                again = _merged(context, made.value, after)
        return again[-1] if is_object else out

    args, kwargs = put(call.args, call.kwargs, states)
    spec = replace(spec, fun=step, result_of=lambda made: made[0])
    return PureCall(spec, args, kwargs, tuple(zip(changing, graphs, strict=True)), close)


def changed_in_place(call: PureCall, result: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of nnx objects that came back with a call's result, by path.

    So do static attributes that are others than before.
    """
    _, changed, made = result
    for name, state in changed.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
            yield "/".join([name, *map(key_text, path)]), leaf
    for (name, before), after in zip(call.token, made.value, strict=False):
        graphs = (before, after)
        old, new = (dict(_attributes(name, iter(g.nodes), iter(g.attributes))) for g in graphs)
        for where, value in new.items():
            if where in old and value is not old[where] and value != old[where]:
                yield where, Constant(value)


def _attributes(
    path: str, nodes: Iterator[Any], attributes: Iterator[tuple[Any, Any]]
) -> Iterator[tuple[str, Any]]:
    """The static attributes of the next node of an nnx graph and of those below, by path."""
    for _ in range(getattr(next(nodes, None), "num_attributes", 0)):
        name, attribute = next(attributes)
        kind = type(attribute).__name__
        if kind == "Static" and not str(name).startswith("_pytree__"):
            yield f"{path}/{name}", attribute.value
        elif kind == "NodeAttr":
            yield from _attributes(f"{path}/{name}", nodes, attributes)


def _split(context: Any, nodes: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The graph and the state of each object; what one shares with those before is in theirs."""
    pairs = [context.split(node) for node in nodes]
    return tuple(g for g, _ in pairs), tuple(s for _, s in pairs)


def _merged(context: Any, graphs: Sequence[Any], states: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(context.merge(g, s) for g, s in zip(graphs, states, strict=True))
