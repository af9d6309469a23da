"""Writes a plan as a Python module that lays a step out under plain `jax.jit`.

The decisions of a plan for each equation of its step become tables of layouts that values go
through; the module has these, and the code that reads them.
"""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from keyword import iskeyword

from autopar.cluster import device_order
from autopar.cluster.planned import planned_cluster
from autopar.errors import PlanError
from autopar.inspecting.loaded_plan import Listed, reopen
from autopar.ir.compiler_options import CompilerOptions
from autopar.ir.control_flow import Port
from autopar.ir.graph import Graph, Op
from autopar.ir.listing import REDUCTIONS, Block, Listing, LocalOp, Loop, Move, MoveStep
from autopar.ir.plan import Argument, Plan
from autopar.ir.rule import Kind
from autopar.ir.sharding import Sharding
from autopar.ir.values import Role
from autopar.rules import has_rule

# Their partial results can be kept as stacks of terms; of other equations XLA makes the sums.
_SUMMING = ("dot_general", "reduce_sum")


@dataclass(frozen=True)
class Step:
    """A layout that a value takes; it is no copy of what so many equal moves before made."""

    layout: Sharding
    copies: int = 0


Route = tuple[Step, ...]


@dataclass(frozen=True)
class Tables:
    """Routes of results from the equation on, and of operands from the value on, by their names.

    "12/0/3:1" is result or operand 1 of equation 3 in body 0 of equation 12.
    """

    results: Mapping[str, Route]
    operands: Mapping[str, Route]


def tables_of(graph: Graph, program: Listing, shardings: Mapping[str, Sharding]) -> Tables:
    """The layouts and moves of a step's values; `shardings` has inputs of bodies.

    Results that cannot but lie as they should are left out.
    """
    writer = _Writer(graph, shardings)
    for value, layout in zip(program.block.inputs, program.input_shardings, strict=True):
        writer.pieces[value] = _Piece(value, (), layout)
    writer.block(program.block, "")
    sure = {where for where, value in writer.followed.items() if value not in writer.moved}
    results = {where: route for where, route in writer.results.items() if where not in sure}
    return Tables(results, writer.operands)


@dataclass(frozen=True)
class _Piece:
    """A value as an instruction names it: what it is a copy of, how it came about, how it lies.

    One with `raw` is the result of that name, on its way to where the step holds it. A partial
    sum that is no stack of terms is whole to the export, as XLA sums it where it is made.
    """

    value: str
    route: Route
    layout: Sharding
    raw: str = ""
    is_stack: bool = False


