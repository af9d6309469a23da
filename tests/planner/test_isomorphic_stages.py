"""Submeshes that run the same thing share one answer."""

from autopar.ir.parse import parse_graph
from autopar.planner.submesh_sharding import structure_hash

LAYER = """
graph {name}({x}: f32[8,4], {w}: f32[4,4] state "{path}") {{
  {y}: f32[8,4] = dot_general({x}, {w}) {{dimension_numbers=(((1,), (0,)), ((), ()))}}
  return {y}
}}
"""


def layer(name: str, *values: str, path: str = "w", kind: str = "dot_general") -> str:
    x, w, y = values
    text = LAYER.format(name=name, x=x, w=w, y=y, path=path).replace("dot_general(", f"{kind}(")
    return structure_hash(parse_graph(text))


def test_names_and_paths_do_not_matter() -> None:
    assert layer("a", "%0", "%1", "%2") == layer("b", "%7", "%9", "%8", path="v")


def test_ops_do() -> None:
    assert layer("a", "%0", "%1", "%2") != layer("a", "%0", "%1", "%2", kind="dot")
