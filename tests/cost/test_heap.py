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
def test_buffers_leave_holes_that_others_do_not_fit() -> None:
    # a and b, the largest, lie below c and d, of which d finds c above b: c was placed above a.
    a, b, c, d = Buffer(3, 1, 1), Buffer(3, 3, 3), Buffer(1, 0, 2), Buffer(1, 2, 3)
    assert most_at_once((a, b, c, d)) == 3 + 1
    assert heap_bytes((a, b, c, d)) == 3 + 1 + 1
    assert heap_bytes((a, b, c, Buffer(1, 3, 3))) == 3 + 1


def test_those_that_are_held_longest_come_first_where_that_takes_less() -> None:
    # After a and b, d lies above b, and c above d. Before them, d and c lie below b.
    a, b, c, d = Buffer(4, 0, 1), Buffer(3, 2, 3), Buffer(2, 3, 3), Buffer(2, 1, 3)
    assert heap_bytes((a, b, c, d)) == most_at_once((a, b, c, d)) == 3 + 2 + 2


def test_what_begins_and_ends_meanwhile_tells_how_long_a_buffer_is_held() -> None:
    # c is held for four moments and b for two, but as much begins and ends while each is: b comes
    # second, below a and d. Else it would come last, above a.
    a, b, c, d = Buffer(3, 0, 1), Buffer(1, 1, 2), Buffer(2, 2, 5), Buffer(3, 3, 5)
    assert most_at_once((a, b, c, d)) == 2 + 3
    assert heap_bytes((a, b, c, d)) == 2 + 1 + 3


def test_a_buffer_of_a_thousandth_may_find_no_hole() -> None:
    large, small = (Buffer(999, 1, 1), Buffer(999, 3, 3)), (Buffer(1, 0, 2), Buffer(1, 2, 4))
    assert heap_bytes((*large, *small)) == 999 + 2
    assert heap_bytes((*(b._replace(nbytes=9999) for b in large), *small)) == 9999 + 1


@given(BUFFERS)
def test_a_heap_holds_what_is_held_at_once_and_no_more_than_all(buffers: list[Buffer]) -> None:
    assert most_at_once(buffers) <= heap_bytes(buffers) <= sum(b.nbytes for b in buffers)
    moments = range(32)
    held = (sum(b.nbytes for b in buffers if b.first <= now <= b.last) for now in moments)
    assert most_at_once(buffers) == max(held)
