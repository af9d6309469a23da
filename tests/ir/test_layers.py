"""A layer sequence knows what it must cover, and prints a line a layer."""

from dataclasses import replace

import pytest

from autopar.errors import GraphError
from autopar.ir.record import parse_graph
from autopar.ir.stages import Layer, LayerSequence

GRAPH = parse_graph("""
graph f(%x: f32[4]) {
  %0: f32[4] = sin(%x)  flops=4
  %1: f32[4] = cos(%0)  flops=4
  %2: f32[4] = mul(%0, %1)  backward
  return %2
}""")
TWO = LayerSequence(
    GRAPH, (Layer(0, 0, 4, 16, "a"), Layer(1, 1, 4, 0, "b", same_as=0)), homes=(0, 1, 1)
)


def test_layers_that_follow_one_another_verify() -> None:
    TWO.verify()
    LayerSequence(GRAPH, (Layer(0, 2, 8, 0),)).verify()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(TWO, layers=(Layer(1, 1, 4, 0),)), "should start at 0"),
        (replace(TWO, layers=(Layer(0, 0, 4, 0), Layer(2, 2, 4, 0))), "should start at 1"),
        (replace(TWO, layers=(Layer(0, 0, 4, 0), Layer(1, 0, 4, 0))), "should start at 1"),
        (replace(TWO, layers=(Layer(0, 3, 4, 0),)), "end at op 3"),
        (replace(TWO, homes=()), "end at op 1"),
        (replace(TWO, homes=(0, 1)), "2 homes for 3 ops"),
    ],
)
def test_what_breaks_the_laws_is_refused(broken: LayerSequence, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        broken.verify()


def test_a_sequence_prints_a_line_a_layer() -> None:
    lines = str(TWO).splitlines()
    assert lines[0] == "layers f {"
    assert lines[1].split() == ["L0:", "ops", "0..0", "4", "FLOP", "cut", "16", "B", "a"]
    assert lines[2].split() == ["L1:", "ops", "1..1", "4", "FLOP", "cut", "0", "B", "b", "as", "L0"]
