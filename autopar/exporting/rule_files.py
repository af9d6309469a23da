"""Reads rules out of MaxText's YAML, out of Python and JSON, and writes them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from autopar.errors import InputError
from autopar.exporting.rules import Axes, LogicalRule, PathRule
from autopar.ir.plan import Plan
from autopar.ir.sharding import Sharding, spec_text
from autopar.ir.values import Role

_KEY = "logical_axis_rules"


@dataclass(frozen=True)
class Rules:
    """Rules of a file, in order."""

    logical: tuple[LogicalRule, ...] = ()
    paths: tuple[PathRule, ...] = ()


def read_rules(path: Path) -> Rules:
    """The rules of a file; raises InputError where it has none that can be read.

    .yml: the list `logical_axis_rules`. .py: lists of pairs that are assigned to names, a pair
    with a P(...) being a path rule; nothing is run. .json: such a list, or an object with the
    lists `logical_axis_rules` and `partition_rules`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    readers = {".json": _json, ".py": _python, ".yml": _yaml, ".yaml": _yaml}
    reader = readers.get(path.suffix)
    if reader is None:
        raise InputError(f"{path} is no .yml, .py or .json file, so no rules are read from it")
    try:
        logical, paths = zip(*reader(text), strict=True)
    except (ValueError, SyntaxError) as error:
        raise InputError(
            f"{path} has no rules that can be read: {error}.\nWrite pairs of a logical name and "
            f"mesh axes, [['embed', 'data'], ['mlp', ['model']]], under {_KEY} in YAML, or of a "
            'regular expression and a spec, (r"kernel$", P(None, "model")), in Python.'
        ) from error
    return Rules(sum(logical, ()), sum(paths, ()))


Found = Iterator[tuple[tuple[LogicalRule, ...], tuple[PathRule, ...]]]


def _json(text: str) -> Found:
    held: object = json.loads(text)
    lists = cast("dict[str, list[tuple[str, object]]]", held if isinstance(held, dict) else {})
    if isinstance(held, list):
        lists = {_KEY: cast("list[tuple[str, object]]", held)}
    for name, axes in lists.get(_KEY, []):
        yield (((name, _axes(axes)),), ())
    for pattern, dims in lists.get("partition_rules", []):
        yield ((), ((_pattern(pattern), tuple(map(_axes, cast("list[object]", dims)))),))


def _yaml(text: str) -> Found:
    """A list in brackets, or one of lines with dashes, of quoted names."""
    _, key, rest = re.sub(r"(?m)(^|\s)#.*$", "", text).partition(f"{_KEY}:")
    if not key:
        raise ValueError(f"there is no {_KEY}")
    if rest.lstrip().startswith("["):
        listed = _balanced(rest.lstrip())
    else:
        rows = re.match(r"(\s*-.*\n?)*", rest)
        lines = rows.group().splitlines() if rows else []
        listed = "[" + ",".join(line.strip()[1:] for line in lines if line.strip()) + "]"
    yield from _json(json.dumps(ast.literal_eval(re.sub(r"\b(null|~)\b", "None", listed))))


def _balanced(text: str) -> str:
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if not depth:
            return text[: at + 1]
    raise ValueError("a bracket is not closed")


def _python(text: str) -> Found:
    for node in ast.parse(text).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        for pair in value.elts if isinstance(value, ast.List | ast.Tuple) else []:
            if not isinstance(pair, ast.Tuple | ast.List) or len(pair.elts) != 2:
                continue
            name, given = pair.elts
            key = ast.literal_eval(name)
            if isinstance(given, ast.Call):
                dims = tuple(_axes(ast.literal_eval(arg)) for arg in given.args)
                yield ((), ((_pattern(key), dims),))
            else:
                yield (((key, _axes(ast.literal_eval(given))),), ())


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
    return text


def _axes(given: object) -> Axes:
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list | tuple):
        return tuple(str(axis) for axis in cast("Sequence[object]", given))
    raise ValueError(f"{given!r} is no mesh axis")


# -- writing ------------------------------------------------------------------------------------


def flax_text(plan: Plan, logical: Sequence[LogicalRule], paths: Sequence[PathRule]) -> str:
    """A Python module with both kinds of rules; no logical ones where names are not known."""
    mesh = ", ".join(f'"{n}": {s}' for n, s in zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    lines = [
        f'"""Sharding rules of the step {plan.origin.step!r} on {plan.origin.cluster_name}."""',
        "",
        "from jax.sharding import PartitionSpec as P",
        "",
        f"MESH = {{{mesh}}}",
    ]
    if logical:
        lines += ["# For flax.linen.logical_axis_rules; the first rule with free axes counts."]
        lines += ["LOGICAL_AXIS_RULES = ["]
        lines += [f"    ({json.dumps(name)}, {_python_axes(axes)})," for name, axes in logical]
        lines += ["]"]
    lines += ["# For re.search on the path of a leaf in the state; the first that is found counts."]
    lines += ["PARTITION_RULES = ["]
    for pattern, dims in paths:
        quoted = f'r"{pattern}"'
        spec = spec_text(Sharding(dims)).replace("'", '"')
        line = f"    ({quoted}, {spec}),"
        lines += (
            [line]
            if len(line) <= 100
            else ["    (", f"        {quoted},", f"        {spec},", "    ),"]
        )
    return "\n".join([*lines, "]", ""])


def maxtext_text(plan: Plan, logical: Sequence[LogicalRule]) -> str:
    """The part of a MaxText configuration that says how arrays lie."""
    batch = next((a for a in plan.arguments if a.role == Role.BATCH.value and a.shape), None)
    data = batch.sharding.dims[0] if batch is not None else ()
    where = f"{plan.origin.cluster_name}, mesh ({plan.mesh})"
    return "\n".join(
        [
            f"# Sharding of the step {plan.origin.step!r} on {where}.",
            f"mesh_axes: {list(plan.mesh.names)}",
            "logical_axis_rules: [",
            *(f"  {[name, list(axes)]}," for name, axes in logical),
            "]",
            f"data_sharding: [{list(data)}]",
            "",
        ]
    )


def _python_axes(axes: Axes) -> str:
    if not axes:
        return "None"
    return f'"{axes[0]}"' if len(axes) == 1 else f"({', '.join(json.dumps(a) for a in axes)})"
