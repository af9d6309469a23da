"""Names each equation forward, backward or update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.frontend.traced import Equation, FlatProgram, Ref, refs


def regions_of(
    program: FlatProgram, fresh: Iterable[Ref] = (), returned: Iterable[Ref] = ()
) -> tuple[str, ...]:
    """The region of each equation of a program, in order.

    JAX marks what differentiation makes: "transpose(" in the name stack is backward, and so is a
    loop that holds such an equation. What feeds a backward equation and depends on one is
    backward too; what depends on backward values and feeds none is update. So is what moves
    state alone: it reads nothing of the batch (`fresh` are its values) and only updates read it,
    or it is state that the step gives back (`returned`). The rest is forward, as is all where
    nothing is marked.
    """
    equations = program.equations
    marked = [is_backward(e) for e in equations]
    after = _reached(equations, marked)
    before = _feeding(equations, marked)
    regions = [
        "backward" if m or (a and b) else "update" if a else "forward"
        for m, a, b in zip(marked, after, before, strict=True)
    ]
    if any(marked):
        _claim_state(program, regions, set(fresh), set(returned))
    return tuple(regions)


def is_backward(equation: Equation) -> bool:
    """Whether the equation, or one in its bodies, stems from a backward pass."""
    return "transpose(" in equation.name_stack or any(
        is_backward(inner) for body in equation.bodies for inner in body.equations
    )


def _reached(equations: Sequence[Equation], marked: Sequence[bool]) -> list[bool]:
    tainted: set[Ref] = set()
    reached: list[bool] = []
    for equation, mark in zip(equations, marked, strict=True):
        hit = mark or not tainted.isdisjoint(refs(equation.operands))
        if hit:
            tainted.update(equation.results)
        reached.append(hit)
    return reached


def _feeding(equations: Sequence[Equation], marked: Sequence[bool]) -> list[bool]:
    wanted: set[Ref] = set()
    feeding: list[bool] = []
    for equation, mark in zip(reversed(equations), reversed(marked), strict=True):
        hit = mark or not wanted.isdisjoint(equation.results)
        if hit:
            wanted.update(refs(equation.operands))
        feeding.append(hit)
    return feeding[::-1]


def _claim_state(
    program: FlatProgram, regions: list[str], fresh: set[Ref], returned: set[Ref]
) -> None:
    """Turn forward equations that only move state, such as a decayed moment, to update."""
    for equation in program.equations:
        if not fresh.isdisjoint(refs(equation.operands)):
            fresh.update(equation.results)
    needed = set(refs(program.outputs)) - returned
    for i in reversed(range(len(regions))):
        equation = program.equations[i]
        alone = fresh.isdisjoint(equation.results) and needed.isdisjoint(equation.results)
        if regions[i] == "forward" and alone and not equation.has_effects:
            regions[i] = "update"
        elif regions[i] != "update":
            needed.update(refs(equation.operands))
