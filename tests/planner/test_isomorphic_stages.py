"""Submeshes that run the same thing share one answer, whatever order and names it has."""

from autopar.ir.program import SubmeshGraph
from autopar.ir.record import parse_graph
from autopar.ir.sharding import Assignment, MeshShape, Sharding
from autopar.ir.sharding_plan import Outcome, ShardingPlan, Status
from autopar.planner.submesh_sharding import ColoredGraph, Match, NodeColors, match

STAGE = """
graph stage(%x: f32[8,4], %a: f32[4,4] state "{one}", %b: f32[4,4] state "{two}") {
  %y: f32[8,4] = dot_general(%x, %a) {dimension_numbers=(((1,), (0,)), ((), ()))}
  %z: f32[8,4] = dot_general(%y, %b) {dimension_numbers=(((1,), (0,)), ((), ()))}
{updates}
  return %z, %a2, %b2
}
"""
FIRST = "  %a2: f32[4,4] = {kind}(%a)"
SECOND = "  %b2: f32[4,4] = {kind}(%b)"


def colored(
    colors: NodeColors, *updates: str, kind: str = "tanh", paths: str = "1/w 2/w"
) -> ColoredGraph:
    one, two = paths.split()
    text = STAGE.replace("{one}", one).replace("{two}", two)
    text = text.replace("{updates}", "\n".join(updates).replace("{kind}", kind))
    graph = parse_graph(text)
    joint = SubmeshGraph(0, graph, tuple(range(4)), (), frozenset())
    # The first two ops are a loop's, in their order.
    return colors.of(joint, [0, 1, -1, -1], {})


def plan_of(graph: ColoredGraph) -> ShardingPlan:
    """Rows of what the first update makes, columns of what the second does."""
    rows, columns = Sharding((("m",), ())), Sharding(((), ("m",)))
    return ShardingPlan(
        MeshShape(("m",), (2,)),
        tuple((name, rows if "a" in name else columns) for name in graph.joint.graph.values),
        (((2,), Assignment((0,))), ((3,), Assignment((1,)))),
        (("%x", "forward", rows),),
        (),
        Outcome(Status.OPTIMAL, 1.0, 1.0, ""),
    )


def found(before: ColoredGraph, after: ColoredGraph) -> Match:
    assert before.key == after.key
    matched = match(before, after)
    assert matched is not None
    return matched


def test_names_of_parameters_do_not_matter() -> None:
    colors = NodeColors()
    before = colored(colors, FIRST, SECOND)
    assert found(before, colored(colors, FIRST, SECOND, paths="9/w 10/w")).in_order


def test_updates_in_another_order_are_matched_by_what_they_update() -> None:
    colors = NodeColors()
    before, after = colored(colors, FIRST, SECOND), colored(colors, SECOND, FIRST)
    matched = found(before, after)
    assert not matched.in_order
    assert matched.names == {name: name for name in before.joint.graph.values}
    plan = matched.plan(plan_of(before))
    plan.verify_values(after.joint.graph)
    assert plan.sharding_of == plan_of(before).sharding_of
    # Op 2 of the other is the second update.
    assert plan.assignments == (((2,), Assignment((1,))), ((3,), Assignment((0,))))


def test_ops_matter() -> None:
    colors = NodeColors()
    before, after = colored(colors, FIRST, SECOND), colored(colors, FIRST, SECOND, kind="exp")
    assert before.key != after.key
    assert match(before, after) is None


def test_what_an_update_reads_matters() -> None:
    colors = NodeColors()
    crossed = SECOND.replace("(%b)", "(%a)")
    before, after = colored(colors, FIRST, SECOND), colored(colors, FIRST, crossed)
    assert before.key != after.key
    assert match(before, after) is None
