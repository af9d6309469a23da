"""Equations that hold no rows: a microbatch has those of the whole batch, and their ops."""

import pytest

from autopar.frontend.trace.graph import build
from tests.planner.slicing import source


@pytest.mark.parametrize("model", ["tied", "gpt_scan"])
def test_a_microbatch_has_the_ops_of_the_whole_batch(model: str) -> None:
    trace = source(model).trace_at(4, cut=True)
    whole, part = trace.whole, trace.part
    # Built by itself, the graph is the same.
    assert build(part) == part.graph
    pairs = list(zip(whole.graph.ops, part.graph.ops, strict=True))
    for one, own in pairs:
        if one is own:
            assert [v.shape for v in one.results] == [v.shape for v in own.results]
    updates = [(one, own) for one, own in pairs if one.origin.region == "update"]
    assert updates
    assert all(one is own for one, own in updates)
    assert any(one is not own for one, own in pairs)
