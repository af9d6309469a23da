"""Which differences of two runs are rounding."""

import numpy as np
import pytest

from autopar.ir.verification import OutputError
from autopar.runtime.validation.numerics import TOLERANCE, Array, Result, output_errors


def error_of(plain: Array, planned: Array, *perturbed: Array, start: Array | None = None) -> bool:
    """Whether one output agrees."""
    return found_of(plain, planned, *perturbed, start=start).agrees


def found_of(
    plain: Array, planned: Array, *perturbed: Array, start: Array | None = None
) -> OutputError:
    runs = [[Result("x", numbers, start)] for numbers in (plain, planned, *perturbed)]
    (found,) = output_errors(runs[0], runs[1], runs[2:])
    return found


ONES = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("gap", "agrees"), [(0.0, True), (0.9 * TOLERANCE, True), (1.5 * TOLERANCE, False)]
)
def test_floats_may_be_off_by_a_share_of_the_largest(gap: float, agrees: bool) -> None:
    planned = ONES.copy()
    planned[2] += gap
    assert error_of(ONES, planned) is agrees
    assert found_of(10 * ONES, 10 * planned).error == pytest.approx(gap, abs=2e-7)


def test_whole_numbers_may_not() -> None:
    numbers = np.arange(3)
    assert error_of(numbers, numbers)
    assert not error_of(numbers, numbers + np.array([0, 0, 1]))
    assert not error_of(np.array([True]), np.array([False]))


def test_what_the_plain_step_does_to_itself_the_planned_one_may() -> None:
    planned = ONES + np.float32(0.001)
    assert not error_of(ONES, planned)
    assert error_of(ONES, planned, ONES, ONES - np.float32(0.0005))
    assert not error_of(ONES, ONES + np.float32(0.1), ONES - np.float32(0.0005))


def test_noise_of_state_is_that_of_its_change() -> None:
    """The perturbed run starts elsewhere, which by itself is no noise of the step."""
    plain = [Result("w", 2 * ONES, ONES)]
    perturbed = [Result("w", 2.5 * ONES, 1.5 * ONES)]
    planned = [Result("w", 2.25 * ONES, ONES)]
    (found,) = output_errors(plain, planned, [perturbed])
    assert found.noise == 0.0
    assert not found.agrees


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_what_is_no_number_must_be_none_in_both(odd: float) -> None:
    holed = ONES.copy()
    holed[1] = odd
    assert error_of(holed, holed)
    assert not error_of(ONES, holed)
    assert not error_of(holed, ONES)


def test_other_shapes_and_dtypes_differ() -> None:
    assert not error_of(ONES, ONES[:3])
    assert not error_of(ONES, ONES.astype(np.float64))


def test_of_several_steps_the_worst_counts() -> None:
    plain = [Result("loss", ONES), Result("loss", ONES)]
    planned = [Result("loss", ONES + np.float32(0.5)), Result("loss", ONES)]
    (found,) = output_errors(plain, planned, [])
    assert found.error == pytest.approx(0.5)
