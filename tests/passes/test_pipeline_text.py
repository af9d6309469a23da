"""The text form of the passes: printed and read back, and errors that name the pass and option."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from autopar.errors import InputError
from autopar.passes.pipeline import PASSES, PassPipeline, read_passes
from autopar.passes.shard.recipes import RECIPES

# A value for each option of a pass that is not its default.
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"barrier": False},
    "min-cut": {"layers": 8, "balance": 0.25},
    "fixed": {"cuts": (3, 17)},
    "search": {"stages": 2, "microbatches": 4, "schedule": "zb-h1"},
    "optimal": {"recipe": RECIPES["fsdp+tp"], "merge_above": 7, "hops": 2},
}
KINDS = [(slot, kind) for slot, kinds in PASSES.items() for kind in kinds]


@pytest.mark.parametrize(("slot", "kind"), KINDS, ids=lambda value: getattr(value, "name", value))
def test_every_pass_comes_back_from_its_text(slot: str, kind: Any) -> None:
    options = OPTIONS.get(kind.name, {})
    may = {f.name for f in fields(kind) if f.metadata.get("option", True)}
    assert set(options) == may  # so that a new option is tried here
    for chosen in (kind(), kind(**options)):
        pipeline = replace(PassPipeline(), **{slot: chosen})
        text = str(pipeline)
        assert read_passes(text) == pipeline
        assert str(read_passes(text)) == text


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("lower", "shard,lower"),
        ("shard", "shard,lower"),
        ("shard,lower=mpmd", "shard,lower"),
        ("lower=auto", "shard,lower=auto"),
        ("lower=spmd", "shard,lower=spmd"),
        ("batch=whole, shard=optimal{ recipe=fsdp }, lower", "shard{recipe=fsdp},lower"),
        (
            "stage=search{stages=2,microbatches=4}",
            "stage=search{stages=2,microbatches=4},shard,lower",
        ),
    ],
)
def test_defaults_are_left_out(text: str, printed: str) -> None:
    assert str(read_passes(text)) == printed


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "passes: '' is no pass; write slot, slot=pass or slot{option=value}"),
        ("shard{", "passes: 'shard{' is no pass"),
        ("solve", "passes: there is no slot 'solve'; there are: batch, layer, stage, shard, lower"),
        ("shard,shard", "passes: slot 'shard' is there twice"),
        ("layer=even", "passes: slot layer has no pass 'even'; there are: single, min-cut, fixed"),
        ("lower=fast", "passes: slot lower has no pass 'fast'; there are: mpmd, spmd, auto"),
        (
            "shard{effort=1}",
            "passes: pass optimal has no option 'effort'; it has recipe, merge_above",
        ),
        ("stage{stages=2}", "passes: pass one has no option 'stages'; it has none"),
        ("layer=min-cut{layers=x}", "passes: option layers of pass min-cut: invalid literal"),
        ("batch=exact{barrier=1}", "option barrier of pass exact: '1' is neither true nor false"),
        (
            "shard{recipe=x}",
            "option recipe of pass optimal: method 'x' is unknown; there are: auto",
        ),
    ],
)
def test_errors_name_the_pass_and_the_option(text: str, error: str) -> None:
    with pytest.raises(InputError, match=re.escape(error)):
        read_passes(text)
