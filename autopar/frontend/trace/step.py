"""Trace of the user's step, once, on shapes, sealed; and its state, found among the arguments.

step(params, moments, batch) -> (params', (moments', loss))
     0       1        2          0         1         2

params' has params' tree and types, and comes from it through values of its shape: the pair
(output 0, input 0). loss has the type of no argument that is more than a number.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Generator, Iterator, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from autopar.errors import ArgumentError, AutoparError, TraceError, bulleted
from autopar.frontend.compat import goes_through, name_stack_of, raised_at
from autopar.frontend.trace.arguments import (
    Argument,
    StepSpec,
    check_arrays,
    dynamic_arguments,
    join_static,
    key_text,
    leaf_paths,
    split_static,
    type_of_leaf,
)
from autopar.frontend.trace.graph import build, is_backward, structural_key
from autopar.frontend.trace.inline import flatten
from autopar.frontend.trace.written_out import CALLS
from autopar.frontend.traced import Equation, FlatProgram, Ref, TracedStep, refs
from autopar.ir.graph import Graph
from autopar.rules import HEAVY

_RAW_KEY = ((2,), "uint32")

Pairs = tuple[tuple[int, int], ...]  # (flat output, flat input)


@dataclass(frozen=True)
class _Piece:
    """A tree within the arguments or outputs, and the flat index of its first leaf."""

    tree: Any
    start: int

    @property
    def structure(self) -> Any:
        return jax.tree_util.tree_structure(self.tree)

    @property
    def leaves(self) -> list[Any]:
        return jax.tree_util.tree_leaves(self.tree)

    @property
    def range(self) -> range:
        return range(self.start, self.start + len(self.leaves))

    def children(self) -> Iterator[_Piece]:
        """The trees one level down."""
        start = self.start
        for child in jax.tree_util.tree_leaves(self.tree, is_leaf=lambda x: x is not self.tree):
            yield _Piece(child, start)
            start += len(jax.tree_util.tree_leaves(child))


def state_pairs(
    spec: StepSpec,
    args: Sequence[Any],
    arguments: Sequence[Argument],
    outputs: Any,
    program: FlatProgram,
) -> Pairs:
    """The pairs of the declared state, or of what looks like state where none is declared.

    An argument looks like state where an output has its tree, shapes and dtypes and some leaf of
    it is made from the old one item by item: a prediction may have the batch's shape, but comes
    from it through products. What a training step tells of its data, such as what is left of it
    after a prediction, is no state: `_Search._tells_of_data`. Keys need only depend on the old
    ones; a number that stands alone is no state, as any loss looks like it. Raises ArgumentError
    where declared state does not come back.
    """
    search = _Search(program, _pieces(outputs))
    pieces = list(_Piece([a.tree for a in arguments], 0).children())
    # Declared state must come back.
    if spec.state_argnums is not None:
        for argument, piece in zip(arguments, pieces, strict=True):
            if spec.declares_state(argument, args) and not search.claims(piece, declared=True):
                raise ArgumentError(_lost_state(spec, argument, piece, search.outputs))
    else:
        # Else the largest trees choose first, as parameters and moments have leaves of the same
        # types; and whole arguments before parts of one, as targets may look like a weight.
        largest = sorted(pieces, key=lambda p: -len(p.leaves))
        left = [piece for piece in largest if not search.claims(piece) and len(piece.leaves) > 1]
        is_beside = bool(search.pairs)  # what is left is most likely the batch
        for child in (child for piece in left for child in piece.children()):
            search.claims(child, in_data=is_beside)
    return tuple(sorted(search.pairs))


def donated_pairs(traced: Any) -> Pairs:
    """Pairs for a function that its user jitted with donation: same type, in order."""
    free = dict(enumerate(map(type_of_leaf, jax.tree_util.tree_leaves(traced.out_info))))
    pairs: list[tuple[int, int]] = []
    for i, info in enumerate(jax.tree_util.tree_leaves(traced.args_info)):
        match = next((o for o, t in free.items() if info.donated and t == type_of_leaf(info)), None)
        if match is not None:
            del free[match]
            pairs.append((match, i))
    return tuple(sorted(pairs))


def _pieces(outputs: Any) -> list[_Piece]:
    """The whole output, then its parts, the outer ones first."""
    found = [_Piece(outputs, 0)]
    for piece in found:  # grows as it goes
        if not jax.tree_util.all_leaves([piece.tree]):
            found.extend(piece.children())
    return found


class _Search:
    """Claims outputs for arguments, each output once."""

    def __init__(self, program: FlatProgram, outputs: Sequence[_Piece]) -> None:
        self._program = program
        self._taken: set[int] = set()
        self._reached: dict[int, tuple[set[Ref], list[Equation]]] = {}
        self.outputs = outputs
        self.pairs: list[tuple[int, int]] = []

    def claims(self, piece: _Piece, *, declared: bool = False, in_data: bool = False) -> bool:
        """True if the argument comes back; its pairs are noted where it does.

        A part of an argument that is no state itself may be one `in_data`.
        """
        leaves = piece.leaves
        if not leaves:
            return True
        for output in self.outputs:
            # An output replaces one argument only; of several the outermost, then the first.
            free = self._taken.isdisjoint(output.range)
            if not free or not _alike(output, piece):
                continue
            if declared or self._carries(piece, output, in_data):
                self._taken.update(output.range)
                self.pairs.extend(zip(output.range, piece.range, strict=True))
                return True
        return False

    def _carries(self, piece: _Piece, output: _Piece, in_data: bool) -> bool:
        kinds = list(map(type_of_leaf, piece.leaves))
        # A number that stands alone looks like any loss.
        if len(kinds) == 1 and not _is_key(kinds[0]) and math.prod(kinds[0][0]) == 1:
            return False
        return any(
            self._is_in(o, self._behind(i))
            if _is_key(kind)
            else self._comes_from(i, o) and not self._tells_of_data(piece, i, o, in_data)
            for i, o, kind in zip(piece.range, output.range, kinds, strict=True)
        )

    def _behind(self, given: int) -> Set[Ref]:
        """The values that are made of an input, however that may be."""
        reached: set[Ref] = {self._program.inputs[given]}
        for equation in self._program.equations:
            if not reached.isdisjoint(refs(equation.operands)):
                reached.update(equation.results)
        return reached

    def _comes_from(self, given: int, made: int) -> bool:
        """True if the output is made from the input through values of its own shape alone."""
        return self._is_in(made, self._reach(given)[0])

    def _is_in(self, made: int, values: Set[Ref]) -> bool:
        goal = self._program.outputs[made]
        return isinstance(goal, int) and goal in values

    def _reach(self, given: int) -> tuple[set[Ref], list[Equation]]:
        """The values that are made from an input item by item, and the equations that read them.

        w' = w - lr * g comes from w through values of its shape; a prediction comes through
        products or look-ups, which mix the items of what they read.
        """
        if given in self._reached:
            return self._reached[given]
        shape = self._program.input_avals[given].shape
        reached: set[Ref] = {self._program.inputs[given]}
        readers: list[Equation] = []
        for equation in self._program.equations:
            if reached.isdisjoint(refs(equation.operands)):
                continue
            readers.append(equation)
            if not _mixes(equation):
                results = zip(equation.results, equation.result_avals, strict=True)
                reached.update(r for r, aval in results if getattr(aval, "shape", ()) == shape)
        self._reached[given] = reached, readers
        return reached, readers

    def _tells_of_data(self, piece: _Piece, given: int, made: int, in_data: bool) -> bool:
        """True if a training step's output is rather made of its data than an update of state.

        It is known before any gradient, as statistics are that are brought up to date, yet what it
        comes from is labels that come back as they are, or is multiplied by the forward pass, or
        has as many rows as what is and tells in the gradients, or it comes from more arrays of the
        kind:

            left = x - f(x @ w)    losses = -log(p) * mask    reached = reward + v * (1 - done)

        A memory is multiplied, too, but written into at some places.
        """
        if not self._after_backward or self._is_in(made, self._after_backward):
            return False
        if in_data:
            return True
        reached, readers = self._reach(given)
        if any(_writes_into(equation, reached) for equation in readers):
            return False
        avals, program = self._program.input_avals, self._program
        is_same = program.outputs[made] == program.inputs[given]
        if (is_same and avals[given].dtype.kind in "iub") or self._is_multiplied(given):
            return True
        paired = {i for _, i in self.pairs}
        others = {i: a for i, a in enumerate(avals) if i not in paired and i != given}
        for i, aval in others.items():
            is_alike = type_of_leaf(aval) == type_of_leaf(avals[given])
            if is_alike and i not in piece.range and self._comes_from(i, made):
                return True
            has_as_many = aval.shape[:1] == avals[given].shape[:1] != ()
            if has_as_many and self._is_multiplied(i) and not self._comes_back(i):
                return self._matters(given)
        return False

    def _matters(self, given: int) -> bool:
        """True if an update depends on an input, as it does on masks and not on statistics."""
        made = self._behind(given) & self._after_backward
        return any(self._is_in(o, made) for o in range(len(self._program.outputs)))

    def _comes_back(self, given: int) -> bool:
        """True if some output of an input's type is made from it item by item."""
        kind, whole = type_of_leaf(self._program.input_avals[given]), self.outputs[0]
        alike = (o for o, leaf in enumerate(whole.leaves) if type_of_leaf(leaf) == kind)
        return any(self._comes_from(given, o) for o in alike)

    def _is_multiplied(self, given: int) -> bool:
        """True if a product or look-up reads what is made from an input item by item."""
        return any(map(_mixes, self._reach(given)[1]))

    @cached_property
    def _after_backward(self) -> Set[Ref]:
        """The values that are made of some gradient."""
        reached = set[Ref]()
        for equation in self._program.equations:
            if is_backward(equation) or not reached.isdisjoint(refs(equation.operands)):
                reached.update(equation.results)
        return reached


