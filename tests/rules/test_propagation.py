"""Rows followed through ops and bodies by rules: where they are in what is made of them."""

from __future__ import annotations

import pytest

from autopar.ir.record import parse_graph
from autopar.rules import attach_rules
from autopar.rules.propagation import Part, Parts, propagate

STEPS: dict[str, tuple[str, Parts]] = {
    "element-wise": ("%y: f32[8,4] = tanh(%x)", (Part(0, 8),)),
    "transposed": ("%y: f32[4,8] = transpose(%x) {permutation=(1, 0)}", (Part(1, 8),)),
    "split by a reshape": (
        "%y: f32[2,4,4] = reshape(%x) {new_sizes=(2, 4, 4), dimensions=None}",
        (Part(0, 2), Part(1, 4)),
    ),
    "merged by a reshape": (
        "%y: f32[32] = reshape(%x) {new_sizes=(32,), dimensions=None}",
        (Part(0, 8),),
    ),
    "summed away": ("%y: f32[4] = reduce_sum(%x) {axes=(0,)}", ()),
    "cut out": (
        "%y: f32[6,4] = slice(%x) {start_indices=(0, 0), limit_indices=(6, 4), strides=None}",
        (Part(0, 6),),
    ),
    "cut in two": (
        "%y: f32[2,4], %z: f32[6,4] = split(%x) {sizes=(2, 6), axis=0}",
        (Part(0, 2),),
    ),
    "joined with others": (
        "%y: f32[16,4] = concatenate(%x, %x) {dimension=0}",
        (Part(0, 16),),
    ),
    "behind others without rows": (
        "%y: f32[12,4] = concatenate(%w, %x) {dimension=0}",
        (Part(0, 12),),
    ),
    "filled up": (
        "%y: f32[12,4] = pad(%x, 0.0:f32) {padding_config=((4, 0, 0), (0, 0, 0))}",
        (Part(0, 12),),
    ),
    "joined along features": (
        "%y: f32[8,8] = concatenate(%x, %x) {dimension=1}",
        (Part(0, 8),),
    ),
    "of a product": (
        "%y: f32[8,4] = dot_general(%x, %w) {dimension_numbers=(((1,), (0,)), ((), ()))}",
        (Part(0, 8),),
    ),
}


def rows_of(text: str) -> Parts:
    """Where the rows of dim 0 of %x are in %y."""
    graph = attach_rules(
        parse_graph(f"graph g(%x: f32[8,4], %w: f32[4,4]) {{\n  {text}\n  return %y\n}}")
    )
    return propagate(graph, {"%x": (Part(0, 8),)}).get("%y", ())


@pytest.mark.parametrize("name", STEPS)
def test_rows_through_an_op(name: str) -> None:
    text, expected = STEPS[name]
    assert rows_of(text) == expected


def test_a_carry_that_starts_without_rows_gets_them_in_the_body() -> None:
    graph = attach_rules(
        parse_graph(
            """graph g(%x: f32[8,4], %zeros: f32[8,4]) {
  %y: f32[8,4] = while(%x, %zeros) {cond_nconsts=0, body_nconsts=1} [
    graph test(%t: f32[8,4]) {
      %go: bool[] = is_large(%t)
      return %go
    }
    graph body(%b: f32[8,4], %c: f32[8,4]) {
      %d: f32[8,4] = add(%b, %c)
      return %d
    }
  ]
  return %y
}"""
        )
    )
    found = propagate(graph, {"%x": (Part(0, 8),)})
    assert {found[name] for name in ("%b", "%c", "%d", "%t", "%y")} == {(Part(0, 8),)}
    assert "%zeros" not in found


def test_rows_of_a_scan_are_stacked_and_cut_into_slices() -> None:
    graph = attach_rules(
        parse_graph(
            """graph g(%x: f32[8,4], %w: f32[3,4,4]) {
  %s: f32[8,4], %k: f32[3,8,4] = scan(%x, %w) {length=3, num_consts=0, num_carry=1} [
    graph body(%a: f32[8,4], %b: f32[4,4]) {
      %c: f32[8,4] = dot_general(%a, %b) {dimension_numbers=(((1,), (0,)), ((), ()))}
      return %c, %c
    }
  ]
  return %s, %k
}"""
        )
    )
    found = propagate(graph, {"%x": (Part(0, 8),)})
    assert found["%s"] == (Part(0, 8),)
    assert found["%k"] == (Part(1, 8),)
    assert "%b" not in found