@dataclass
class _Writer:
    """Follows a listing, and notes every layout that it asks for."""

    graph: Graph
    shardings: Mapping[str, Sharding]
    results: dict[str, Route] = field(default_factory=dict[str, Route])
    operands: dict[str, Route] = field(default_factory=dict[str, Route])
    pieces: dict[str, _Piece] = field(default_factory=dict[str, "_Piece"])
    followed: dict[str, str] = field(default_factory=dict[str, str])  # result -> its value
    moved: set[str] = field(default_factory=set[str])  # values that are read elsewhere, too
    _moves: dict[str, Move] = field(default_factory=dict[str, Move])  # what is moved -> how

    def block(
        self, block: Block, path: str, wanted: Mapping[int, Sharding | None] | None = None
    ) -> None:
        """The instructions of a straight line; `wanted` are layouts of some of its outputs."""
        moves = (s for s in block.instructions if isinstance(s, Move))
        self._moves.update((m.source, m) for m in moves)
        for step in block.instructions:
            if isinstance(step, LocalOp):
                self._run(step)
            elif isinstance(step, Move):
                self._move(step)
            elif isinstance(step, Loop):
                self._loop(step)
            else:
                for source, result in zip(step.sources, step.results, strict=True):
                    self.pieces[result] = replace(self._piece(source), value=result, route=())
        for i, name in enumerate(block.outputs):
            self._enters(f"{path}out:{i}", name, (wanted or {}).get(i))

    # -- reading ---------------------------------------------------------------------------

    def _piece(self, name: str) -> _Piece:
        """The value read by that name; a result that is read as it comes out stays so."""
        piece = self.pieces[name]
        if piece.raw:
            if piece.route:
                self.results[piece.raw] = piece.route
            piece = self.pieces[name] = replace(piece, route=(), raw="")
        return piece

    def _reads(self, where: str, value: str, route: Route) -> None:
        if route:
            self.operands[where] = route
            self.moved.add(value)

    def _enters(self, where: str, name: str | None, wanted: Sharding | None) -> None:
        """An operand of a loop or an output: partial sums cross these as stacks of terms."""
        piece = self._piece(name) if name is not None else _Piece("", (), wanted or Sharding(()))
        route = piece.route
        if piece.layout.partial and not piece.is_stack:
            route = (*route, Step(piece.layout))
        self._reads(where, piece.value, route)

    # -- instructions ----------------------------------------------------------------------

    def _run(self, run: LocalOp) -> None:
        op, where = self.graph.op_at(run.equation), _name(run.equation)
        given = [self._piece(name) if name is not None else None for name in run.operands]
        partial = [p for p in given if p is not None and p.layout.partial]
        stays = bool(partial) and all(p.is_stack for p in partial)
        if op.kind not in _SUMMING:  # which may add sums of their own
            over = {axis for layout in run.result_shardings for axis in layout.partial}
            stays &= all(over == set(p.layout.partial) for p in partial)
        for i, piece in enumerate(given):
            if piece is not None:
                whole = piece.is_stack and not stays
                settled = (Step(Sharding(piece.layout.dims)),) if whole else ()
                self._reads(f"{where}:{i}", piece.value, (*piece.route, *settled))
        for i, (name, layout) in enumerate(zip(run.results, run.result_shardings, strict=True)):
            # Partial results stay so, but for those that are summed at once: these XLA sums.
            move = self._moves.get(name)
            at_once = move is not None and [s.kind for s in move.steps] == ["all-reduce"]
            starts = not partial and op.kind in _SUMMING and not at_once
            is_stack = bool(layout.partial) and (stays or starts)
            route = (Step(layout),) if is_stack or not layout.partial else ()
            piece = _Piece(op.results[i].name, route, layout, f"{where}:{i}", is_stack)
            self.pieces[name] = self._made(op, name, piece)
            if _follows(op, given, layout):
                self.followed[f"{where}:{i}"] = name

    def _made(self, op: Op, name: str, piece: _Piece) -> _Piece:
        """A result as the instructions name it: at home, on its way there, or made on demand."""
        if name.startswith(f"{piece.value}."):
            return piece
        if name != piece.value:
            return replace(piece, raw="")
        if piece.route and (op.results[0].shape or piece.is_stack):
            self.results[piece.raw] = piece.route
        return replace(piece, route=(), raw="")

    def _move(self, move: Move) -> None:
        piece = self.pieces[move.source]
        route, layout, is_stack = list(piece.route), move.before, piece.is_stack
        copies = move.repeat if move.collectives else 0
        for step in move.steps:
            layout = _after(layout, step)
            is_stack = bool(layout.partial) and (is_stack or step.kind == "mask")
            if is_stack or not layout.partial:
                route.append(Step(layout, copies))
                copies = 0
        if not piece.raw:
            self.pieces[move.result] = replace(
                piece, route=tuple(route), layout=layout, is_stack=is_stack
            )
            return
        self.results[piece.raw] = tuple(route)
        self.pieces[move.result] = _Piece(piece.value, (), layout, "", is_stack)

    def _loop(self, loop: Loop) -> None:
        op, where = self.graph.op_at(loop.equation), _name(loop.equation)
        flow = op.control_flow
        assert flow is not None
        for i, (name, port) in enumerate(zip(loop.operands, flow.operands, strict=True)):
            self._enters(f"{where}:{i}", name, self._inside(op, port))
        for b, block in enumerate(loop.bodies):
            for value in block.inputs:
                layout = self.shardings[value]
                self.pieces[value] = _Piece(value, (), layout, "", bool(layout.partial))
            wanted = {i: self._inside(op, port) for i, port in enumerate(flow.outputs[b])}
            self.block(block, f"{where}/{b}/", wanted)
        for i, (name, layout) in enumerate(zip(loop.results, loop.result_shardings, strict=True)):
            self.pieces[name] = _Piece(name, (), layout, "", bool(layout.partial))
            self.results[f"{where}:{i}"] = (Step(layout),)

    def _inside(self, op: Op, port: Port) -> Sharding | None:
        """The sharding of a port's value where a body receives it."""
        names = (op.graphs[b].inputs[i].value.name for b, i in port.inputs)
        return next((self.shardings.get(name) for name in names), None)