def _mixes(equation: Equation) -> bool:
    """True for products and look-ups, whose results are made of many items of what they read."""
    return equation.primitive.name == "gather" or equation.primitive.name in HEAVY


def _writes_into(equation: Equation, memory: Set[Ref]) -> bool:
    """True if it writes into one of these values at some places."""
    name, (first, *_) = equation.primitive.name, (*equation.operands, None)
    writes = name == "dynamic_update_slice" or name.startswith("scatter")
    return writes and isinstance(first, int) and first in memory


def _is_key(kind: tuple[tuple[int, ...], str]) -> bool:
    return kind[1].startswith("key<") or kind == _RAW_KEY


def _alike(left: _Piece, right: _Piece) -> bool:
    return left.structure == right.structure and all(
        type_of_leaf(a) == type_of_leaf(b) for a, b in zip(left.leaves, right.leaves, strict=True)
    )


def _lost_state(
    spec: StepSpec, argument: Argument, piece: _Piece, outputs: Sequence[_Piece]
) -> str:
    """Describe declared state that does not come back, and how the nearest output differs."""
    message = f"argument {argument.name} of {spec.name} was declared state, but no output has its "
    near = next((o for o in outputs if o.structure == piece.structure), None)
    if near is None:
        message += "tree.\n"
    else:
        message += "shapes and dtypes.\n"
        paths = leaf_paths([argument])
        for path, old, new in zip(paths, piece.leaves, near.leaves, strict=True):
            if type_of_leaf(old) != type_of_leaf(new):
                message += f"* {path} went in as {_show(old)} and came back as {_show(new)}\n"
    return message + "Return the new state, or leave the argument out of state_argnums."


