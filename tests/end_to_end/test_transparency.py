"""A parallel step is the plain step: same numbers, and what was predicted is what was compiled."""

from __future__ import annotations

import pytest

from autopar.errors import InfeasibleError
from tests.end_to_end.combos import (
    MESHES,
    METHODS,
    MODELS,
    OPTIMIZERS,
    Combo,
    every_combo,
    sampled_combos,
)
from tests.end_to_end.exceptions import merged, refusal, scatters_a_maximum
from tests.end_to_end.running import (
    Ran,
    compiled_bytes,
    differing,
    plain_leaves,
    predicted_bytes,
    run_combo,
    traffic_gaps,
)

SAMPLED = sampled_combos()
SMOKE = {"mlp-8-auto-sgd", "masked-8-auto-adam", "gpt_scan-2x4-zero1-adam"}


# Of the sample, those that take longest: their models run in another way of it, or are much like
# others that do.
LONG = frozenset({
    "clip-8-auto-sgd", "dropout-8-auto-adam", "gpt_scan_raw-2x4-auto-sgd",
    "gqa_llama-2x4-auto-adam", "vit-8-auto-sgd", "wide_resnet_bn-8-auto-sgd",
    "wide_resnet_gn-2x4-auto-sgd", "gpt-2x4-auto-adam", "gqa_llama-8-sequence-adam",
    "lstm-2x4-auto-adam", "moe-8-fsdp+tp-sgd", "vit-2x4-fsdp-sgd",
})  # fmt: skip


# More that take long: they run in `make test-ci`.
IN_CI = frozenset({
    "gpt_scan_raw-2x2x2-fsdp+tp-sgd", "moe-2x4-auto-adam", "tied-8-auto-sgd",
    "gpt-2x4-sequence-adam", "gpt_scan-2x2x2-sequence-sgd",
    "moe_switch-8-auto-sgd", "tied-2x2x2-megatron-sgd", "unet-8-auto-adam",
    "wide_resnet_gn-8-dp-sgd", "gpt_scan-8-auto-adam", "gpt_scan-8-fsdp-sgd", "moe-2x4-expert-adam",
    "moe_switch-8-expert-sgd",
})  # fmt: skip


def _marks(combo: Combo) -> list[pytest.MarkDecorator]:
    if str(combo) in IN_CI:
        return [pytest.mark.ci]
    is_slow = combo not in SAMPLED or str(combo) in LONG
    marks = [pytest.mark.slow] if is_slow else []
    return [*marks, pytest.mark.smoke] if str(combo) in SMOKE else marks


@pytest.mark.parametrize(
    "combo", [pytest.param(c, id=str(c), marks=_marks(c)) for c in every_combo()]
)
def test_three_steps_equal_plain_jit(combo: Combo) -> None:
    reason = refusal(combo)
    if reason is not None:
        with pytest.raises(InfeasibleError, match=reason):
            run_combo(combo)
        return
    ran = run_combo(combo)
    faults = differing(ran.leaves, plain_leaves(combo.model, combo.optimizer))
    assert not faults + _broken_promises(combo, ran)


def _broken_promises(combo: Combo, ran: Ran) -> list[str]:
    """Traffic and memory that are not as predicted, and state that was not reused."""
    plan, compiled = ran.step.plan, ran.compiled
    memory = compiled.memory_analysis()
    predicted, real_bytes = predicted_bytes(plan), compiled_bytes(compiled)
    if scatters_a_maximum(combo):
        for found in (predicted, real_bytes):
            found["all-reduce"] += found.pop("reduce-scatter", 0)
    gaps = traffic_gaps(predicted, real_bytes)
    fewer = {kind for kind in merged(combo) if real_bytes[kind] < predicted[kind]}
    faults = [text for kind, text in gaps.items() if kind not in fewer]
    planned, real = plan.prediction.argument_bytes, memory.argument_size_in_bytes
    if planned != real:
        faults.append(f"arguments: {planned} bytes planned, {real} compiled")
    if memory.alias_size_in_bytes <= 0:
        faults.append("no state is updated in place")
    return faults + [f"{path} was not consumed" for path in ran.left_over]


@pytest.mark.smoke
def test_the_sample_has_every_model_and_every_recipe_on_every_mesh() -> None:
    assert {(c.mesh, c.method) for c in SAMPLED} == {(s, m) for s in MESHES for m in METHODS}
    assert {(c.method, c.optimizer) for c in SAMPLED} == {
        (m, o) for m in METHODS for o in OPTIMIZERS
    }
    assert {c.model for c in SAMPLED if c.method == "auto"} == set(MODELS)
    assert {c.model for c in SAMPLED if c.method != "auto"} == set(MODELS)
    assert {str(c) for c in SAMPLED} >= SMOKE
