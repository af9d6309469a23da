"""The heap in which a compiled step's buffers lie: small ones by hand, and laws of every one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.heap import Buffer, heap_bytes, most_at_once

BUFFERS = st.lists(
    st.builds(
        lambda nbytes, first, length: Buffer(nbytes, first, first + length),
        st.integers(1, 1000), st.integers(0, 20), st.integers(0, 10),
    ),
    max_size=12,
)  # fmt: skip


@pytest.mark.smoke
def test_large_buffers_leave_holes_that_small_ones_do_not_fit() -> None:
    # a, the largest, lies below b, and c where a does before that is made: what is left beside c
    # is a hole of 1, too small for d.
    a, b, c, d = Buffer(4, 3, 3), Buffer(2, 1, 3), Buffer(3, 2, 2), Buffer(2, 2, 2)
    assert most_at_once((a, b, c, d)) == 3 + 2 + 2
    assert heap_bytes((a, b, c, d)) == 4 + 2 + 2
    assert heap_bytes((a, b, c, Buffer(1, 2, 2))) == 4 + 2


@given(BUFFERS)
def test_a_heap_holds_what_is_held_at_once_and_no_more_than_all(buffers: list[Buffer]) -> None:
    assert most_at_once(buffers) <= heap_bytes(buffers) <= sum(b.nbytes for b in buffers)
    moments = range(32)
    held = (sum(b.nbytes for b in buffers if b.first <= now <= b.last) for now in moments)
    assert most_at_once(buffers) == max(held)
