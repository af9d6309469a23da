"""Sizes between two graphs that differ in rows alone."""

from fractions import Fraction

import pytest

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.record import parse_graph
from autopar.ir.resize import Between


def rows(count: int) -> Graph:
    return parse_graph(f"""
    graph step(%x: f32[{count},3]) {{
      %y: f32[{6 * count}] = reshape(%x) flops={count * 10} {{new_sizes=({6 * count},), dim=None}}
      return %y
    }}
    """)


def between(share: Fraction) -> Graph:
    low, high = rows(2), rows(16)
    sizes = Between(share)
    value = sizes.value(low.inputs[0].value, high.inputs[0].value)
    op = sizes.op(low.ops[0], high.ops[0])
    assert value.shape[0] * 6 == op.results[0].shape[0]
    return Graph("between", (), (op,), ())


@pytest.mark.parametrize("count", [2, 4, 9, 16, 30])
def test_every_size_lies_on_the_line(count: int) -> None:
    op = between(Fraction(count - 2, 14)).ops[0]
    assert str(op) == str(rows(count).ops[0])


def test_a_broken_size_is_refused() -> None:
    with pytest.raises(GraphError, match="not whole"):
        between(Fraction(1, 3 * 14 * 6))


def test_other_ops_are_refused() -> None:
    other = parse_graph("graph g(%x: f32[2,3]) { %y: f32[2,3] = neg(%x) return %y }")
    with pytest.raises(GraphError, match="is neg in the other"):
        Between(Fraction(1, 2)).op(rows(2).ops[0], other.ops[0])
