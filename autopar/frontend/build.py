"""Copies out of a traced step what planning needs: a Graph, one op for each equation."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from autopar.frontend.dtypes import type_of
from autopar.frontend.kernels import dims_apart
from autopar.frontend.params import plain_params
from autopar.frontend.regions import is_backward, regions_of
from autopar.frontend.traced import Const, Equation, FlatProgram, TracedStep, refs
from autopar.ir.graph import Graph, Op, Operand, Origin, Plain
from autopar.ir.values import Input, Literal, Role, Value
from autopar.rules import Work, primitive

_WRAPPERS = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|remat|rematted_computation|jit)\(|\)")


def build(traced: TracedStep) -> Graph:
    """The graph of a step: op i of the graph is equation i of the sealed program."""
    program = traced.program
    inputs = tuple(
        Input(_value(ref, aval), role, path)
        for ref, aval, role, path in zip(
            program.inputs, program.input_avals, _roles(traced), traced.input_paths, strict=True
        )
    )
    regions = step_regions(traced)
    return Graph(
        name=traced.name,
        inputs=inputs,
        ops=tuple(_op(e, r) for e, r in zip(program.equations, regions, strict=True)),
        outputs=tuple(_operand(o) for o in program.outputs),
        output_paths=traced.output_paths,
        donated=traced.donated,
    )


def step_regions(traced: TracedStep) -> tuple[str, ...]:
    """The region of each equation of the step."""
    program = traced.program
    pairs = zip(program.inputs, _roles(traced), strict=True)
    fresh = [ref for ref, role in pairs if role is Role.BATCH]
    return regions_of(program, fresh, refs(program.outputs[o] for o, _ in traced.donated))


def _roles(traced: TracedStep) -> list[Role]:
    count = len(traced.program.inputs)
    first_constant = count - len(traced.constants)
    state = set(traced.state_inputs)
    return [
        Role.CONSTANT if i >= first_constant else Role.STATE if i in state else Role.BATCH
        for i in range(count)
    ]


def _body(program: FlatProgram, name: str, holder: Equation, region: str) -> Graph:
    """A loop's body; one that holds a whole backward pass names the region of each op."""
    inputs = zip(program.inputs, program.input_avals, strict=True)
    whole = "transpose(" not in holder.name_stack and is_backward(holder)
    count = len(program.equations)
    regions = regions_of(program, program.inputs) if whole else (region,) * count
    return Graph(
        name=name,
        inputs=tuple(Input(_value(ref, aval)) for ref, aval in inputs),
        ops=tuple(_op(e, r) for e, r in zip(program.equations, regions, strict=True)),
        outputs=tuple(_operand(o) for o in program.outputs),
    )


def _op(equation: Equation, region: str) -> Op:
    kind = equation.primitive.name
    results = tuple(
        _value(ref, aval) for ref, aval in zip(equation.results, equation.result_avals, strict=True)
    )
    first = results[0].name.removeprefix("%") if results else "0"
    graphs = tuple(
        _body(b, f"{kind}_{first}_{i}", equation, region) for i, b in enumerate(equation.bodies)
    )
    return Op(
        kind=kind,
        operands=tuple(_operand(o) for o in equation.operands),
        results=results,
        params=(*plain_params(equation.params), *_constraint(equation), *_grid(equation)),
        flops=_flops(equation, results, graphs),
        origin=Origin(region, module_path(equation.name_stack), equation.line),
        graphs=graphs,
    )


def _constraint(equation: Equation) -> tuple[tuple[str, Plain], ...]:
    """A with_sharding_constraint's spec as plain data: axes for each dim, None where it is open."""
    if equation.primitive.name != "sharding_constraint":
        return ()
    spec = getattr(equation.params["sharding"], "spec", None)
    if spec is None:
        return ()
    rank = len(equation.result_avals[0].shape)
    dims = tuple(_constrained_dim(entry) for entry in (*spec, *(None,) * (rank - len(spec))))
    return (("spec", dims),)


def _grid(equation: Equation) -> tuple[tuple[str, Plain], ...]:
    """Along what a kernel's blocks are computed apart: (tensor, dim, block size) for each."""
    apart = tuple(dims_apart(equation).values())
    return (("grid_apart", apart),) if apart else ()


def _constrained_dim(entry: Any) -> Plain:
    if entry is None:
        return ()
    if entry is PartitionSpec.UNCONSTRAINED:
        return None
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _value(ref: int, aval: Any) -> Value:
    return Value(f"%{ref}", *type_of(aval))


def _operand(operand: int | Const) -> Operand:
    if isinstance(operand, int):
        return f"%{operand}"
    shape, dtype = type_of(operand.aval)
    if shape or jax.dtypes.issubdtype(operand.aval.dtype, jax.dtypes.extended):
        return Literal("opaque", dtype, shape)
    return Literal(repr(np.asarray(operand.value).item()), dtype)


def module_path(name_stack: str) -> str:
    """The user's module path of a name stack: "transpose(jvp(GPT))/Block_0" -> "GPT/Block_0".

    What JAX itself adds is left out, as is the text of an einsum: "bqhd,bkhd->bhqk".
    """
    parts = _WRAPPERS.sub("", name_stack).split("/")
    return "/".join(p for p in parts if p and p != "rematted_computation" and "->" not in p)


def _flops(equation: Equation, results: Sequence[Value], graphs: Sequence[Graph]) -> int:
    kind = equation.primitive.name
    if kind == "dot_general":
        (contract, _), _ = equation.params["dimension_numbers"]
        lhs = equation.operand_shapes[0]
        return 2 * results[0].item_count * math.prod(lhs[d] for d in contract)
    if kind == "conv_general_dilated":
        taps = equation.operand_shapes[1]
        out_features = taps[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2 * results[0].item_count * math.prod(taps) // max(out_features, 1)
    estimate = equation.params.get("cost_estimate")
    if estimate is not None:
        return int(estimate.flops)
    if graphs:
        runs = equation.params["length"] if kind == "scan" else 1
        inner = max if kind == "cond" else sum
        return int(runs) * inner(g.flops for g in graphs)
    work = primitive(kind).work
    if work is Work.NONE or not results:
        return 0
    if work is Work.UPDATES:
        return math.prod(equation.operand_shapes[-1])
    read = map(math.prod, equation.operand_shapes) if work is Work.READS else ()
    return max(*read, *(v.item_count for v in results), 0)
