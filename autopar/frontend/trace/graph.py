"""The Graph of a traced step: one op for each equation, with its region; and its structural key.

Of a Pallas kernel its grid tells the dims along which blocks are computed each on its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from sys import intern
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jax.sharding import PartitionSpec

from autopar.frontend.plain_data import plain_params, type_of
from autopar.frontend.traced import Const, Equation, FlatProgram, Ref, TracedStep, refs
from autopar.ir.graph import Graph, Op, Operand, Origin, Plain
from autopar.ir.values import Input, Literal, Role, Value
from autopar.rules import primitive

# A place where a dim of the grid shows: which tensor (operands first, then results), which of its
# dims, and how long a block is along it.
Place = tuple[int, int, int]
_ASKS = ("program_id", "num_programs")


def dims_apart(equation: Equation) -> dict[int, tuple[Place, ...]]:
    """For each dim of a kernel's grid that may be cut: the tensor dims that are cut with it.

    Along such a dim block i of every tensor that has it goes with block i of the others, all
    results have it, and the kernel does not ask which block it is at. So no block reads or writes
    what another does: what is left in scratch memory could not have been told from garbage at the
    first of them.
    """
    grid = equation.params.get("grid_mapping")
    if equation.primitive.name != "pallas_call" or grid is None or grid.num_index_operands:
        return {}
    if equation.params.get("mesh") is not None or not all(isinstance(n, int) for n in grid.grid):
        return {}
    first_result = len(equation.operands)
    if len(grid.block_mappings) != first_result + len(equation.results):
        return {}
    # The dims whose index or size the kernel asks for; those of vmap have no number.
    numbered = [d for d in range(len(grid.grid)) if d not in grid.vmapped_dims]
    jaxpr = equation.params["jaxpr"]
    asked = {
        numbered[eqn.params["axis"]]
        for eqn in _equations(getattr(jaxpr, "jaxpr", jaxpr))
        if eqn.primitive.name in _ASKS
    }
    found: dict[int, tuple[Place, ...]] = {}
    for dim in range(len(grid.grid)):
        places = _places(grid, dim)
        written = {tensor for tensor, _, _ in places or () if tensor >= first_result}
        if places and dim not in asked and len(written) == len(equation.results):
            found[dim] = places
    return found


def on_pieces(equation: Equation, shards: Mapping[Place, int]) -> dict[str, Any]:
    """The parameters of a kernel of which a device holds one of so many pieces of some dims."""
    grid, sizes = equation.params["grid_mapping"], list(equation.params["grid_mapping"].grid)
    shapes = [list(m.array_aval.shape) for m in grid.block_mappings]
    for dim, places in dims_apart(equation).items():
        count = shards[places[0]]
        sizes[dim] //= count
        for tensor, along, _ in places:
            shapes[tensor][along] //= count
    mappings = tuple(
        replace(m, array_aval=m.array_aval.update(shape=tuple(shape)))
        for m, shape in zip(grid.block_mappings, shapes, strict=True)
    )
    results = zip(equation.params["out_avals"], shapes[len(equation.operands) :], strict=True)
    return {
        "grid_mapping": replace(grid, grid=tuple(sizes), block_mappings=mappings),
        "out_avals": tuple(aval.update(shape=tuple(shape)) for aval, shape in results),
    }


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for held in eqn.params.values():
            for inner in held if isinstance(held, tuple | list) else (held,):
                if isinstance(inner, jex.Jaxpr | jex.ClosedJaxpr):
                    yield from _equations(getattr(inner, "jaxpr", inner))


def _places(grid: Any, dim: int) -> tuple[Place, ...] | None:
    """The places of a dim of the grid; None if it shows in another way than block by block."""
    places: list[Place] = []
    for tensor, mapping in enumerate(grid.block_mappings):
        jaxpr = mapping.index_map_jaxpr.jaxpr
        index = jaxpr.invars[dim]
        if any(operand is index for eqn in jaxpr.eqns for operand in eqn.invars):
            return None
        along = [d for d, out in enumerate(jaxpr.outvars) if out is index]
        if not along:
            continue
        size = _block_size(mapping.block_shape[along[0]])
        if len(along) > 1 or mapping.array_aval.shape[along[0]] != size * grid.grid[dim]:
            return None
        places.append((tensor, along[0], size))
    return tuple(places)


def _block_size(block: Any) -> int:
    """The length of a block along a dim whose index counts blocks; 0 where it counts otherwise."""
    name = type(block).__name__
    if name == "Squeezed" or block is None:
        return 1
    return int(block.block_size) if name == "Blocked" else int(block) if name == "int" else 0


_WRAPPERS = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|remat|rematted_computation|jit)\(|\)")


def build(traced: TracedStep, like: TracedStep | None = None) -> Graph:
    """The graph of a step: op i of the graph is equation i of the sealed program.

    Equations that are those of another step, which it is `like`, have that one's ops.
    """
    program = traced.program
    given = zip(like.program.equations, like.graph.ops, strict=True) if like is not None else ()
    known = {id(e): op for e, op in given}
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
        ops=tuple(
            op if (op := known.get(id(e))) is not None and op.origin.region == r else _op(e, r)
            for e, r in zip(program.equations, regions, strict=True)
        ),
        outputs=tuple(_operand(o) for o in program.outputs),
        output_paths=traced.output_paths,
        donated=traced.donated,
    )


def step_regions(traced: TracedStep) -> tuple[str, ...]:
    """The region of each equation of the step."""
    program = traced.program
    pairs = zip(program.inputs, _roles(traced), strict=True)
    fresh = [ref for ref, role in pairs if role is Role.BATCH]
    return _regions_of(program, fresh, refs(program.outputs[o] for o, _ in traced.donated))


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
    regions = _regions_of(program, program.inputs) if whole else (region,) * count
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
    params = [*plain_params(equation.params), *_constraint(equation)]
    # Along what a kernel's blocks are computed apart: (tensor, dim, block size) for each.
    if apart := tuple(dims_apart(equation).values()):
        params.append(("grid_apart", apart))
    op = Op(
        kind=kind,
        operands=tuple([_operand(o) for o in equation.operands]),
        results=results,
        params=tuple(params),
        origin=Origin(region, module_path(equation.name_stack), equation.line),
        graphs=graphs,
    )
    flops = _flops(op, equation)
    return op.with_flops(flops) if flops else op


def _constraint(equation: Equation) -> tuple[tuple[str, Plain], ...]:
    """A with_sharding_constraint's spec as plain data: axes for each dim, None where it is open."""
    if equation.primitive.name != "sharding_constraint":
        return ()
    spec = getattr(equation.params["sharding"], "spec", None)
    if spec is None:
        return ()
    dims: list[Plain] = []
    for entry in (*spec, *[None] * (len(equation.result_avals[0].shape) - len(spec))):
        if entry is PartitionSpec.UNCONSTRAINED:
            dims.append(None)
        else:
            dims.append((entry,) if isinstance(entry, str) else tuple(entry or ()))
    return (("spec", tuple(dims)),)


