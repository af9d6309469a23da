"""Every model of the zoo becomes a graph whose text reads back."""

import jax
import pytest

from autopar.frontend import build
from autopar.ir.record import parse_graph
from autopar.ir.values import Role
from autopar.rules import attach_rules
from tests.frontend.tracing import checked, paths, traced
from tests.zoo import Optimizer, cases

NAMES = sorted(cases("adam"))


@pytest.mark.smoke
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_becomes_a_graph_that_reads_back(name: str, optimizer: Optimizer) -> None:
    case = cases(optimizer)[name]
    state, batch = jax.eval_shape(case.create_state, jax.random.key(0)), case.batch(0)
    step = traced(case.step, state, batch)
    graph = checked(step)
    assert len(paths(graph, Role.STATE)) == len(jax.tree.leaves(state)) == len(graph.donated)
    assert paths(graph, Role.BATCH) == [f"batch/{field}" for field in sorted(batch)]
    text = str(graph)
    assert parse_graph(text) == graph
    assert str(parse_graph(text)) == text
    ruled = attach_rules(build(step))
    assert str(ruled) != text
    assert str(parse_graph(str(ruled))) == text