def _name(path: tuple[int, ...]) -> str:
    return "/".join(map(str, path))


def _follows(op: Op, given: list[_Piece | None], layout: Sharding) -> bool:
    """True if an element-wise op has operands that lie at home just as its result does."""
    rule = op.rule
    if rule is None or len(op.results) != 1 or layout.partial:
        return False
    if any(f.kind is not Kind.PASS for f in rule.factors):
        return False
    arrays = [
        p
        for p, dims in zip(given, rule.operands, strict=True)
        if p is not None and (dims or not rule.results[0])
    ]
    alike = all(not p.route and p.layout == layout for p in arrays)
    same = all(dims in ((), rule.results[0]) for dims in rule.operands)
    return bool(arrays) and alike and same


def _after(before: Sharding, step: MoveStep) -> Sharding:
    """The layout that a step of a move leaves."""
    dims, partial = list(before.dims), before.partial
    if step.kind in REDUCTIONS:
        partial = tuple(a for a in partial if a not in step.axes)
    if step.kind == "mask":
        partial = (*partial, *step.axes)
    if step.kind in ("all-gather", "all-to-all"):
        dims[step.dim] = tuple(a for a in dims[step.dim] if a not in step.axes)
    if step.kind in ("slice", "reduce-scatter"):
        dims[step.dim] = (*dims[step.dim], *step.axes)
    if step.kind == "all-to-all":
        dims[step.to_dim] = (*dims[step.to_dim], *step.axes)
    if step.kind == "collective-permute":
        dims[step.dim] = step.to_axes
    return Sharding(tuple(dims), partial)


_WIDTH = 100
# The sections of the sources that make up a module.
_PLAN, _PROGRAM = "# ---- the plan ----\n", "# ---- the program ----\n"
_MEANINGS = "# ---- what primitives stand for ----\n"
_TWICE = "# ---- products that are written twice ----\n"
_READER, _RUNNER = "# ---- reading the step ----\n", "# ---- running it ----\n"
_IMPORTS = """\
from __future__ import annotations

import functools
import inspect
import itertools
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.version import __version__ as jaxlib_version
"""


def python_module(plan: Plan) -> str:
    """The source of a module, formatted, that imports JAX and NumPy and nothing else.

    Raises PlanError where the plan is no single program, recomputes what the step does not, or
    keeps no step.
    """
    if not plan.is_one_program:
        raise PlanError(
            f"the plan for {plan.origin.step} is {plan.device_count} devices in "
            f"{len(plan.stages)} stages and {plan.microbatches} microbatches; a Python "
            "module holds single programs only.\nExport it with --as partition-specs, or plan "
            "with --stages 1 --microbatches 1."
        )
    if plan.recomputed:
        raise PlanError(
            f"the plan for {plan.origin.step} computes {len(plan.recomputed)} values again, which "
            "the step itself does not.\nPut jax.checkpoint into the step where memory binds and "
            "plan with --no-remat, or export with --as partition-specs."
        )
    (listed,) = reopen(plan).listings
    running, reading = _source("running.py"), _source("reading.py")
    types, rest = running[running.index("class Sums") :].split(_PLAN)
    front, runner = rest.split(_PROGRAM)[1].split(_RUNNER)
    reader = reading.split(_READER)[1].rstrip()
    traced = "\n\n\n".join(
        f"{section}{_traced(name).split(section)[1].rstrip()}"
        for section, name in ((_MEANINGS, "written_out.py"), (_TWICE, "run_once.py"))
    )
    decided = "\n".join(_plan_lines(plan, listed))
    head = f"{_docstring(plan)}\n{_IMPORTS}\n\n{types}{_PLAN}\n{decided}\n\n{_PROGRAM}{front}"
    return f"{head}{traced}\n\n\n{_READER}{reader}\n\n\n{_RUNNER}{runner}"