def _value(ref: int, aval: Any) -> Value:
    return Value(intern(f"%{ref}"), *type_of(aval))


def _operand(operand: int | Const) -> Operand:
    if isinstance(operand, int):
        return intern(f"%{operand}")  # one text for a value and all that read it
    shape, dtype = type_of(operand.aval)
    if shape or jax.dtypes.issubdtype(operand.aval.dtype, jax.dtypes.extended):
        return Literal("opaque", dtype, shape)
    return Literal(repr(np.asarray(operand.value).item()), dtype)


@lru_cache(maxsize=65536)
def module_path(name_stack: str) -> str:
    """The user's module path of a name stack: "transpose(jvp(GPT))/Block_0" -> "GPT/Block_0".

    What JAX itself adds is left out, as is the text of an einsum: "bqhd,bkhd->bhqk".
    """
    parts = _WRAPPERS.sub("", name_stack).split("/")
    return "/".join(p for p in parts if p and p != "rematted_computation" and "->" not in p)


def _flops(op: Op, equation: Equation) -> int:
    """The FLOPs of an op: those that a kernel's author tells, its bodies', or its primitive's."""
    estimate = equation.params.get("cost_estimate")
    if estimate is not None:
        return int(estimate.flops)
    if op.graphs:
        runs = equation.params["length"] if op.kind == "scan" else 1
        inner = max if op.kind == "cond" else sum
        return int(runs) * inner(g.flops for g in op.graphs)
    operands = [Value("", shape, "") for shape in equation.operand_shapes]
    return primitive(op.kind).flops(op, operands)


