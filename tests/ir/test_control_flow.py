"""The index maps of control flow against plain interpreters of its four ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import GraphError
from autopar.ir.control_flow import PortKind
from autopar.ir.graph import Graph, Op
from autopar.ir.record import parse_graph
from autopar.ir.values import Input, Role, Value

TRIPS = 2
Term = tuple[object, ...]  # what a value is made of


def values(prefix: str, count: int) -> tuple[Value, ...]:
    """So many scalars."""
    return tuple(Value(f"{prefix}{i}", (), "f32") for i in range(count))


class Steps:
    """Draws graphs of random ops with bodies, every name used once."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.made = data, 0

    def count(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def names(self, count: int) -> tuple[Value, ...]:
        self.made += 1
        return values(f"%v{self.made}_", count)

    def graph(self, inputs: int, outputs: int, depth: int) -> Graph:
        """A graph whose outputs are any of its values."""
        given = self.names(inputs)
        seed = Op("iota", (), self.names(1))
        known, ops = [*(v.name for v in given), seed.results[0].name], [seed]
        for _ in range(self.count(0, 2)):
            ops.append(self.op(known, depth))
            known += [r.name for r in ops[-1].results]
        return Graph(
            "g",
            tuple(Input(v, Role.BATCH) for v in given),
            tuple(ops),
            tuple(self.data.draw(st.sampled_from(known)) for _ in range(outputs)),
        )

    def op(self, known: Sequence[str], depth: int) -> Op:
        """An op that reads any of the known values."""
        kinds = ["f", "scan", "while", "cond", "remat2"][: 5 if depth else 1]
        kind = self.data.draw(st.sampled_from(kinds))
        a, b, k, n = (self.count(0, 2) for _ in range(4))
        params: tuple[tuple[str, int], ...] = ()
        bodies: tuple[Graph, ...] = ()
        if kind == "f":
            operands, results = a + b, 1
        elif kind == "scan":
            params = (("length", TRIPS), ("num_consts", a), ("num_carry", k))
            operands, results = a + k + b, k + n
            bodies = (self.graph(operands, results, depth - 1),)
        elif kind == "while":
            params = (("cond_nconsts", a), ("body_nconsts", b))
            operands, results = a + b + k, k
            bodies = (self.graph(a + k, 1, depth - 1), self.graph(b + k, k, depth - 1))
        elif kind == "cond":
            operands, results = 1 + a, n
            bodies = tuple(self.graph(a, n, depth - 1) for _ in range(2))
        else:
            operands, results = a, n
            bodies = (self.graph(a, n, depth - 1),)
        read = tuple(self.data.draw(st.sampled_from(known)) for _ in range(operands))
        return Op(kind, read, self.names(results), params, graphs=bodies)


Control = Callable[[Op, Sequence[Term]], Sequence[Term]]


def run(graph: Graph, given: Sequence[Term], control: Control) -> list[Term]:
    """What a graph's outputs are made of."""
    known = dict(zip((i.value.name for i in graph.inputs), given, strict=True))
    for op in graph.ops:
        read = [known[str(o)] for o in op.operands]
        made = control(op, read) if op.graphs else [(op.results[0].name, *read)]
        known.update(zip((r.name for r in op.results), made, strict=True))
    return [known[str(o)] for o in graph.outputs]


def as_jax_has_it(op: Op, given: Sequence[Term]) -> Sequence[Term]:
    """What JAX's documentation says of each op, by slices of its operands."""
    whole = dict(op.params)

    def body(b: int, *operands: Term) -> list[Term]:
        return run(op.graphs[b], operands, as_jax_has_it)

    if op.kind == "scan":
        consts, count = whole["num_consts"], whole["num_carry"]
        assert isinstance(consts, int)
        assert isinstance(count, int)
        fixed, carry = given[:consts], list(given[consts : consts + count])
        stacks: list[list[Term]] = [[] for _ in op.results[count:]]
        for t in range(TRIPS):
            rows = [("row", x, t) for x in given[consts + count :]]
            left = body(0, *fixed, *carry, *rows)
            carry = left[:count]
            for stack, row in zip(stacks, left[count:], strict=True):
                stack.append(row)
        return [*carry, *(("stack", *rows) for rows in stacks)]
    if op.kind == "while":
        tests, consts = whole["cond_nconsts"], whole["body_nconsts"]
        assert isinstance(tests, int)
        assert isinstance(consts, int)
        of_test, of_body = given[:tests], given[tests : tests + consts]
        carry = list(given[tests + consts :])
        for _ in range(TRIPS):
            (asked,) = body(0, *of_test, *carry)
            carry = [("while", asked, left) for left in body(1, *of_body, *carry)]
        return carry
    if op.kind == "cond":
        branches = [body(b, *given[1:]) for b in range(len(op.graphs))]
        return [("either", given[0], *found) for found in zip(*branches, strict=True)]
    return body(0, *given)


def by_ports(op: Op, given: Sequence[Term]) -> Sequence[Term]:
    """The same by the op's ports alone, whatever it is."""
    flow = op.control_flow
    assert flow is not None
    outside = dict(zip(flow.operands, given, strict=True))
    left = {port: [outside[port]] if port.is_carry else list[Term]() for port in flow.ports}
    for t in range(TRIPS if flow.repeats else 1):
        asked: list[Term] = []
        for b, body in enumerate(op.graphs):
            inside = [
                left[port][0] if port.is_carry
                else ("row", outside[port], t) if port.by_row
                else outside[port]
                for port in flow.inputs[b]
            ]  # fmt: skip
            found = run(body, inside, by_ports)
            for port, term in zip(flow.outputs[b], found, strict=True):
                if port.kind is PortKind.TEST:
                    asked = [term]
                elif port.is_carry:
                    left[port] = [("while", *asked, term) if asked else term]
                else:
                    left[port].append(term)
    chosen = [outside[port] for port in flow.operands if port.kind is PortKind.CHOICE]
    return [
        ("stack", *left[port]) if port.by_row
        else ("either", *chosen, *left[port]) if chosen
        else left[port][0]
        for port in flow.results
    ]  # fmt: skip


@settings(max_examples=150)
@given(data=st.data())
def test_values_flow_through_random_nested_bodies_as_jax_has_it(data: st.DataObject) -> None:
    graph = Steps(data).graph(inputs=3, outputs=3, depth=2)
    given = [(name,) for name in ("x", "y", "z")]
    assert run(graph, given, by_ports) == run(graph, given, as_jax_has_it)


def test_every_operand_and_result_has_one_port_and_so_has_every_place_in_the_bodies() -> None:
    op = Op(
        "while",
        ("%a", "%b", "%k"),
        values("%r", 1),
        (("cond_nconsts", 1), ("body_nconsts", 1)),
        graphs=(
            Graph("test", tuple(Input(v, Role.BATCH) for v in values("%t", 2)), (), ("%t1",)),
            Graph("body", tuple(Input(v, Role.BATCH) for v in values("%i", 2)), (), ("%i1",)),
        ),
    )
    flow = op.control_flow
    assert flow is not None
    assert [p.kind.value for p in flow.ports] == ["constant", "constant", "carry", "test"]
    carry = flow.operands[2]
    assert (carry.operand, carry.result) == (2, 0)
    assert carry.inputs == ((1, 1), (0, 1))
    assert carry.outputs == ((1, 0),)
    assert [[p.kind.value for p in row] for row in flow.inputs] == [
        ["constant", "carry"],
        ["constant", "carry"],
    ]
    assert [[p.kind.value for p in row] for row in flow.outputs] == [["test"], ["carry"]]


def test_an_op_without_bodies_has_no_ports() -> None:
    graph = parse_graph("graph g(%x: f32[4]) {\n  %y: f32[4] = neg(%x)\n  return %y\n}")
    assert graph.ops[0].control_flow is None


def test_a_loop_whose_parameters_are_missing_is_refused_by_name() -> None:
    body = Graph("b", (), (), ())
    op = Op("scan", (), (), (("length", 3), ("num_consts", 0)), graphs=(body,))
    with pytest.raises(GraphError, match=r"op scan has no parameter 'num_carry'"):
        _ = op.control_flow
