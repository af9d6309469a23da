"""Graphs read back from their text."""

from dataclasses import replace

import pytest

import autopar.ir.graph
from autopar.errors import GraphError, GraphSyntaxError
from autopar.ir.graph import Graph, Op, Origin
from autopar.ir.record import parse_graph
from autopar.ir.values import Input, Literal, Role, Value

LOOP = """
graph outer(%0: f32[4,8] constant "a \\"b\\"", %1: key<fry>[] state) {
  %2: f32[4,8], %3: i32[] = scan(%0, -inf:f32, opaque:f32[3], True:bool, (1+2j):c64) flops=12
  {length=3, names=('a', "it's {", ('x', None)), y=-0.5, on=False} "Gpt/h0" backward [  # a b.py:12
    graph body_2(%4: f32[4,8]) {
      %5: f32[4,8] = sin(%4)
      debug_print(%5) {fmt='hi {}'}
      return %5, 0:i32
    }
    graph empty(){ return }
  ]
  return %2 "0/x" <- %0, 1.5:f32 "loss", %1
}
"""

ALIGNED = """\
graph mlp(
  %x: f32[64,512]  batch "x",
  %w: f32[512,8]   state "params/w"
) {
  %0: f32[64,8]       = dot_general(%x, %w)                     forward  flops=9 "Mlp"  # a.py:1
  %1: f32[512,8]      = mul(%w, 0.5:f32)                        update
  return
    %1 "0/w" <- %w,
    %0 "1"
}"""


def test_every_part_is_read() -> None:
    graph = parse_graph(LOOP)
    assert graph.inputs == (
        Input(Value("%0", (4, 8), "f32"), Role.CONSTANT, 'a "b"'),
        Input(Value("%1", (), "key<fry>"), Role.STATE),
    )
    (scan,) = graph.ops
    assert scan.operands == (
        "%0",
        Literal("-inf", "f32"),
        Literal("opaque", "f32", (3,)),
        Literal("True", "bool"),
        Literal("(1+2j)", "c64"),
    )
    assert scan.results == (Value("%2", (4, 8), "f32"), Value("%3", (), "i32"))
    assert scan.params == (
        ("length", 3),
        ("names", ("a", "it's {", ("x", None))),
        ("y", -0.5),
        ("on", False),
    )
    assert (scan.flops, scan.origin) == (12, Origin("backward", "Gpt/h0", "a b.py:12"))
    assert [g.name for g in scan.graphs] == ["body_2", "empty"]
    assert scan.graphs[0].ops[1] == Op("debug_print", ("%5",), (), (("fmt", "hi {}"),))
    assert graph.outputs == ("%2", Literal("1.5", "f32"), "%1")
    assert graph.output_paths == ("0/x", "loss", "")
    assert graph.donated == ((0, 0),)


def test_printed_text_reads_back_and_prints_the_same() -> None:
    graph = parse_graph(LOOP)
    assert parse_graph(str(graph)) == graph
    assert str(parse_graph(str(graph))) == str(graph)


def test_the_example_in_the_documentation_is_true() -> None:
    text = str(autopar.ir.graph.__doc__)
    graph = parse_graph(text[text.index("    graph") : text.index("What follows")])
    assert [op.kind for op in graph.ops] == ["dot_general", "mul"]
    assert graph.donated == ((0, 1),)


def test_columns_line_up() -> None:
    assert str(parse_graph(ALIGNED)) == ALIGNED


def test_rules_are_left_out() -> None:
    line = "%1: f32[4] = sin(%0)  # a.py:1  ## (a) -> (a); a:sum"
    text = f"graph f(%0: f32[4]) {{\n  {line}\n  return %1\n}}"
    (op,) = parse_graph(text).ops
    assert op.rule is None
    assert op.origin.line == "a.py:1"
    bare = parse_graph(text.replace("  # a.py:1", ""))
    assert bare.ops == (replace(op, origin=Origin()),)


@pytest.mark.parametrize("name", ["step", "<lambda>", "my step"])
def test_any_function_name_reads_back(name: str) -> None:
    graph = Graph(name, (), (), ())
    assert parse_graph(str(graph)) == graph


@pytest.mark.parametrize("path", ['a "quoted" key', "back\\slash", "new\nline", "Ünïcode/#%[]{}()"])
def test_any_path_reads_back(path: str) -> None:
    value = Value("%0", (2,), "bf16")
    graph = Graph("f", (Input(value, Role.STATE, path),), (), ("%0",), (path,), ((0, 0),))
    assert parse_graph(str(graph)) == graph


