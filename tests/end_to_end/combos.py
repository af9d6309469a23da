"""Which model meets which mesh, method and optimizer: the whole product, and a sample of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tests.zoo import Optimizer, cases

MODELS = tuple(cases("sgd"))
MESHES = ((8,), (2, 4), (2, 2, 2))
METHODS = (
    "auto", "dp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "sequence", "fsdp+tp", "expert",
)  # fmt: skip
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


# What the rotation below misses: smoke tests, and models that a recipe makes sense for.
_CHOSEN = (
    Combo("gpt", (8,), "megatron", "adam"),
    Combo("gpt_scan", (2, 4), "zero1", "adam"),
    Combo("moe", (2, 4), "expert", "adam"),
    Combo("moe_switch", (8,), "expert", "sgd"),
    Combo("gpt", (2, 4), "sequence", "adam"),
    Combo("gpt_scan", (2, 2, 2), "sequence", "sgd"),
    Combo("dropout", (8,), "sequence", "adam"),
    Combo("gpt", (2, 4), "fsdp+tp", "adam"),
    Combo("unet", (2, 4), "hsdp", "adam"),
)


def sampled_combos() -> frozenset[Combo]:
    """Every model on every mesh, once by `auto` and twice by recipes, which take turns."""
    return frozenset((*_CHOSEN, *_sampled()))


def _sampled() -> Iterator[Combo]:
    turns = {mesh: itertools.cycle(METHODS[1:]) for mesh in MESHES}
    for i, model in enumerate(MODELS):
        for j in range(3):
            mesh = MESHES[(i + j) % len(MESHES)]
            method = next(turns[mesh]) if j else "auto"
            yield Combo(model, mesh, method, OPTIMIZERS[(i // 3 + j) % 2])
