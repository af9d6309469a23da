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


# (model, mesh, method): kinds that XLA runs fewer of. The LSTM's backward step writes the same
# concatenation of gate gradients twice, once for each weight; XLA merges the two and their moves.
_MERGED: dict[tuple[str, tuple[int, ...], str], frozenset[str]] = {
    ("lstm", (2, 4), "auto"): frozenset({"all-to-all"})
}


def uncounted(combo: Combo) -> frozenset[str]:
    """Kinds of collectives whose compiled bytes are known to differ from the plan's."""
    return _MERGED.get((combo.model, combo.mesh, combo.method), frozenset())


def argument_slack(combo: Combo) -> int:
    """Bytes of arguments that XLA may leave out: those that no equation reads."""
    del combo
    return 0