FAULTS = {
    "graph f(%0 f32[4]) { return %0 }": (1, "':'"),
    "graph f(%0: f32[4,]) { return %0 }": (1, "a shape"),
    "graph f(%0: f32[4]) {\n  %1: f32[4] = sin(%0\n  return %1\n}": (3, "','"),
    "graph f(%0: f32[4]) {\n  %1: f32[4] = sin(half)\n  return %1\n}": (2, "a value such as %0"),
    "graph f(%0: f32[4]) {\n  %1: f32[4] = sin(%0) {y=open}\n  return %1\n}": (2, "parameters"),
    "graph f(%0: f32[4]) {\n  %1: f32[4] = sin(%0) sideways\n  return %1\n}": (
        2,
        "an op or return",
    ),
    "graph f(%0: f32[4]) { return %0 } }": (1, "the end of the text"),
    "graph f(%0: f32[4]) {\n": (2, "an op or return"),
    "hello": (1, "'graph '"),
    "graph f(%0: f32[4]) { return %0 <- 3 }": (1, "the name of an input"),
    "graph f(%0: f32[4]) { return %0 <- %9 }": (1, "the name of an input, not %9"),
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_is_told_with_its_line(text: str) -> None:
    number, expected = FAULTS[text]
    with pytest.raises(GraphSyntaxError) as caught:
        parse_graph(text)
    message = str(caught.value)
    assert message.startswith(f"line {number}, ")
    assert f"expected {expected}" in message
    assert text.split("\n")[number - 1] in message


def test_values_are_defined_before_use_and_once() -> None:
    with pytest.raises(GraphError, match=r"reads %7 before it is made"):
        parse_graph("graph f(%0: f32[4]) {\n  %1: f32[4] = sin(%7)\n  return %1\n}")
    with pytest.raises(GraphError, match=r"%0 of graph f is made twice"):
        parse_graph("graph f(%0: f32[4]) {\n  %0: f32[4] = sin(%0)\n  return %0\n}")
    with pytest.raises(GraphError, match=r"returns %3, which nothing makes"):
        parse_graph("graph f(%0: f32[4]) { return %3 }")


def test_ops_that_are_alike_but_for_names_are_read_by_the_first() -> None:
    text = """graph step(%0: f32[8], %1: f32[8]) {
  %2: f32[8]          = mul(%0, 0.5:f32)                        forward  "a/layer0" {k='"{'}  # m:7
  %3: f32[8]          = mul(%1, 0.5:f32)                        forward  "a/layer1" {k='"{'}  # m:7
  %4: f32[8]          = mul(%2, 0.5:f32)                        forward  "a/\\"2{" {k='"{'}  # m:7
  %5: f32[8], %6: f32[8] = pair(%3, %4)                         update
  %7: f32[8], %8: f32[8] = pair(%5, %5)                         update
  return %6, %8
}"""
    graph = parse_graph(text)
    assert graph.text == text
    assert [op.origin.module for op in graph.ops] == ["a/layer0", "a/layer1", 'a/"2{', "", ""]
    assert [op.operands[0] for op in graph.ops] == ["%0", "%1", "%2", "%3", "%5"]
    with pytest.raises(GraphSyntaxError, match=r"line 3, column .*escaped as in JSON"):
        parse_graph(text.replace("layer1", "\\x"))
    with pytest.raises(GraphError, match="reads %99 before it is made"):
        parse_graph(text.replace("mul(%1,", "mul(%99,"))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("%2: f32[8] = mul(%1,", '"a b)": f32[8] = mul(%1,', "an op or return"),
        ("%2: f32[8] = mul(%1,", '%2: f32[8] = mul("a",', "a value such as %0"),
    ],
)
def test_a_text_is_no_name_on_a_line_like_one_before_it(old: str, new: str, expected: str) -> None:
    text = """graph step(%0: f32[8]) {
  %1: f32[8] = mul(%0, 0.5:f32) "m/a"  # m:7
  %2: f32[8] = mul(%1, 0.5:f32) "m/b"  # m:7
  return %2
}"""
    assert [op.origin.module for op in parse_graph(text).ops] == ["m/a", "m/b"]
    with pytest.raises(GraphSyntaxError, match=f"(?s)line 3, .*expected {expected}"):
        parse_graph(text.replace(old, new))
