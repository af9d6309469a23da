"""The graph of a step as plain data: inputs, ops in order, outputs; loops hold graphs.

Text form, which `autopar.ir.record` reads back (`<-` names the input whose buffer an output takes):

    graph mlp(
      %x: f32[64,512]  batch "x",
      %w: f32[512,8]   state "params/w"
    ) {
      %0: f32[64,8] = dot_general(%x, %w)  forward flops=524288 "Mlp" {k=((1,), (0,))}  # a.py:12
      %1: f32[512,8] = mul(%w, 0.5:f32)    update  flops=4096  # a.py:13
      return
        %1 "0/w" <- %w,
        %0 "1"
    }

What follows an op's operands may stand in any order and be left out. `## ...` shows the op's rule,
which is not read back: `autopar.rules.attach_rules` gives it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.errors import GraphError
from autopar.ir.control_flow import REMAT, ControlFlow, control_flow
from autopar.ir.host_calls import ACTING_CALLS, HOST_CALLS
from autopar.ir.rule import Rule
from autopar.ir.values import Input, Literal, Value

# What a parameter may be. Its floats are finite: one that is not is written as text, "nan", as
# no two of those are equal.
Plain = None | bool | int | float | str | tuple["Plain", ...]
Operand = str | Literal
REGIONS = ("forward", "backward", "update")

# Where the printed columns of an op start; wider cells push what follows to the right.
_CALL_COLUMN, _NOTE_COLUMN = 22, 60
_LINE_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of an op: region of the step, module path, and the user's file:line."""

    region: str = "forward"
    module: str = ""
    line: str = ""


@dataclass(frozen=True)
class Op:
    """An operation: its kind is the JAX primitive's name, its params are plain data.

    `graphs` are the bodies of scan, while, cond and remat. `flops` counts one run of the op, of
    which a step of several microbatches makes `runs`.
    """

    kind: str
    operands: tuple[Operand, ...]
    results: tuple[Value, ...]
    params: tuple[tuple[str, Plain], ...] = ()
    flops: int = 0
    origin: Origin = Origin()
    graphs: tuple[Graph, ...] = ()
    rule: Rule | None = field(default=None, compare=False)
    runs: int = 1

    @cached_property
    def host_calls(self) -> tuple[Op, ...]:
        """The calls of Python that it is or holds."""
        inside = (call for body in self.graphs for op in body.ops for call in op.host_calls)
        return (self,) if self.kind in HOST_CALLS else tuple(inside)

    @cached_property
    def control_flow(self) -> ControlFlow | None:
        """The ports through which values enter and leave its bodies; None without bodies."""
        if not self.graphs:
            return None
        outside = len(self.operands), len(self.results)
        return control_flow(self.kind, dict(self.params), *outside, len(self.graphs))

    @property
    def acts(self) -> bool:
        """True if it runs though nobody reads what it makes."""
        return not self.results or any(c.kind in ACTING_CALLS for c in self.host_calls)

    def param(self, name: str) -> Plain:
        """A parameter by name; raises GraphError where the op has none of that name."""
        for key, value in self.params:
            if key == name:
                return value
        raise GraphError(f"op {self.kind} has no parameter {name!r}")

    def ints(self, name: str) -> tuple[int, ...]:
        """A parameter that is a tuple of whole numbers."""
        value = self.param(name)
        if not isinstance(value, tuple):
            raise GraphError(f"parameter {name!r} of op {self.kind} is {value!r}, not a tuple")
        return tuple(v for v in value if isinstance(v, int))

    def whole(self, name: str) -> int:
        """A parameter that is a whole number."""
        value = self.param(name)
        if not isinstance(value, int):
            raise GraphError(f"parameter {name!r} of op {self.kind} is {value!r}, not a number")
        return value

    @cached_property
    def value_operands(self) -> tuple[str, ...]:
        """Names of the operands that are values, in order."""
        return tuple([o for o in self.operands if isinstance(o, str)])

    def with_rule(self, rule: Rule) -> Op:
        """The same op under a rule: as `replace`, for all ops of a step, in a fifth of the time."""
        return self._changed(rule=rule)

    def running(self, runs: int) -> Op:
        """The same op, run so often in a step; see `with_rule`."""
        return self._changed(runs=runs)

    def with_flops(self, flops: int) -> Op:
        """The same op with its work; see `with_rule`."""
        return self._changed(flops=flops)

    def _changed(self, **fields: object) -> Op:
        made = object.__new__(Op)
        vars(made).update(vars(self), **fields)
        vars(made).pop("host_calls", None)  # which may be the op itself
        return made

    def __str__(self) -> str:
        return "\n".join(_op_lines(self, "", rules=True))


