"""Dims of a Pallas kernel along which its blocks are computed each on its own, by its grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jax.extend import core as jex

from autopar.frontend.traced import Equation

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
