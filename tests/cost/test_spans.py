"""When values are held, before there is a plan: what the listing of one device holds."""

import pytest

from autopar.cost.kernels import Kernel, Stored
from autopar.cost.liveness import BlockSpans, piece_spans
from autopar.cost.memory import held_bytes, held_spans
from autopar.cost.sizes import Sizes
from autopar.frontend import StepSpec, trace
from autopar.ir.graph import Graph
from autopar.ir.sharding import MeshShape
from autopar.passes.shard.model.whole_listing import whole_listing
from autopar.rules import RuleBook, attach_rules
from tests.cost.test_memory import dot, element
from tests.cost.test_memory import graph_of as graph_text
from tests.toys import TOYS

WHOLE = MeshShape((), ())
_NONE = frozenset[str]()


def spans_of(graph: Graph) -> BlockSpans:
    """The spans of a step that lies whole on one device."""
    return held_spans(graph, whole_listing(graph), WHOLE)


def test_fused_values_have_no_span() -> None:
    graph = graph_text(
        dot("%a", "%x", "%x"), element("%t", "tanh", "%a"), dot("%b", "%t", "%x"),
        element("%s", "neg", "%b"), dot("%c", "%s", "%a"), returns='%c "y"',
    )  # fmt: skip
    assert spans_of(graph).spans == {
        "%x": (0, 2), "%a": (0, 4), "%t": (1, 2), "%b": (2, 3), "%s": (3, 4), "%c": (4, 4),
    }  # fmt: skip


def test_spans_come_in_an_order_that_no_hash_decides() -> None:
    names = [f"%x{n}" for n in range(8)]
    stored = Stored(
        (Kernel(0, ("%y",), frozenset(names)),), dict.fromkeys([*names, "%y"], 1), _NONE
    )
    assert [*piece_spans(stored)] == [*names, "%y"]


def test_a_fused_reader_keeps_its_source_until_it_runs() -> None:
    graph = graph_text(
        dot("%a", "%x", "%x"), element("%n", "neg", "%a"), dot("%b", "%a", "%x"),
        element("%y", "add", "%n, %b"), returns='%y "y"',
    )  # fmt: skip
    assert spans_of(graph).spans == {"%x": (0, 1), "%a": (0, 2), "%b": (1, 2), "%y": (2, 2)}


@pytest.mark.parametrize("toy", sorted(TOYS))
def test_spans_add_up_to_what_the_listing_holds(toy: str) -> None:
    function, arguments = TOYS[toy]
    graph = attach_rules(trace(StepSpec(function), arguments, {}).graph, RuleBook())
    block = spans_of(graph)
    assert all(0 <= first <= last < block.length for first, last in block.spans.values())
    if not any(op.graphs for op in graph.ops):
        held = held_bytes(graph, whole_listing(graph), Sizes(graph, WHOLE))
        values, inputs = graph.nested_values, {i.value.name for i in graph.inputs}
        returned = {graph.outputs[o] for o, _ in graph.donated}
        most = max(
            sum(
                -(-values[n].nbytes // 256) * 256
                for n, (first, last) in block.spans.items()
                if n in values and n not in inputs | returned and first <= k <= last
            )
            for k in range(block.length)
        )
        assert held.argument_bytes + most >= 0.95 * held.peak_bytes
