"""Below which number the whole numbers of an argument must stay to index what they index."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.frontend.traced import Equation, FlatProgram, Ref, refs

# Ops whose result is an index where an operand is one.
_PASSING = frozenset({
    "add", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "copy", "max",
    "min", "pad", "reshape", "rev", "select_n", "sharding_constraint", "slice", "squeeze",
    "transpose",
})  # fmt: skip


def index_bounds(program: FlatProgram) -> dict[int, int]:
    """Input -> how many rows, classes or positions its numbers tell apart, where that shows.

    It shows in a gather, whose indexed dim has a size, and in a comparison with an iota (one-hot).
    The least size counts. Bodies of scans are followed, those of other loops are not.
    """
    found: dict[int, int] = {}
    for number, ref in enumerate(program.inputs):
        sizes = tuple(_sizes(program, frozenset([ref])))
        if sizes:
            found[number] = max(1, min(sizes))
    return found


def _sizes(program: FlatProgram, indices: frozenset[Ref]) -> Iterator[int]:
    """Sizes of what values made from some indices tell apart."""
    reached, counted = set(indices), dict[Ref, int]()
    for equation in program.equations:
        name = equation.primitive.name
        read = [r for r in refs(equation.operands) if r in reached]
        if name == "iota":
            counted[equation.results[0]] = equation.params["shape"][equation.params["dimension"]]
        elif name in _PASSING and not read:
            counts = [counted[r] for r in refs(equation.operands) if r in counted]
            counted.update((r, counts[0]) for r in equation.results if counts)
        elif not read:
            continue
        elif name == "gather":
            yield from _gathered(equation, reached)
        elif name == "eq":
            yield from (counted[r] for r in refs(equation.operands) if r in counted)
        elif name == "scan":
            given = zip(equation.bodies[0].inputs, equation.operands, strict=True)
            inside = frozenset(r for r, o in given if isinstance(o, int) and o in reached)
            yield from _sizes(equation.bodies[0], inside)
        elif name in _PASSING:
            reached.update(equation.results)


def _gathered(equation: Equation, reached: set[Ref]) -> Iterator[int]:
    """The sizes of the dims that a gather indexes with one of some values."""
    if equation.operands[1] in reached:
        numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        shape = equation.operand_shapes[0]
        yield from (shape[d] - sizes[d] + 1 for d in numbers.start_index_map)
