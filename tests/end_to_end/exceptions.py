"""What a combination may not do, or does not do as predicted, each with its cause."""

from __future__ import annotations

from tests.end_to_end.combos import Combo

# (model, mesh): how `megatron` must refuse it.
_UNEVEN_HEADS: dict[tuple[str, tuple[int, ...]], str] = {
    ("gpt_scan_raw", (8,)): "splits attention heads over data=8, .* has 4 heads",
    ("gqa_llama", (8,)): "splits attention heads over data=8, .* has 2 heads",
    ("gqa_llama", (2, 4)): "splits attention heads over model=4, .* has 2 heads",
}


def refusal(combo: Combo) -> str | None:
    """A pattern of the error that planning must end in, or None where it must succeed."""
    if combo.method != "megatron":
        return None
    return _UNEVEN_HEADS.get((combo.model, combo.mesh))


# (model, method): kinds of which XLA may run fewer than planned, and why.
# lstm: its backward step writes the same concatenation of gate gradients twice, once for each
#   weight; XLA merges the two and so their moves.
# wide_resnet_bn: two moves of one value to different shardings start with the same steps (seen on
#   2x2x2: an all-to-all and a permute of 8 KiB); XLA runs the shared start once.
_MERGED: dict[tuple[str, str], frozenset[str]] = {
    ("lstm", "auto"): frozenset({"all-to-all"}),
    ("wide_resnet_bn", "auto"): frozenset({"all-to-all", "collective-permute"}),
}


def merged(combo: Combo) -> frozenset[str]:
    """Kinds of collectives whose compiled bytes may stay below the plan's."""
    return _MERGED.get((combo.model, combo.method), frozenset())
