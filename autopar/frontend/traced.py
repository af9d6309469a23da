"""The step as JAX traced it, flattened and sealed: only the runtime opens it again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from autopar.ir.control_flow import ControlFlow, control_flow
from autopar.ir.graph import Graph

Ref = int  # a value of the program by number; numbers are unique over all nested programs


@dataclass(frozen=True)
class Const:
    """A literal operand: a scalar that JAX wrote into the equation, or an array in a body."""

    value: Any
    aval: Any


def refs(operands: Iterable[Ref | Const]) -> Iterator[Ref]:
    """The operands that are values of the program."""
    return (o for o in operands if isinstance(o, int))


def rename(
    operands: Sequence[Ref | Const], names: Mapping[Ref, Ref | Const]
) -> tuple[Ref | Const, ...]:
    """Operands under other names, where there are any."""
    return tuple(names.get(o, o) if isinstance(o, int) else o for o in operands)


@dataclass(frozen=True)
class Equation:
    """A primitive with its parameters; nested jaxprs are held flattened in `bodies`."""

    primitive: jex.Primitive
    params: dict[str, Any]
    operands: tuple[Ref | Const, ...]
    operand_shapes: tuple[tuple[int, ...], ...]
    results: tuple[Ref, ...]
    result_avals: tuple[Any, ...]
    bodies: tuple[FlatProgram, ...]
    name_stack: str
    line: str
    has_effects: bool = False  # kept though nothing may read its results: prints, callbacks, writes

    def is_same(self, other: Equation, operands: Sequence[Ref | Const]) -> bool:
        """True if it does what another does, were it to read these operands.

        One that holds more than plain data is not looked into.
        """
        return (
            self.primitive is other.primitive
            and self.operand_shapes == other.operand_shapes
            and not (self.bodies or self.has_effects)
            and len(operands) == len(other.operands)
            and all(
                a is b or (a == b and isinstance(a, int))
                for a, b in zip(operands, other.operands, strict=True)
            )
            and self.has_plain_params
            and self.params == other.params
            and self.result_avals == other.result_avals
        )

    @cached_property
    def has_plain_params(self) -> bool:
        """True if its parameters are numbers, names and tuples of such, which compare."""
        return all(map(_is_plain, self.params.values()))

    @cached_property
    def control_flow(self) -> ControlFlow | None:
        """The ports through which values enter and leave its bodies; None without bodies."""
        outside = len(self.operands), len(self.results)
        kind = self.primitive.name
        return control_flow(kind, self.params, *outside, len(self.bodies)) if self.bodies else None


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | np.dtype)


@dataclass(frozen=True)
class FlatProgram:
    """A jaxpr with its calls inlined: inputs, equations in order, outputs."""

    inputs: tuple[Ref, ...]
    input_avals: tuple[Any, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Ref | Const, ...]

    def walk(self) -> Iterator[Equation]:
        """The equations, bodies after the equation that holds them."""
        for equation in self.equations:
            yield equation
            for body in equation.bodies:
                yield from body.walk()

    def sharing(self, other: FlatProgram) -> FlatProgram:
        """The program with the equations of another one where they are the same."""
        pairs = zip(other.equations, self.equations, strict=False)
        shared = tuple(
            one if one.results == own.results and own.is_same(one, own.operands) else own
            for one, own in pairs
        )
        return replace(self, equations=(*shared, *self.equations[len(shared) :]))

    def avals(self) -> Iterator[tuple[Ref, Any]]:
        """The values with their types, those of bodies left out."""
        yield from zip(self.inputs, self.input_avals, strict=True)
        for equation in self.equations:
            yield from zip(equation.results, equation.result_avals, strict=True)

    def fresh(self) -> Iterator[Ref]:
        """Numbers that no value of the program has, bodies included."""
        bodies = (body for equation in self.walk() for body in equation.bodies)
        made = (r for equation in self.walk() for r in equation.results)
        given = (r for program in (self, *bodies) for r in program.inputs)
        return itertools.count(1 + max(itertools.chain(made, given), default=-1))


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` (left out) of dim 0 of a flat leaf; all of it where `stop` is None."""

    leaf: int
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class TracedStep:
    """A traced step: its program with the closed-over arrays as last inputs, and its trees.

    `donated` pairs (flat output, flat input) that hold the same piece of state. Where leaves are
    cut, `input_pieces` and `output_pieces` tell what part of which leaf of the trees each input
    and output of the program is, in order; else both are empty. Closed-over arrays count as
    leaves after the arguments'. `notes` tell what cutting cost.
    """

    name: str
    program: FlatProgram
    constants: tuple[Any, ...]  # the closed-over arrays, values of the last inputs
    in_tree: jax.tree_util.PyTreeDef  # of (args, kwargs)
    out_tree: jax.tree_util.PyTreeDef
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    state_inputs: tuple[int, ...]
    donated: tuple[tuple[int, int], ...]
    key: str
    graph: Graph  # op i is equation i of the program; its ops have no rules yet
    input_pieces: tuple[Piece, ...] = ()
    output_pieces: tuple[Piece, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def consumed_inputs(self) -> frozenset[int]:
        """The inputs whose buffers the outputs may take over."""
        return frozenset(i for _, i in self.donated)

    @property
    def state_names(self) -> str:
        """The arguments that hold state, or parts of others that are some, for messages."""
        state = frozenset(self.state_inputs)
        names: dict[str, bool] = {}  # of an argument, True if all of it is state
        for i, path in enumerate(self.input_paths):
            name = path.partition("/")[0]
            names[name] = names.get(name, True) and i in state
        own = (self.input_paths[i] for i in self.state_inputs)
        found = (n if names[n := path.partition("/")[0]] else path for path in own)
        return ", ".join(list(dict.fromkeys(found))[:8]) or "none"

    @property
    def closed_over(self) -> tuple[tuple[str, Any], ...]:
        """The closed-over arrays, each with its path."""
        return tuple((f"const/{i}", array) for i, array in enumerate(self.constants))

    def __str__(self) -> str:
        count = sum(1 for _ in self.program.walk())
        return f"traced {self.name}: {count} equations, key {self.key[:12]}"
