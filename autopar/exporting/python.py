"""Writes a plan as a Python module that lays a step out under plain `jax.jit`."""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from keyword import iskeyword

from autopar.cluster import device_order
from autopar.cluster.planned import planned_cluster
from autopar.errors import PlanError
from autopar.exporting.tables import Route, Step, tables_of
from autopar.inspecting.loaded_plan import Listed, reopen
from autopar.ir.plan import Argument, Plan
from autopar.ir.sharding import Sharding
from autopar.ir.values import Role
from autopar.rules import has_rule

_WIDTH = 100
# The sections of the sources that make up a module.
_PLAN, _PROGRAM = "# ---- the plan ----\n", "# ---- the program ----\n"
_MEANINGS = "# ---- what primitives stand for ----\n"
_READER, _RUNNER = "# ---- reading the step ----\n", "# ---- running it ----\n"
_IMPORTS = """\
from __future__ import annotations

import functools
import inspect
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    written_out = files("autopar.frontend.trace").joinpath("written_out.py").read_text()
    meanings, reader = written_out.split(_MEANINGS)[1].rstrip(), reading.split(_READER)[1]
    decided = "\n".join(_plan_lines(plan, listed))
    head = f"{_docstring(plan)}\n{_IMPORTS}\n\n{types}{_PLAN}\n{decided}\n\n{_PROGRAM}{front}"
    return f"{head}{_MEANINGS}{meanings}\n\n\n{_READER}{reader.rstrip()}\n\n\n{_RUNNER}{runner}"


def device_numbers(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The number of the device at each position of each mesh of a plan, row by row."""
    cluster = planned_cluster(plan)
    return tuple(s.devices or tuple(device_order(cluster, s.mesh)) for s in plan.submeshes)


def _source(name: str) -> str:
    return files("autopar.runtime.standalone").joinpath(name).read_text()


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
    tables = tables_of(listed.graph, listed.program, listed.sharding.sharding_of)
    yield from _route_lines("RESULTS", tables.results, names)
    yield from _route_lines("OPERANDS", tables.operands, names)


def _numbers(numbers: Sequence[int]) -> str:
    """A list; one of numbers in a row as their range."""
    if len(numbers) > 8 and list(numbers) == list(range(len(numbers))):
        return f"list(range({len(numbers)}))"
    one = f"[{', '.join(map(str, numbers))}]"
    return one if len(one) <= 70 else "[\n" + "".join(f"    {n},\n" for n in numbers) + "]"


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
