"""Which model meets which mesh, method and optimizer: the whole product, and a sample of it."""

from __future__ import annotations

import itertools
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


# What runs by default covers pairs: every model once by `auto`, and every recipe on every mesh, by
# a model that it makes sense for or must refuse. Models that compile slowly are on meshes where
# there is little to choose from, and have one optimizer each.
_SAMPLED = """
mlp:            8-auto-sgd       2x4-dp-adam         2x2x2-dp-sgd
mlp_equinox:    2x4-auto-sgd     2x2x2-fsdp-adam
mlp_nnx:        2x2x2-auto-sgd   2x2x2-zero1-sgd
masked:         8-auto-adam      2x4-zero2-sgd       2x2x2-zero2-adam
gpt:            2x4-auto-adam    8-megatron-adam     2x4-sequence-adam
gpt_scan:       8-auto-adam      2x4-zero1-adam      8-fsdp-sgd    2x2x2-sequence-sgd
gpt_scan_raw:   2x4-auto-sgd     2x2x2-fsdp+tp-sgd
tied:           8-auto-sgd       8-hsdp-sgd          2x2x2-megatron-sgd
clip:           8-auto-sgd       2x4-megatron-sgd
dropout:        8-auto-adam      2x4-fsdp+tp-adam
gqa_llama:      2x4-auto-adam    8-sequence-adam
moe:            2x4-auto-adam    2x4-expert-adam     8-fsdp+tp-sgd
moe_switch:     8-auto-sgd       8-expert-sgd        2x2x2-expert-sgd
wide_resnet_gn: 2x4-auto-sgd     8-dp-sgd
wide_resnet_bn: 8-auto-sgd       8-zero1-sgd
unet:           8-auto-adam      2x4-hsdp-adam
lstm:           2x4-auto-adam    2x2x2-hsdp-adam
lstm_raw:       2x2x2-auto-adam  8-zero2-adam
vit:            8-auto-sgd       2x4-fsdp-sgd
"""


def sampled_combos() -> frozenset[Combo]:
    """What the default tier runs."""
    chosen = {
        f"{model}-{rest}"
        for model, _, row in (line.partition(":") for line in _SAMPLED.split("\n"))
        for rest in row.split()
    }
    return frozenset(combo for combo in every_combo() if str(combo) in chosen)