def device_numbers(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The number of the device at each position of each mesh of a plan, row by row."""
    cluster = planned_cluster(plan)
    return tuple(s.devices or tuple(device_order(cluster, s.mesh)) for s in plan.submeshes)


def _source(name: str) -> str:
    return files("autopar.runtime.standalone").joinpath(name).read_text()


def _traced(name: str) -> str:
    return files("autopar.frontend.trace").joinpath(name).read_text()


def _docstring(plan: Plan) -> str:
    o = plan.origin
    head = plan.arguments[0].path.split("/")[0] if plan.arguments else "state"
    step, cluster, method, head, jax = map(
        escaped, (o.step, o.cluster_name, o.method, head, o.jax_minor)
    )
    is_name = o.step.isidentifier() and o.step.isascii() and not iskeyword(o.step)
    called = o.step if is_name else "train_step"
    return f'''"""The step '{step}' laid out for {cluster}, under plain `jax.jit`.

Written by autopar out of a plan by the method '{method}', for JAX {jax}. Use it so:

    state = jax.device_put(state, shardings_for(state, "{head}"))
    step = parallelize({called}, state, batch)
    state, metrics = step(state, batch)
"""
'''


def escaped(text: str) -> str:
    """A text as it stands between double quotes in Python: one line of ASCII that ends nothing."""
    return text.encode("unicode_escape").decode("ascii").replace('"', '\\"')


def quoted(text: str) -> str:
    """A text as a literal of Python."""
    return f'"{escaped(text)}"'


# -- the plan as code ---------------------------------------------------------------------------


def _plan_lines(plan: Plan, listed: Listed) -> Iterator[str]:
    names, sizes = plan.mesh.names or ("one",), plan.mesh.sizes or (1,)
    axes = ", ".join(f"{quoted(name)}: {size}" for name, size in zip(names, sizes, strict=True))
    kinds = [op.kind for op in listed.graph.walk()]
    checksum = zlib.crc32(" ".join(kinds).encode())
    constants = [a for a in plan.arguments if a.role == Role.CONSTANT.value]
    given = [a for a in plan.arguments if a.role != Role.CONSTANT.value]
    yield f"STEP = {quoted(plan.origin.step)}"
    yield f"EQUATIONS = {len(kinds)}, {checksum}  # how many, and a checksum of what they are"
    yield "# Axes and their sizes, the slowest first."
    yield f"MESH: dict[str, int] = {{{axes}}}"
    yield "# Which of jax.devices() is at each position of the mesh, row by row."
    yield f"DEVICES: list[int] = {_numbers(device_numbers(plan)[0])}"
    yield "# Arguments whose buffers the outputs take over."
    comes_back = any(o.role == Role.STATE.value for o in plan.outputs)
    yield f"DONATED: tuple[int, ...] = {_donated(given) if comes_back else ()}"
    yield "# Options of XLA; those for another platform than that of the devices are left out."
    yield from _option_lines(plan.compiler_options)
    yield from _spec_lines("INPUTS", given)
    yield from _spec_lines("OUTPUTS", plan.outputs)
    yield "# Arrays that the step closes over."
    yield f"CONSTANTS: list[P] = [{'' if constants else ']'}"
    yield from (f"    {_spec(c.sharding)}," for c in constants)
    yield from "]" if constants else ""
    yield ""
    kept = sorted({op.kind for op in listed.graph.walk() if op.rule and not has_rule(op.kind)})
    yield "# Primitives of other packages that stay as they are."
    yield f"KEPT: tuple[str, ...] = ({''.join(f'{quoted(kind)}, ' for kind in kept).rstrip()})"
    yield ""
    # The comment on the two tables, from where they are empty.
    tables_source = _source("running.py").split(_PLAN)[1].split(_PROGRAM)[0]
    yield from (line for line in tables_source.splitlines() if line.startswith("# "))
    tables = tables_of(listed.graph, listed.listing, listed.sharding.sharding_of)
    yield from _route_lines("RESULTS", tables.results, names)
    yield from _route_lines("OPERANDS", tables.operands, names)


def _numbers(numbers: Sequence[int]) -> str:
    """A list; one of numbers in a row as their range."""
    if len(numbers) > 8 and list(numbers) == list(range(len(numbers))):
        return f"list(range({len(numbers)}))"
    one = f"[{', '.join(map(str, numbers))}]"
    return one if len(one) <= 70 else "[\n" + "".join(f"    {n},\n" for n in numbers) + "]"


def _option_lines(options: CompilerOptions) -> Iterator[str]:
    head = "COMPILER_OPTIONS: dict[str, bool | int | str] = {"
    if not options:
        yield f"{head}}}"
        return
    yield head
    for name, value in options:
        written = quoted(value) if isinstance(value, str) else value
        yield f"    {quoted(name)}: {written},"
    yield "}"


def _donated(given: Sequence[Argument]) -> tuple[int, ...]:
    """The arguments of which all leaves are state."""
    roles: dict[str, set[str]] = {}
    for a in given:
        roles.setdefault(a.path.split("/")[0], set()).add(a.role)
    return tuple(i for i, found in enumerate(roles.values()) if found == {Role.STATE.value})


def _spec_lines(name: str, held: Iterable[Argument]) -> Iterator[str]:
    yield f"{name}: dict[str, P] = {{"
    for a in held:
        path, spec = quoted(a.path), _spec(a.sharding)
        line = f"    {path}: {spec},"
        if len(line) <= _WIDTH:
            yield line
        else:
            inside = spec[2:-1]
            yield from (f"    {path}: P(", f"        {inside}", "    ),") if inside else (line,)
    yield "}"


def _spec(sharding: Sharding) -> str:
    entries = [
        "None"
        if not axes
        else quoted(axes[0])
        if len(axes) == 1
        else f"({', '.join(map(quoted, axes))})"
        for axes in sharding.dims
    ]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def _layout(step: Step, axes: Sequence[str]) -> Iterator[str]:
    if step.copies:
        yield f"Again({step.copies})"
    over = "".join(f"{quoted(axis)}, " for axis in axes if axis in step.layout.partial)
    over = over.rstrip() if len(step.layout.partial) == 1 else over.rstrip(", ")
    spec = _spec(step.layout)
    yield f"Sums(({over}), {spec})" if over else spec


def _route_lines(name: str, routes: Mapping[str, Route], axes: Sequence[str]) -> Iterator[str]:
    """A table of routes with all that take them, the first to be taken first."""
    takers: dict[tuple[str, ...], list[str]] = {}
    for where, route in routes.items():
        texts = tuple(text for step in route for text in _layout(step, axes))
        takers.setdefault(texts, []).append(where)
    yield f"{name}: dict[Route, str] = {{"
    for texts, words in takers.items():
        yield from _entry(texts, " ".join(_folded(words)))
    yield "}"


def _entry(layouts: Sequence[str], words: str) -> Iterator[str]:
    key = f"({', '.join(layouts)}{',' * (len(layouts) == 1)})"
    line = f'    {key}: "{words}",'
    if len(line) <= _WIDTH:
        yield line
        return
    opened = [f"    {key}: ("]
    if len(opened[0]) > _WIDTH:
        opened = ["    (", *(f"        {layout}," for layout in layouts), "    ): ("]
    if len(words) <= _WIDTH - 10 and len(opened) > 1:
        yield from (*opened[:-1], f'    ): "{words}",')
        return
    rows = textwrap.wrap(words, _WIDTH - 11, break_on_hyphens=False)
    yield from opened
    yield from (f'        "{row} "' for row in rows[:-1])
    yield from (f'        "{rows[-1]}"', "    ),")


def _folded(words: Sequence[str]) -> Iterator[str]:
    """Names with those in a row as one: "3 4 5:1" for "3:0", "4:0", "5:1", and "3-5" of three."""
    parsed = [word.rpartition(":") for word in words]
    rows = [(*where.rpartition("/"), index) for where, _, index in parsed]
    start = 0
    while start < len(rows):
        head, slash, first, index = rows[start]
        stop = start + 1
        while stop < len(rows):
            number = rows[stop - 1][2]
            following = str(int(number) + 1) if number.isdecimal() else ""
            if rows[stop] != (head, slash, following, index):
                break
            stop += 1
        last = rows[stop - 1][2]
        span = first if last == first else f"{first}-{last}"
        yield f"{head}{slash}{span}" + ("" if index == "0" else f":{index}")
        start = stop