def _show(leaf: Any) -> str:
    shape, dtype = type_of_leaf(leaf)
    return f"{dtype}{list(shape)}"


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
    _warn_of_lost_gradients(spec, closed, program)
    outputs, _ = jax.tree_util.tree_flatten_with_path(traced.out_info)
    donated = state_pairs(spec, args, arguments, traced.out_info, program) or donated_pairs(traced)
    if not outputs:
        raise TraceError(
            f"{spec.name}{spec.place} returns nothing, so that there is nothing to compute.\n"
            "Return the new state, and what else is wanted of a step: `return state, loss`."
        )
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


def _warn_of_lost_gradients(spec: StepSpec, closed: Any, program: FlatProgram) -> None:
    """Warn where a step computes gradients and returns nothing that is made of them.

    So does one that puts its new state into a dict that it was given: that dict is the trace's own.
    """
    if any(map(is_backward, program.equations)):
        return
    if _has_backward_pass(closed.jaxpr):
        warnings.warn(
            f"{spec.name}{spec.place} computes gradients and returns nothing that is made of them. "
            "Of a traced step only what it returns comes out, not what it changes in place: "
            "`return state, loss`.",
            stacklevel=2,
        )


def _has_backward_pass(jaxpr: Any) -> bool:
    """True if a jaxpr, or one that it calls, computes gradients."""
    called = (eqn.params.get(CALLS.get(eqn.primitive.name)) for eqn in jaxpr.eqns)
    return any("transpose(" in name_stack_of(eqn) for eqn in jaxpr.eqns) or any(
        _has_backward_pass(getattr(inner, "jaxpr", inner)) for inner in called if inner is not None
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
        # An error of the call itself, such as a missing argument, is at no line of the function's.
        inside = spec.code is None or goes_through(error, spec.code)
        raise TraceError(
            f"{spec.name} does not trace: {type(error).__name__}: "
            f"{(str(error).strip().splitlines() or [''])[0]}"
            f"{raised_at(error) if inside else spec.place}\n"
            f"It was called with {_shapes(spec, args, kwargs)}.\n"
            f"{_remedy(error)}"
        ) from error


def _remedy(error: BaseException) -> str:
    """The way out of an error: values that are asked for in a step are there when it runs."""
    known = "Values are known only when the step runs. "
    match error:
        case jax.errors.TracerBoolConversionError():
            return f"{known}Write jnp.where(condition, a, b) or jax.lax.cond in place of `if`."
        case jax.errors.TracerIntegerConversionError():
            return (
                f"{known}A count that sets shapes or steers Python is a static argument "
                "(static_argnames=...); else index with jnp.take, loop with jax.lax.fori_loop."
            )
        case jax.errors.TracerArrayConversionError():
            return (
                f"{known}NumPy cannot compute with them: call the jax.numpy function of the name."
            )
        case jax.errors.ConcretizationTypeError():
            return (
                f"{known}Return the array and call float(), int() or .item() on what the step has "
                'returned; to print from within, jax.debug.print("loss {}", loss).'
            )
        case _:
            return (
                "A step must run under jax.jit on these shapes (nnx.jit or eqx.filter_jit where it "
                "takes such objects); try that on it first."
            )


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
            bulleted(
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
