"""Which model meets which mesh, method and optimizer: the whole product, and a sample of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tests.zoo import Optimizer, cases

MODELS = tuple(cases("sgd"))
MESHES = ((8,), (2, 4), (2, 2, 2))
METHODS = ("auto", "dp", "zero1", "zero2", "fsdp", "megatron")
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "adam")


@dataclass(frozen=True)
class Combo:
    """One model on one mesh by one method with one optimizer."""

    model: str
    mesh: tuple[int, ...]
    method: str
    optimizer: Optimizer

    def __str__(self) -> str:
        return f"{self.model}-{'x'.join(map(str, self.mesh))}-{self.method}-{self.optimizer}"


def every_combo() -> tuple[Combo, ...]:
    """The whole cross product."""
    return tuple(Combo(*c) for c in itertools.product(MODELS, MESHES, METHODS, OPTIMIZERS))


def sampled_combos() -> frozenset[Combo]:
    """Every model on every mesh: once by `auto` and twice by recipes, which take turns."""
    return frozenset(_sampled())


def _sampled() -> Iterator[Combo]:
    recipes = METHODS[1:]
    for i, model in enumerate(MODELS):
        chosen = ("auto", recipes[2 * i % 5], recipes[(2 * i + 1) % 5])
        for j, method in enumerate(chosen):
            at = (i + j) % len(MESHES)
            yield Combo(model, MESHES[at], method, OPTIMIZERS[(i // 3 + j) % 2])
