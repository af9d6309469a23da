"""The step that a plan was made for, kept as text and read back, so that it can be questioned."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NoReturn, TypeVar, cast

from autopar.errors import GraphSyntaxError
from autopar.ir.batching import Accumulator, Batching, Hoist, Moment, Rows
from autopar.ir.codec import ByName, Text
from autopar.ir.graph import REGIONS, Graph, Op, Operand, Origin, Plain
from autopar.ir.values import Input, Literal, Role, Value

_Item = TypeVar("_Item")

_BLANK = re.compile(r"\s*")
_COMMENT = re.compile(r"(?:[ \t]*#(?!#)[ \t]*([^#\n]*?))?[ \t]*(?:##[^\n]*)?(?=\n|\Z)")
_GRAPH_NAME = re.compile(r"[^(\n]+")
_NAME = re.compile(r"%[\w.]+")
_KIND = re.compile(r"[^\s(){}\[\],=%\"#]+(?=\()")
_DTYPE = re.compile(r"[A-Za-z][\w.<>-]*")
_SHAPE = re.compile(r"\[((?:\d+(?:,\d+)*)?)\]")
_LITERAL = re.compile(r"([^\s,:%\"]+):(?=[A-Za-z])")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_PARAMS = re.compile(r"""(?:[^'"{}]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")*""")
_FLOPS = re.compile(r"flops=(\d+)")
_RUNS = re.compile(r"runs=(\d+)")
_VARYING = re.compile(rf"({_NAME.pattern}|{_STRING.pattern})")  # in ops that are alike
_ROLE = re.compile(r"(?:state|batch|constant)\b")
_DIGITS = 18  # of a number; FLOPs may have more
_FLOP_DIGITS = 30
_REGION = re.compile(rf"(?:{'|'.join(REGIONS)})\b")


def parse_graph(text: str) -> Graph:
    """The graph that a text shows, rules left out.

    Raises GraphSyntaxError, with the line and what was expected on it, where the text is not a
    graph's; GraphError where a value is read before it is made or made twice.
    """
    reader = _Reader(text)
    try:
        graph = _graph(reader)
    except RecursionError:
        raise GraphSyntaxError("the bodies of a graph are nested too deeply") from None
    reader.end()
    graph.verify()
    return graph


class _Reader:
    """A place in a text that moves forward over what is taken from it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.known: dict[tuple[str, ...], Op] = {}  # ops by their lines, but for what varies

    def maybe(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The next token if it has this form, blanks before it left out."""
        self._skip()
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def take(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        """The next token, which must have this form."""
        found = self.maybe(pattern)
        if found is None:
            self.fail(what)
        return found

    def sees(self, mark: str) -> bool:
        """True if this mark comes next; it is taken where it does."""
        if not self.is_at(mark):
            return False
        self._at += len(mark)
        return True

    def is_at(self, mark: str) -> bool:
        """True if this mark comes next; it is left there."""
        self._skip()
        return self._text.startswith(mark, self._at)

    def mark(self, mark: str) -> None:
        """Take this mark, which must come next."""
        if not self.sees(mark):
            self.fail(repr(mark))

    def list_of(self, item: Callable[[_Reader], _Item], close: str) -> tuple[_Item, ...]:
        """Items parted by commas, up to and with the closing mark."""
        items: list[_Item] = []
        while not self.sees(close):
            if items:
                self.mark(",")
            items.append(item(self))
        return tuple(items)

    def comment(self) -> str:
        """The comment on the rest of this line, rules left out."""
        found = _COMMENT.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[1] or ""

    def line(self) -> str:
        """The rest of the line that comes next, which is left there."""
        self._skip()
        end = self._text.find("\n", self._at)
        return self._text[self._at : end if end >= 0 else len(self._text)]

    def has_read(self, line: str) -> bool:
        """True if this is what was taken last."""
        return self._text.startswith(line, self._at - len(line))

    def end(self) -> None:
        """Nothing may come next."""
        self._skip()
        if self._at < len(self._text):
            self.fail("the end of the text")

    def fail(self, what: str) -> NoReturn:
        """Raise GraphSyntaxError at this place; `what` was expected here."""
        start = self._text.rfind("\n", 0, self._at) + 1
        line = self._text[start:].split("\n", 1)[0]
        number = self._text.count("\n", 0, self._at) + 1
        column = self._at - start
        raise GraphSyntaxError(
            f"line {number}, column {column + 1}: expected {what}\n  {line}\n  {' ' * column}^"
        )

    def _skip(self) -> None:
        blank = _BLANK.match(self._text, self._at)
        self._at = blank.end() if blank is not None else self._at


def _graph(reader: _Reader) -> Graph:
    reader.mark("graph ")
    name = reader.take(_GRAPH_NAME, "the graph's name")[0].strip()
    reader.mark("(")
    inputs = reader.list_of(_input, ")")
    reader.mark("{")
    ops: list[Op] = []
    while not reader.sees("return"):
        ops.append(_op(reader))
    places = {given.value.name: i for i, given in enumerate(inputs)}
    outputs = reader.list_of(lambda r: _output(r, places), "}")
    paths = tuple(o.path for o in outputs)
    return Graph(
        name=name,
        inputs=inputs,
        ops=tuple(ops),
        outputs=tuple(o.operand for o in outputs),
        output_paths=paths if any(paths) else (),
        donated=tuple((k, o.home) for k, o in enumerate(outputs) if o.home is not None),
    )


def _input(reader: _Reader) -> Input:
    value = _value(reader)
    role = reader.maybe(_ROLE)
    return Input(value, Role(role[0]) if role is not None else Role.BATCH, _string(reader))


def _value(reader: _Reader) -> Value:
    name = reader.take(_NAME, "a value such as %0")[0]
    reader.mark(":")
    dtype = reader.take(_DTYPE, "a type such as f32[8,16]")[0]
    shape = reader.take(_SHAPE, "a shape such as [8,16]")
    return Value(name, _sizes(reader, shape[1]), dtype)


def _sizes(reader: _Reader, text: str) -> tuple[int, ...]:
    return tuple(_whole(reader, n) for n in text.split(",") if n)


def _whole(reader: _Reader, text: str, digits: int = _DIGITS) -> int:
    """A number that was read; it may have so many digits."""
    if len(text) > digits:
        reader.fail(f"a number of up to {digits} digits before here, not one of {len(text)}")
    return int(text)


def _string(reader: _Reader) -> str:
    found = reader.maybe(_STRING)
    if found is None:
        return ""
    try:
        return str(json.loads(found[0]))
    except ValueError:
        reader.fail(f"a text in quotes, escaped as in JSON, before here, not {found[0]}")


def _operand(reader: _Reader) -> Operand:
    name = reader.maybe(_NAME)
    if name is not None:
        return name[0]
    text = reader.take(_LITERAL, "a value such as %0 or a literal such as 0.5:f32")[1]
    dtype = reader.take(_DTYPE, "a type such as f32")[0]
    shape = reader.maybe(_SHAPE)
    return Literal(text, dtype, _sizes(reader, shape[1]) if shape is not None else ())


@dataclass(frozen=True)
class _Output:
    """A graph's output: what it returns, its path, and the input whose buffer it takes."""

    operand: Operand
    path: str
    home: int | None


def _output(reader: _Reader, inputs: Mapping[str, int]) -> _Output:
    operand, path = _operand(reader), _string(reader)
    if not reader.sees("<-"):
        return _Output(operand, path, None)
    name = reader.take(_NAME, "the name of an input")[0]
    if name not in inputs:
        reader.fail(f"the name of an input, not {name}, before here")
    return _Output(operand, path, inputs[name])


def _op(reader: _Reader) -> Op:
    """The next op; on a line that is one before it but for names, that one with these names."""
    line = reader.line()
    head, brace, rest = line.partition("{")
    texts = _VARYING.split(head)
    varying = texts[1::2]
    kinds = "".join([token[0] for token in varying])  # names and texts in quotes, as they stand
    alike = *texts[::2], kinds, brace, rest
    known = reader.known.get(alike)
    op = _renamed(known, varying) if known is not None else None
    if op is not None:
        reader.mark(line)
        return op
    op = _read_op(reader)
    names = [*(r.name for r in op.results), *op.value_operands]
    if op.origin.module:
        names.append(json.dumps(op.origin.module, ensure_ascii=False))
    if not op.graphs and names == varying and reader.has_read(line):
        reader.known[alike] = op
    return op


def _renamed(op: Op, varying: Sequence[str]) -> Op | None:
    """An op with other names of results and operands, and of its module where it has one.

    None where the module's is no text.
    """
    count, origin = len(op.results), op.origin
    results = zip(varying, op.results, strict=False)
    names = iter(varying[count:])
    operands = tuple([next(names) if isinstance(o, str) else o for o in op.operands])
    if origin.module:
        try:
            origin = Origin(origin.region, str(json.loads(next(names))), origin.line)
        except ValueError:
            return None
    return Op(
        op.kind, operands, tuple([Value(n, v.shape, v.dtype) for n, v in results]),
        op.params, op.flops, origin, runs=op.runs,
    )  # fmt: skip


def _read_op(reader: _Reader) -> Op:
    results = reader.list_of(_value, "=") if reader.is_at("%") else ()
    kind = reader.take(_KIND, "an op or return")[0]
    reader.mark("(")
    operands = reader.list_of(_operand, ")")
    # FLOPs, runs, region, module and parameters stand in any order.
    flops, runs, region, module = 0, 1, REGIONS[0], ""
    params: tuple[tuple[str, Plain], ...] = ()
    while True:
        if found := reader.maybe(_FLOPS):
            flops = _whole(reader, found[1], _FLOP_DIGITS)
        elif found := reader.maybe(_RUNS):
            runs = _whole(reader, found[1])
        elif found := reader.maybe(_REGION):
            region = found[0]
        elif quoted := _string(reader):
            module = quoted
        elif reader.sees("{"):
            text = reader.take(_PARAMS, "parameters")[0]
            reader.mark("}")
            pairs = _pairs(text)
            if pairs is None:
                reader.fail(f"parameters such as axes=(0,) before here, not {text!r}")
            params = pairs
        else:
            break
    has_bodies = reader.sees("[")
    origin = Origin(region, module, reader.comment())
    bodies: list[Graph] = []
    while has_bodies and not reader.sees("]"):
        bodies.append(_graph(reader))
    return Op(kind, operands, results, params, flops, origin, tuple(bodies), runs=runs)


@lru_cache(maxsize=4096)
def _pairs(text: str) -> tuple[tuple[str, Plain], ...] | None:
    """Parameters by name, or None where the text is not that of plain ones."""
    try:
        call = ast.parse(f"dict({text})", mode="eval").body
        named = call.keywords if isinstance(call, ast.Call) and not call.args else None
        if named is None or not all(p.arg for p in named):
            return None
        return tuple((str(p.arg), _plain(ast.literal_eval(p.value))) for p in named)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # MemoryError is how the parser tells of brackets nested too deeply


def _plain(value: object) -> Plain:
    if isinstance(value, tuple):
        return tuple(map(_plain, cast(tuple[object, ...], value)))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{value!r} is neither a number, a text nor a tuple of them")


@dataclass(frozen=True)
class Cutting:
    """The microbatches of a step: a `Batching` without its graphs.

    `hoist` is the text of what is computed on the whole batch, "" where nothing is.
    """

    microbatches: int
    batch: int
    moments: tuple[Moment, ...]
    rows: ByName[Rows]
    accumulators: tuple[Accumulator, ...]
    loops: int
    barrier: bool
    index: str
    hoist: Text = ""
    hoisted: tuple[str, ...] = ()
    hoist_equations: tuple[int, ...] = ()

    def hoisted_graph(self) -> Hoist | None:
        """The part that the whole batch decides, where anything is hoisted."""
        if not self.hoist:
            return None
        return Hoist(parse_graph(self.hoist), self.hoisted, self.hoist_equations)


@dataclass(frozen=True)
class Record:
    """The graph that was planned, as it prints without rules, and the user's own rules.

    With stages or microbatches the graph is that of one microbatch, and `cutting` tells the rest.
    """

    graph: Text
    rules: ByName[str] = ()
    cutting: Cutting | None = None

    @classmethod
    def of(cls, batching: Batching, rules: Mapping[str, str]) -> Record:
        """The record of a step; a step that is left whole is its graph."""
        pairs = tuple(sorted(rules.items()))
        return cls(batching.graph.text, pairs, None if batching.is_whole else _cutting(batching))

    @cached_property
    def batching(self) -> Batching:
        """The step again, its ops without rules; raises GraphSyntaxError where the text is none."""
        graph, cut = parse_graph(self.graph), self.cutting
        if cut is None:
            return Batching.whole(graph)
        return Batching(
            graph=graph,
            microbatches=cut.microbatches,
            batch=cut.batch,
            moments=cut.moments,
            rows=cut.rows,
            accumulators=cut.accumulators,
            hoist=cut.hoisted_graph(),
            loops=cut.loops,
            barrier=cut.barrier,
            index=cut.index,
        )


def _cutting(batching: Batching) -> Cutting:
    hoist = batching.hoist
    return Cutting(
        microbatches=batching.microbatches,
        batch=batching.batch,
        moments=batching.moments,
        rows=batching.rows,
        accumulators=batching.accumulators,
        loops=batching.loops,
        barrier=batching.barrier,
        index=batching.index,
        hoist=hoist.graph.text if hoist is not None else "",
        hoisted=hoist.values if hoist is not None else (),
        hoist_equations=hoist.equations if hoist is not None else (),
    )
