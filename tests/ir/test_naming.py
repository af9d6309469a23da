"""Shardings in words say what a partial value waits for."""

import pytest

from autopar.ir.naming import split
from autopar.ir.record import parse_graph
from autopar.ir.sharding import Assignment, MeshShape
from autopar.rules import attach_rules

REDUCTION = """
graph step(%x: f32[64,512] batch "x") {{
  %s: f32[512] = {kind}(%x) {{axes=(0,)}}
  return %s
}}
"""


@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        ("reduce_sum", "to be summed over data"),
        ("reduce_max", "to be reduced to the maximum over data"),
        ("reduce_min", "to be reduced to the minimum over data"),
    ],
)
def test_a_split_reduction_tells_what_is_done_to_its_parts(kind: str, waits: str) -> None:
    (op,) = attach_rules(parse_graph(REDUCTION.format(kind=kind))).ops
    assert op.rule is not None
    (rows,) = op.rule.operands[0][0]
    assert split(op, Assignment((rows,)), MeshShape.of("data=8")) == f"P('data') -> P() {waits}"
