"""Reads rules out of MaxText's YAML, out of Python and JSON, and writes them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from autopar.errors import InputError
from autopar.exporting.python import escaped, quoted
from autopar.exporting.rules import Axes, LogicalRule, PathRule
from autopar.ir.codec import Item, parse_json, shown
from autopar.ir.plan import Plan
from autopar.ir.sharding import Sharding, spec_text
from autopar.ir.text_file import read_text
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
    text = read_text(path, "rules")
    readers = {".json": _json, ".py": _python, ".yml": _yaml, ".yaml": _yaml}
    reader = readers.get(path.suffix)
    if reader is None:
        raise InputError(f"{path} is no .yml, .py or .json file, so no rules are read from it")
    try:
        found = list(reader(text))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        # MemoryError is how the parser tells of brackets nested too deeply.
        raise InputError(
            f"{path} has no rules that can be read: {error}.\nWrite pairs of a logical name and "
            f"mesh axes, [['embed', 'data'], ['mlp', ['model']]], under {_KEY} in YAML, or of a "
            'regular expression and a spec, (r"kernel$", P(None, "model")), in Python.'
        ) from error
    if not found:
        raise InputError(f"{path} has no rules: no pairs of a name or pattern and mesh axes")
    logical, paths = zip(*found, strict=True)
    return Rules(sum(logical, ()), sum(paths, ()))


Found = Iterator[tuple[tuple[LogicalRule, ...], tuple[PathRule, ...]]]


def _json(text: str) -> Found:
    whole = Item(parse_json(text))
    lists = dict(whole.pairs()) if isinstance(whole.value, dict) else {_KEY: whole}
    for name, axes in _rows(lists, _KEY):
        yield (((name.text(), _axes(axes.value)),), ())
    for pattern, dims in _rows(lists, "partition_rules"):
        yield ((), ((_pattern(pattern.text()), tuple(_axes(d.value) for d in dims.items())),))


def _rows(lists: Mapping[str, Item], key: str) -> Iterator[tuple[Item, Item]]:
    for row in lists[key].items() if key in lists else []:
        name, given = row.row(2)
        yield name, given


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
            key: object = ast.literal_eval(name)
            if not isinstance(key, str):
                raise ValueError(f"{ast.unparse(name)[:40]} is no name")
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
    axes = cast("Sequence[object]", given if isinstance(given, list | tuple) else [given])
    wrong = [axis for axis in axes if not isinstance(axis, str)]
    if wrong:
        raise ValueError(f"{shown(wrong[0])} is no mesh axis")
    return tuple(map(str, axes))


# -- writing ------------------------------------------------------------------------------------


def flax_text(plan: Plan, logical: Sequence[LogicalRule], paths: Sequence[PathRule]) -> str:
    """A Python module with both kinds of rules; no logical ones where names are not known."""
    mesh = ", ".join(
        f"{quoted(n)}: {s}" for n, s in zip(plan.mesh.names, plan.mesh.sizes, strict=True)
    )
    lines = [
        f'"""Sharding rules of the step \'{escaped(plan.origin.step)}\' on '
        f'{escaped(plan.origin.cluster_name)}."""',
        "",
        "from jax.sharding import PartitionSpec as P",
        "",
        f"MESH = {{{mesh}}}",
    ]
    if logical:
        lines += ["# For flax.linen.logical_axis_rules; the first rule with free axes counts."]
        lines += ["LOGICAL_AXIS_RULES = ["]
        lines += [f"    ({quoted(name)}, {_python_axes(axes)})," for name, axes in logical]
        lines += ["]"]
    lines += ["# For re.search on the path of a leaf in the state; the first that is found counts."]
    lines += ["PARTITION_RULES = ["]
    for pattern, dims in paths:
        plain = pattern.isascii() and pattern.isprintable() and '"' not in pattern
        text = f'r"{pattern}"' if plain and not pattern.endswith("\\") else quoted(pattern)
        spec = spec_text(Sharding(dims)).replace("'", '"')
        line = f"    ({text}, {spec}),"
        lines += (
            [line]
            if len(line) <= 100
            else ["    (", f"        {text},", f"        {spec},", "    ),"]
        )
    return "\n".join([*lines, "]", ""])


def maxtext_text(plan: Plan, logical: Sequence[LogicalRule]) -> str:
    """The part of a MaxText configuration that says how arrays lie."""
    batch = next((a for a in plan.arguments if a.role == Role.BATCH.value and a.shape), None)
    data = batch.sharding.dims[0] if batch is not None else ()
    step, cluster = escaped(plan.origin.step), escaped(plan.origin.cluster_name)
    return "\n".join(
        [
            f"# Sharding of the step '{step}' on {cluster}, mesh ({plan.mesh}).",
            f"mesh_axes: {_yaml_list(plan.mesh.names)}",
            "logical_axis_rules: [",
            *(f"  [{_yaml_text(name)}, {_yaml_list(axes)}]," for name, axes in logical),
            "]",
            f"data_sharding: [{_yaml_list(data)}]",
            "",
        ]
    )


def _python_axes(axes: Axes) -> str:
    if not axes:
        return "None"
    return quoted(axes[0]) if len(axes) == 1 else f"({', '.join(map(quoted, axes))})"


def _yaml_list(texts: Iterable[str]) -> str:
    return f"[{', '.join(map(_yaml_text, texts))}]"


def _yaml_text(text: str) -> str:
    """A text in quotes: single ones where it needs no escapes, else double ones, as in JSON."""
    plain = text.isascii() and text.isprintable() and "'" not in text
    return f"'{text}'" if plain else json.dumps(text)
