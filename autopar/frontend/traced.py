"""The step as JAX traced it, flattened and sealed: only the runtime opens it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

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


@dataclass(frozen=True)
class Equation:
    """One primitive with its parameters; nested jaxprs are held flattened in `bodies`."""

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


@dataclass(frozen=True)
class FlatProgram:
    """A jaxpr with its calls inlined: inputs, equations in order, outputs."""

    inputs: tuple[Ref, ...]
    input_avals: tuple[Any, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Ref | Const, ...]

    def walk(self) -> Iterator[Equation]:
        """Every equation, bodies after the equation that holds them."""
        for equation in self.equations:
            yield equation
            for body in equation.bodies:
                yield from body.walk()


@dataclass(frozen=True)
class TracedStep:
    """A traced step: its program with the closed-over arrays as last inputs, and its trees.

    `donated` pairs (flat output, flat input) that hold the same piece of state.
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

    def __str__(self) -> str:
        count = sum(1 for _ in self.program.walk())
        return f"traced {self.name}: {count} equations, key {self.key[:12]}"
