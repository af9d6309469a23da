"""The list of every case, and one of each kind."""

import functools

import pytest

from tests.zoo import gpt, llama, lstm, mlp, moe, scan_stack, vision, vit
from tests.zoo.case import Case, Optimizer

BUILDERS = (
    mlp.mlp,
    mlp.mlp_equinox,
    mlp.mlp_nnx,
    mlp.masked,
    gpt.gpt,
    gpt.gpt_scan,
    scan_stack.gpt_scan_raw,
    gpt.tied,
    gpt.clip,
    gpt.dropout,
    llama.gqa_llama,
    moe.moe,
    moe.moe_switch,
    vision.wide_resnet_gn,
    vision.wide_resnet_bn,
    vision.unet,
    lstm.lstm,
    lstm.lstm_raw,
    vit.vit,
)

# One of each kind of network: dense layers in a dict and in mutable modules, masks, a scan over
# layers, two towers, random bits, experts that share a batch, convolutions with skips, time.
KINDS = (
    "mlp", "mlp_nnx", "masked", "gpt_scan_raw", "clip", "dropout", "moe_switch", "unet", "lstm_raw",
)  # fmt: skip


@functools.cache
def cases(optimizer: Optimizer) -> dict[str, Case]:
    """Every case of the zoo by name, trained with that optimizer.

    They are the same objects wherever they are asked for, so that JAX traces and compiles each
    plain step once in a process.
    """
    built = [build(optimizer) for build in BUILDERS]
    return {case.name: case for case in built}


def of_each_kind() -> list[object]:
    """The names of all cases as parameters of a test: one of each kind, and the rest slow."""
    return [
        pytest.param(name, marks=[] if name in KINDS else [pytest.mark.slow])
        for name in cases("sgd")
    ]
