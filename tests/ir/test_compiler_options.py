"""Compiler options: which a plan can have, in what order, on which platform, in which words."""

from __future__ import annotations

import pytest

from autopar.errors import GraphError
from autopar.ir.compiler_options import (
    LATENCY_HIDING,
    PIPELINED,
    CompilerOptions,
    check_options,
    merged_options,
    options_on,
    options_text,
    wrong_option,
)

WRONG: list[tuple[object, object, str]] = [
    ("gpu_autotune_level", 1, "is no option of XLA"),
    ("--xla_gpu_autotune_level", 1, "is no option of XLA"),
    ("xla_", 1, "is no option of XLA"),
    ("xla_a b", 1, "is no option of XLA"),
    (3, 1, "3 is no option of XLA"),
    ("xla_a", 1.5, "xla_a is 1.5, and an option is a bool, an int or a text"),
    ("xla_a", None, "xla_a is None"),
    ("xla_a", [1], r"xla_a is \[1\]"),
    ("xla_a", 2**63, "does not fit 64 bits"),
    ("xla_a", "../out", "a text is of letters"),
    ("xla_a", "x" * 201, "a text is of letters"),
    ("xla_dump_to", "here", "xla_dump_to names a file, which a plan does not"),
    ("xla_gpu_cuda_data_dir", "here", "names a file"),
    ("xla_gpu_load_autotune_results_from", "here", "names a file"),
]


@pytest.mark.parametrize(("name", "value", "told"), WRONG, ids=lambda case: str(case)[:24])
def test_a_wrong_option_is_named(name: object, value: object, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        assert not wrong_option(name, value), wrong_option(name, value)


@pytest.mark.parametrize("value", [True, False, 0, -(2**63), "fusion,dce", ""])
def test_bools_numbers_and_texts_are_options(value: bool | int | str) -> None:
    assert not wrong_option("xla_a", value)
    check_options((("xla_a", value),))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((("xla_b", 1), ("xla_a", 1)), "order"),
        ((("xla_a", 1), ("xla_a", 2)), "order"),
        ((("a", 1),), "compiler option 'a' is no option"),
    ],
)
def test_options_of_a_plan_are_checked(options: CompilerOptions, told: str) -> None:
    with pytest.raises(GraphError, match=told):
        check_options(options)


def test_what_is_asked_for_is_put_over_what_is_chosen() -> None:
    chosen: CompilerOptions = (("xla_a", True), ("xla_c", 1))
    asked: CompilerOptions = (("xla_b", "x"), ("xla_a", False))
    assert merged_options(chosen, asked) == (("xla_a", False), ("xla_b", "x"), ("xla_c", 1))


def test_options_are_for_their_own_platform() -> None:
    options: CompilerOptions = (("xla_cpu_a", 1), ("xla_gpu_a", 1), ("xla_other", 1))
    found = options_on("gpu", options)
    assert found.used == (("xla_gpu_a", 1), ("xla_other", 1))
    assert found.left_out == (("xla_cpu_a", 1),)
    assert options_on("tpu", options).used == (("xla_other", 1),)


def test_options_are_told_in_few_words() -> None:
    options = ((LATENCY_HIDING, True), (PIPELINED["all-gather"], False), ("xla_gpu_level", 3))
    assert options_text(options) == (
        "latency_hiding_scheduler, pipelined_all_gather=false, level=3"
    )
