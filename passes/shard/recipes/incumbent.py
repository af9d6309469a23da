"""The recipes as incumbents: each restricts the problem at hand, so `auto` beats them all.

Their answers are found on the assembled problem, with nothing priced again; pins stay kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.errors import InfeasibleError
from autopar.ir.sharding import MeshShape
from autopar.ir.sharding_plan import Margin, Status
from autopar.ir.text import show_bytes
from autopar.passes.shard.model.assemble import Assembled
from autopar.passes.shard.model.decisions import Choice, Reading
from autopar.passes.shard.recipes import RECIPES, AbstractRecipe
from autopar.passes.shard.recipes.recipe import Choices
from autopar.passes.shard.solver.heuristic import first_choice, min_memory
from autopar.passes.shard.solver.problem import Problem, narrow
from autopar.passes.shard.solver.solve import Solution

Solve = Callable[[Problem], tuple[int, ...]]  # an assignment that fits, or ()
Indices = npt.NDArray[np.int64]
Restriction = Choices | InfeasibleError


@dataclass(frozen=True)
class Incumbent:
    """The costs of all recipes with their assignments, and the cheapest's again.

    An assignment is (), at infinite cost, where none fits.
    """

    margins: tuple[Margin, ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()  # one for each margin
    choice: tuple[int, ...] = ()
    seconds: float = float("inf")


def restrictions(
    reading: Reading, choices: Choices, mesh: MeshShape,
    recipes: Mapping[str, AbstractRecipe] = RECIPES,
) -> Mapping[str, Restriction]:  # fmt: skip
    """The choices that each recipe leaves of a reading's, or why it makes no sense on the mesh."""
    found: dict[str, Restriction] = {}
    for name, recipe in recipes.items():
        if name == "auto" or not choices or not mesh.names:
            continue
        try:
            found[name] = recipe.restrict(reading, choices, mesh)
        except InfeasibleError as error:
            found[name] = error
    return found


def recipe_incumbent(
    assembled: Assembled, restricted: Mapping[str, Restriction], solve: Solve = first_choice
) -> Incumbent:
    """Solves the recipes that make sense for the step on the mesh, on the whole space's problem.

    `assembled` holds every choice that the pins leave; `solve` need not be exact.
    """
    margins: list[Margin] = []
    choices: list[tuple[int, ...]] = []
    best: tuple[int, ...] = ()
    least = float("inf")
    for name, kept in restricted.items():
        if isinstance(kept, InfeasibleError):
            choice, note = tuple[int, ...](), _reason(kept)
        else:
            choice, note = _solved(assembled.problem, _left(assembled, kept), solve)
        seconds = assembled.problem.seconds(choice) if choice else None
        margins.append(Margin(name, seconds, note))
        choices.append(choice)
        if seconds is not None and seconds < least:
            best, least = choice, seconds
    return Incumbent(tuple(margins), tuple(choices), best, least)


def better_of(solution: Solution, floor: Incumbent) -> Solution:
    """The solution, or the best recipe's assignment where that is cheaper; the bound stays."""
    if floor.seconds >= solution.seconds:
        return solution
    bound = solution.bound_seconds if solution.feasible else 0.0
    return replace(
        solution,
        choice=floor.choice,
        seconds=floor.seconds,
        bound_seconds=min(bound, floor.seconds),
        sentence="The best recipe.",
    )


def known_solution(problem: Problem, choice: tuple[int, ...], sentence: str) -> Solution:
    """An assignment of which nothing is proven; () is none."""
    seconds = problem.seconds(choice) if choice or not problem.costs else float("inf")
    return Solution(choice, seconds, 0.0, Status.FEASIBLE, sentence)


def _left(assembled: Assembled, kept: Choices) -> tuple[Indices, ...]:
    """The positions of the choices that are left of each node's; shared uses keep all."""
    own, shared = assembled.choices[: len(kept)], assembled.choices[len(kept) :]
    left = [_positions(options, few) for options, few in zip(own, kept, strict=True)]
    return (*left, *(np.arange(len(options)) for options in shared))


def _positions(options: Sequence[Choice], kept: Sequence[Choice]) -> Indices:
    """The positions of the kept choices among the options; both are in one order.

    A port that may be a copy has each of its choices twice.
    """
    if len(kept) == len(options):
        return np.arange(len(options))
    wanted = {id(c) for c in kept}
    return np.array([i for i, c in enumerate(options) if id(c) in wanted], dtype=np.int64)


def _solved(problem: Problem, left: Sequence[Indices], solve: Solve) -> tuple[tuple[int, ...], str]:
    """An assignment and how good it is, or () and why there is none."""
    narrowed = narrow(problem, left)
    if narrowed.problem.fits_nowhere:
        needed = show_bytes(narrowed.problem.needed_bytes)
        return (), f"does not fit: needs at least {needed}"
    choice = solve(narrowed.problem)
    if choice:
        return narrowed.restore(choice), "found"
    least = min_memory(narrowed.problem)
    if least.choice and narrowed.problem.fits(least.choice):
        return narrowed.restore(least.choice), "found: the least memory"
    return (), f"does not fit: the least found needs {show_bytes(least.nbytes)}"


def _reason(error: InfeasibleError) -> str:
    """The first sentence of an error."""
    return str(error).splitlines()[0].split(". ")[0].rstrip(".")
