"""The rate of a step: tokens or samples a second, and MFU."""

from __future__ import annotations

import pytest

from autopar.ir.rate import Rate, items_of_batch


@pytest.mark.parametrize(
    ("arrays", "items"),
    [
        ([((8, 128), "i32")], (1024, "tokens")),
        ([((8, 128), "i32"), ((8, 128), "f32"), ((2,), "u32")], (1024, "tokens")),
        ([((8, 32, 32, 3), "f32"), ((8,), "i32")], (8, "samples")),
        ([((8, 13), "f32"), ((8, 26), "i32")], (8, "samples")),  # features and categories
        ([((), "f32")], (1, "samples")),
    ],
)
def test_integers_in_rows_are_tokens_and_else_rows_are_samples(
    arrays: list[tuple[tuple[int, ...], str]], items: tuple[int, str]
) -> None:
    assert items_of_batch(arrays) == items


def test_it_prints_both_figures() -> None:
    assert str(Rate(0.5, 0.412, "tokens", 2.1e6)) == "41.2% MFU, 2.10 M tokens/s"
    assert str(Rate(0.5, None, "samples", 64.0)) == "64 samples/s"
