"""When values are held, before there is a listing: the same rules as for one."""

import pytest

from autopar.cost.memory import held_bytes
from autopar.cost.spans import stored_spans
from autopar.frontend import StepSpec, trace
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.planner.plan import graph_of
from autopar.rules import RuleBook
from tests.cost.test_memory import dot, element, listing
from tests.cost.test_memory import graph_of as graph_text
from tests.toys import TOYS


def test_fused_values_have_no_span() -> None:
    graph = graph_text(
        dot("%a", "%x", "%x"), element("%t", "tanh", "%a"), dot("%b", "%t", "%x"),
        element("%s", "neg", "%b"), dot("%c", "%s", "%a"), returns='%c "y"',
    )  # fmt: skip
    assert stored_spans(graph) == {
        "%x": (0, 4), "%a": (0, 4), "%t": (1, 2), "%b": (2, 2), "%s": (3, 4), "%c": (4, 4),
    }  # fmt: skip


def test_a_fused_reader_keeps_its_source_until_it_runs() -> None:
    graph = graph_text(
        dot("%a", "%x", "%x"), element("%n", "neg", "%a"), dot("%b", "%a", "%x"),
        element("%y", "add", "%n, %b"), returns='%y "y"',
    )  # fmt: skip
    assert stored_spans(graph) == {"%x": (0, 2), "%a": (0, 1), "%b": (1, 2), "%y": (2, 2)}


@pytest.mark.parametrize("toy", sorted(TOYS))
def test_spans_lie_within_the_step(toy: str) -> None:
    function, arguments = TOYS[toy]
    graph = graph_of(trace(StepSpec(function), arguments, {}), RuleBook())
    spans = stored_spans(graph)
    assert {i.value.name for i in graph.inputs} <= spans.keys()
    assert all(first <= last for first, last in spans.values())
    if not any(op.graphs for op in graph.ops):
        assert most_held(graph) >= held_bytes(graph, listing(graph), MeshShape((), ())).peak_bytes


def most_held(graph: Graph) -> int:
    """The most that the spans hold at once, each buffer rounded up as a device does."""
    spans, values = stored_spans(graph), graph.nested_values
    inputs = {i.value.name for i in graph.inputs}
    end = max(last for _, last in spans.values())
    return max(
        sum(
            values[n].nbytes if n in inputs else -(-values[n].nbytes // 256) * 256
            for n, (first, last) in spans.items()
            if first <= k <= last
        )
        for k in range(end + 1)
    )