# -- regions: forward, backward or update ---------------------------------------------------------


def _regions_of(
    program: FlatProgram, fresh: Iterable[Ref] = (), returned: Iterable[Ref] = ()
) -> tuple[str, ...]:
    """The region of each equation of a program, in order.

    JAX marks what differentiation makes: "transpose(" in the name stack is backward, and so is a
    loop that holds such an equation. What feeds a backward equation and depends on one is
    backward too; what depends on backward values and feeds none is update. So is what moves
    state alone: it reads nothing of the batch (`fresh` are its values) and only updates read it,
    or it is state that the step gives back (`returned`). The rest is forward, as is all where
    nothing is marked.

        h = x @ w            forward       m' = b1 * m          update: moves state alone
        dw = x.T @ dy        backward      m'' = m' + c * dw    update: after, feeds none
    """
    equations = program.equations
    marked = [is_backward(e) for e in equations]
    # 1. What depends on a backward equation, in order.
    after, tainted = list(marked), set[Ref]()
    for i, equation in enumerate(equations):
        after[i] = marked[i] or not tainted.isdisjoint(refs(equation.operands))
        if after[i]:
            tainted.update(equation.results)
    # 2. What feeds one, from the end.
    before, wanted = list(marked), set[Ref]()
    for i in reversed(range(len(equations))):
        before[i] = marked[i] or not wanted.isdisjoint(equations[i].results)
        if before[i]:
            wanted.update(refs(equations[i].operands))
    regions = [
        "backward" if m or (a and b) else "update" if a else "forward"
        for m, a, b in zip(marked, after, before, strict=True)
    ]
    if not any(marked):
        return tuple(regions)
    # 3. Forward equations that only move state, such as a decayed moment, are of the update: from
    #    the end, as their readers must be.
    of_batch = set(fresh)
    for equation in equations:
        if not of_batch.isdisjoint(refs(equation.operands)):
            of_batch.update(equation.results)
    needed = set(refs(program.outputs)) - set(returned)
    for i in reversed(range(len(regions))):
        equation = equations[i]
        alone = of_batch.isdisjoint(equation.results) and needed.isdisjoint(equation.results)
        if regions[i] == "forward" and alone and not equation.has_effects:
            regions[i] = "update"
        elif regions[i] != "update":
            needed.update(refs(equation.operands))
    return tuple(regions)


def is_backward(equation: Equation) -> bool:
    """True if the equation, or one in its bodies, stems from a backward pass."""
    return "transpose(" in equation.name_stack or any(
        is_backward(inner) for body in equation.bodies for inner in body.equations
    )


# -- structural key: a hash of what a step computes, by which plans know it again -----------------


def structural_key(graph: Graph) -> str:
    """A hash of ops, shapes, parameters, literals and paths.

    The step's name, its modules and its source lines are left out, so that it stays the same
    where the code moves; so are FLOPs and regions, which follow from the rest.
    """
    return hashlib.sha256(repr(_graph_skeleton(graph)).encode()).hexdigest()


def _graph_skeleton(graph: Graph) -> tuple[object, ...]:
    inputs, outputs = tuple(map(str, graph.inputs)), tuple(map(str, graph.outputs))
    ops = tuple(
        (
            op.kind,
            tuple(map(str, op.operands)),
            tuple(map(str, op.results)),
            op.params,
            tuple(map(_graph_skeleton, op.graphs)),
        )
        for op in graph.ops
    )
    return inputs, ops, outputs, graph.output_paths, graph.donated
