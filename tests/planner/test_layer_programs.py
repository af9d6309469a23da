"""Layers at sizes of microbatch that nobody traced."""

from dataclasses import replace

import pytest

from autopar.cost.listing import Seconds
from autopar.cost.stage import StageCost
from autopar.ir.graph import Graph
from autopar.ir.stages import Remat
from autopar.planner.sliced_step import LayerPrograms
from autopar.rules import RuleBook
from tests.planner.slicing import sliced


def shown(graph: Graph) -> str:
    """A graph's text without what depends on how often it runs."""
    return str(replace(graph, ops=tuple(replace(op, runs=1, rule=None) for op in graph.ops)))


@pytest.mark.parametrize("remat", Remat)
@pytest.mark.parametrize("model", ["mlp", "gpt_scan", "unet"])
def test_a_layer_between_two_sizes_is_the_layer_traced_there(model: str, remat: Remat) -> None:
    """Priced from a trace in eight microbatches, a layer in two is what a trace in two gives."""
    small = LayerPrograms(sliced(model, 8), RuleBook())
    traced = LayerPrograms(sliced(model, 2), RuleBook())
    assert len(small.layers) == len(traced.layers)
    for layer in range(len(small.layers)):
        plain, mine = small.at(layer, traced.rows), small.at(layer, traced.rows, remat)
        theirs = traced.at(layer, traced.rows, remat)
        assert plain.joint.graph.op_count <= mine.joint.graph.op_count
        assert shown(mine.joint.graph) == shown(theirs.joint.graph)
        assert [shown(p.graph) for p in mine.parts] == [shown(p.graph) for p in theirs.parts]


def test_lines_end_at_zero() -> None:
    few, many = (StageCost(Seconds(s, s, s), working_bytes=int(s)) for s in (10.0, 30.0))
    half = few.towards(many, 0.5)
    assert (half.forward, half.working_bytes) == (Seconds(20.0, 20.0, 20.0), 20)
    assert few.towards(many, -1.0) == StageCost()
    assert few.towards(few, 0.7) == few
