"""The corpus: the same on every call, and its held-out part kept apart."""

from pathlib import Path

import numpy as np
import pytest

from autopar import demo
from autopar.errors import InputError


def test_the_corpus_is_the_same_each_time_and_split_by_file() -> None:
    one, two = demo.load_corpus(1_500_000), demo.load_corpus(1_500_000)
    assert np.array_equal(one.train, two.train)
    assert 0.01 < len(one.held_out) / len(one.train) < 0.5


def test_batches_are_windows_and_the_next_byte() -> None:
    text = np.arange(200, dtype=np.uint8)
    batch = next(demo.batches(text, 0, batch=4, sequence=16))
    assert batch["tokens"].shape == (4, 16)
    assert np.array_equal(batch["targets"], batch["tokens"] + 1)


def test_a_folder_without_python_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds 0 bytes of Python source"):
        demo.load_corpus(root=tmp_path)


def test_the_entropy_of_two_equal_halves_is_one_bit() -> None:
    assert demo.entropy(np.array([1, 1, 7, 7], np.uint8)) == pytest.approx(np.log(2))