@dataclass(frozen=True)
class Graph:
    """A step or a loop body: inputs, ops in execution order, outputs."""

    name: str
    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Operand, ...]
    output_paths: tuple[str, ...] = ()
    # (output index, input index): state that comes back, so both lie alike and share a buffer.
    donated: tuple[tuple[int, int], ...] = ()

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """The values of this graph by name, bodies of loops left out."""
        table = {i.value.name: i.value for i in self.inputs}
        table.update((v.name, v) for op in self.ops for v in op.results)
        return table

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Value outside or inside of a remat -> the same value inside or outside of it."""
        return dict(_aliases(self.ops))

    @cached_property
    def nested_values(self) -> Mapping[str, Value]:
        """The values of this graph and of all bodies in it, by name."""
        table = dict(self.values)
        for op in self.ops:
            for body in op.graphs:
                table.update(body.nested_values)
        return table

    def op_at(self, path: Sequence[int]) -> Op:
        """The op at a path: (op index) or, inside bodies, (op, body, op, ...)."""
        graph = self
        for op, body in zip(path[:-1:2], path[1::2], strict=True):
            graph = graph.ops[op].graphs[body]
        return graph.ops[path[-1]]

    def value(self, operand: Operand) -> Value:
        """An operand as a value; a literal becomes a nameless value."""
        if isinstance(operand, Literal):
            return Value("", operand.shape, operand.dtype)
        return self.values[operand]

    def walk(self) -> Iterator[Op]:
        """Walk the ops, bodies of loops after the op that holds them."""
        for op in self.ops:
            yield op
            for body in op.graphs:
                yield from body.walk()

    @property
    def op_count(self) -> int:
        """The number of ops, bodies of loops included."""
        return sum(1 for _ in self.walk())

    @property
    def flops(self) -> int:
        """Floating-point operations of one run, loops times their trip counts."""
        return sum(op.flops for op in self.ops)

    def verify(self) -> None:
        """Raise GraphError unless every operand is defined before use and names are unique."""
        _verify(self, set())

    @property
    def text(self) -> str:
        """The text form without rules, as it is read back."""
        return "\n".join(_lines(self, "", rules=False))

    def __str__(self) -> str:
        return "\n".join(_lines(self, "", rules=True))


def _aliases(ops: Sequence[Op]) -> Iterator[tuple[str, str]]:
    """Pairs of names for one value inside and outside a remat."""
    for op in ops:
        if op.kind not in REMAT:
            continue
        body = op.graphs[0]
        for result, output in zip(op.results, body.outputs, strict=True):
            if isinstance(output, str):
                yield result.name, output
        for inner, operand in zip(body.inputs, op.operands, strict=True):
            if isinstance(operand, str):
                yield inner.value.name, operand
        yield from _aliases(body.ops)


def _verify(graph: Graph, taken: set[str]) -> None:
    defined: set[str] = set()
    for value in (i.value for i in graph.inputs):
        _define(value, defined, taken, graph)
    for op in graph.ops:
        for name in op.value_operands:
            if name not in defined:
                raise GraphError(f"{op.kind} in graph {graph.name} reads {name} before it is made")
        for body in op.graphs:
            _verify(body, taken)
        for value in op.results:
            _define(value, defined, taken, graph)
    for operand in graph.outputs:
        if isinstance(operand, str) and operand not in defined:
            raise GraphError(f"graph {graph.name} returns {operand}, which nothing makes")


def _define(value: Value, defined: set[str], taken: set[str], graph: Graph) -> None:
    if value.name in taken:
        raise GraphError(f"value {value.name} of graph {graph.name} is made twice")
    defined.add(value.name)
    taken.add(value.name)


def _lines(graph: Graph, indent: str, rules: bool) -> Iterator[str]:
    yield from _head_lines(graph, indent)
    for op in graph.ops:
        yield from _op_lines(op, indent + "  ", rules)
    yield from _return_lines(graph, indent + "  ")
    yield f"{indent}}}"


def _head_lines(graph: Graph, indent: str) -> Iterator[str]:
    """The inputs: on one line where they fit it and have no paths."""
    line = f"{indent}graph {graph.name}({', '.join(map(str, graph.inputs))}) {{"
    if len(line) <= _LINE_WIDTH and not any(i.path for i in graph.inputs):
        yield line
        return
    yield f"{indent}graph {graph.name}("
    width = max(len(str(i.value)) for i in graph.inputs)
    rows = [f"{indent}  {i.value!s:<{width}}  {i.note_text}".rstrip() for i in graph.inputs]
    yield from _listed(rows)
    yield f"{indent}) {{"


def _return_lines(graph: Graph, indent: str) -> Iterator[str]:
    """The outputs: a line each where they have paths or give back an input's buffer."""
    if not any(graph.output_paths) and not graph.donated:
        yield f"{indent}return {', '.join(map(str, graph.outputs))}".rstrip()
        return
    paths = graph.output_paths or ("",) * len(graph.outputs)
    homes = {o: graph.inputs[i].value.name for o, i in graph.donated}
    yield f"{indent}return"
    yield from _listed(
        [
            f"{indent}  {operand}"
            + (f" {json.dumps(path, ensure_ascii=False)}" if path else "")
            + (f" <- {homes[o]}" if o in homes else "")
            for o, (operand, path) in enumerate(zip(graph.outputs, paths, strict=True))
        ]
    )


def _listed(rows: Sequence[str]) -> Iterator[str]:
    yield from (f"{row}," for row in rows[:-1])
    yield from rows[-1:]


def _op_lines(op: Op, indent: str, rules: bool) -> Iterator[str]:
    results = ", ".join(map(str, op.results))
    call = f"{op.kind}({', '.join(map(str, op.operands))})"
    code = f"{results:<{_CALL_COLUMN - 3}} {'=' if results else ' '} {call}"
    line = f"{indent}{code:<{_NOTE_COLUMN}}  {_notes(op)}"
    line += " [" if op.graphs else ""
    line = line.rstrip()
    line += f"  # {op.origin.line}" if op.origin.line else ""
    line += f"  ## {op.rule}" if rules and op.rule is not None else ""
    yield line
    if op.graphs:
        for body in op.graphs:
            yield from _lines(body, indent + "  ", rules)
        yield f"{indent}]"


def _notes(op: Op) -> str:
    """Region, FLOPs, module and parameters."""
    params = ", ".join(f"{k}={v!r}" for k, v in op.params)
    notes = (
        f"{op.origin.region:<8}",
        f"flops={op.flops}" if op.flops else "",
        f"runs={op.runs}" if op.runs != 1 else "",
        json.dumps(op.origin.module, ensure_ascii=False) if op.origin.module else "",
        f"{{{params}}}" if params else "",
    )
    return " ".join(n for n in notes if n)
