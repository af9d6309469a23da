"""What a combination may not do, or does not do as predicted, each with its cause."""

from __future__ import annotations

from tests.end_to_end.combos import Combo

# (model, mesh): how the tensor parallel recipes must refuse it.
_UNEVEN_HEADS: dict[tuple[str, tuple[int, ...]], str] = {
    ("gpt_scan_raw", (8,)): "splits attention heads over data=8, .* has 4 heads",
}
_WITH_EXPERTS = ("moe", "moe_switch")
_NO_SEQUENCE = (
    "mlp", "mlp_equinox", "mlp_nnx", "wide_resnet_gn", "wide_resnet_bn", "unet", "lstm", "lstm_raw",
)  # fmt: skip


def refusal(combo: Combo) -> str | None:
    """A pattern of the error that planning must end in, or None where it must succeed."""
    if combo.method in ("hsdp", "fsdp+tp") and len(combo.mesh) < 2:
        return "Use a mesh of two axes"
    if combo.method == "expert" and combo.model not in _WITH_EXPERTS:
        return "splits a mixture's experts over an axis, but this step has none"
    if combo.method == "sequence" and combo.model in _NO_SEQUENCE:
        return "along a sequence, but this step has none"
    if combo.method == "sequence" and combo.model == "vit":
        return "has 17 positions, which do not divide"
    if combo.method not in ("megatron", "sequence", "fsdp+tp"):
        return None
    return _UNEVEN_HEADS.get((combo.model, combo.mesh))


# (model, method): kinds of which XLA may run fewer than planned, and why.
# lstm: its backward step writes the same concatenation of gate gradients twice, once for each
#   weight; XLA merges the two and so their moves.
# wide_resnet_bn: two moves of one value to different shardings start with the same steps (seen on
#   2x2x2: an all-to-all and a permute of 8 KiB); XLA runs the shared start once.
# gpt_scan, gpt_scan_raw: a mask that is the same in every trip is moved in the loop; XLA moves it
#   once, before. Of a number that is broadcast and then gathered it makes the whole at once.
_MERGED: dict[tuple[str, str], frozenset[str]] = {
    ("gpt_scan", "sequence"): frozenset({"all-gather", "all-to-all"}),
    ("gpt_scan_raw", "hsdp"): frozenset({"all-to-all"}),
    ("gpt_scan_raw", "sequence"): frozenset({"all-gather"}),
    ("lstm", "auto"): frozenset({"all-to-all"}),
    ("wide_resnet_bn", "auto"): frozenset({"all-to-all", "collective-permute"}),
}


def merged(combo: Combo) -> frozenset[str]:
    """Kinds of collectives whose compiled bytes may stay below the plan's."""
    return _MERGED.get((combo.model, combo.method), frozenset())


# (model, method) that scatter a maximum. JAX scatters sums only, so it is emitted as an all-reduce
# and a slice; XLA makes a reduce-scatter of the two for GPUs and TPUs, but not for CPUs.
_SCATTERED_MAXIMA = frozenset({("gpt_scan_raw", "sequence")})


def scatters_a_maximum(combo: Combo) -> bool:
    """True if CPUs run an all-reduce where a reduce-scatter of a maximum is planned."""
    return (combo.model, combo.method) in _SCATTERED_MAXIMA


# (model, method): kinds of which XLA's GPU compiler by itself sends less than planned, and why.
# lstm: the gradients of its gates are summed over the devices before they are split, and a plan
#   takes no partial sums through a split, so each trip's are combined; XLA takes the all-reduce
#   out of the loop.
# moe, moe_switch: a mask is made float and then gathered; XLA gathers its booleans, a quarter.
_LESS_ON_GPUS: dict[tuple[str, str], frozenset[str]] = {
    ("lstm", "zero1"): frozenset({"all-reduce"}),
    ("moe", "auto"): frozenset({"all-gather"}),
    ("moe_switch", "auto"): frozenset({"all-gather"}),
}


def less_on_gpus(combo: Combo) -> frozenset[str]:
    """Kinds of collectives of which a GPU may send less than planned."""
    return _LESS_ON_GPUS.get((combo.model, combo.method), frozenset())
