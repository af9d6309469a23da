"""The list of every case."""

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


def cases(optimizer: Optimizer) -> dict[str, Case]:
    """Every case of the zoo by name, trained with that optimizer."""
    built = [build(optimizer) for build in BUILDERS]
    return {case.name: case for case in built}
