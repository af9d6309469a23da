"""Sharding rules of MaxText, flax and others: a plan as rules, and rules as pins."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from autopar.errors import InputError
from autopar.exporting.python import escaped, quoted
from autopar.ir.codec import Item, parse_json, shown
from autopar.ir.plan import Argument, Plan
from autopar.ir.sharding import MeshShape, Sharding, spec_text
from autopar.ir.text_file import read_text
from autopar.ir.values import Input, Role

# -- rules that say what a plan says ---------------------------------------------------------------

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]
Names = tuple[str | None, ...]  # a logical name for each dim, None for one that has none
LogicalRule = tuple[str, Axes]
PathRule = tuple[str, Dims]


@dataclass(frozen=True)
class Conflict:
    """A tensor that logical rules lay out otherwise than the plan."""

    path: str
    names: Names
    planned: Dims
    ruled: Dims


@dataclass(frozen=True)
class LogicalRules:
    """Rules for logical names, in the order in which they count, and where they are wrong."""

    rules: tuple[LogicalRule, ...]
    conflicts: tuple[Conflict, ...]


def axes_by_rules(rules: Iterable[LogicalRule], names: Names) -> Dims:
    """Axes that flax gives to logical names: the first rule of a name whose axes are free."""
    found: dict[int, Axes] = {}
    for name, axes in rules:
        if name in names and names.index(name) not in found:
            used = {a for held in found.values() for a in held}
            if not used.intersection(axes):
                found[names.index(name)] = axes
    return tuple(found.get(dim, ()) for dim in range(len(names)))


def logical_rules(arguments: Sequence[Argument], names_of: Mapping[str, Names]) -> LogicalRules:
    """Rules that lay out the named arguments as planned, or most of their bytes.

    Each name goes first where most bytes of it lie. Where it lies elsewhere in other tensors, a
    further rule for it counts if the first one's axes are taken there; it stays if that makes
    fewer bytes wrong.
    """
    named = [a for a in arguments if a.path in names_of]
    votes: dict[str, Counter[Axes]] = {}
    for a in named:
        for name, axes in zip(names_of[a.path], a.sharding.dims, strict=True):
            if name is not None:
                votes.setdefault(name, Counter())[axes] += _bytes(a)
    firsts = {name: found.most_common() for name, found in votes.items()}
    rules: list[LogicalRule] = [(name, ranked[0][0]) for name, ranked in firsts.items()]
    spare = [(name, axes) for name, ranked in firsts.items() for axes, _ in ranked[1:]]
    rules.sort(key=lambda rule: not rule[1])  # those that shard nothing take nothing

    def wrong(tried: Sequence[LogicalRule]) -> int:
        ruled = ((a, axes_by_rules(tried, names_of[a.path])) for a in named)
        return sum(_bytes(a) for a, dims in ruled if dims != a.sharding.dims)

    for rule in spare:
        # Without one more rule for the name, with it anywhere, or with all of the name at the end.
        tries = [rules, *([*rules[:at], rule, *rules[at:]] for at in range(len(rules) + 1))]
        own = [r for r in rules if r[0] == rule[0]]
        tries.append([*(r for r in rules if r[0] != rule[0]), *own, rule])
        rules = min(tries, key=wrong)
    conflicts: list[Conflict] = []
    for a in named:
        ruled = axes_by_rules(rules, names_of[a.path])
        if ruled != a.sharding.dims:
            conflicts.append(Conflict(a.path, names_of[a.path], a.sharding.dims, ruled))
    return LogicalRules(tuple(rules), tuple(conflicts))


def path_rules(arguments: Sequence[Argument]) -> tuple[PathRule, ...]:
    """Regular expressions with what they lay out, of which the first that is found counts.

    A pattern is the shortest end of a path whose every owner lies alike, numbers left open where
    they may be; whatever nothing else matches is whole.
    """
    found: dict[str, Dims] = {}
    tails: dict[str, set[Dims]] = {}
    for a in arguments:
        for tail in _ends(a.path):
            tails.setdefault(tail, set()).add(_trimmed(a.sharding.dims))
    for a in arguments:
        dims = _trimmed(a.sharding.dims)
        # Keys 1 and "1" of a dict make one path, of which the first leaf counts.
        *_, whole = _ends(a.path)
        tail = next((t for t in _ends(a.path) if tails[t] == {dims}), whole)
        if dims:
            found.setdefault(f"(^|/){tail}$", dims)
    return (*sorted(found.items()), (".*", ()))


def _ends(path: str) -> Iterator[str]:
    """Ends of a path as patterns, short ones first, each with numbers open and as they are."""
    parts = path.split("/")
    for depth in range(1, len(parts) + 1):
        tail = re.escape("/".join(parts[-depth:]))
        yield from (re.sub(r"\d+", r"\\d+", tail), tail)


def _trimmed(dims: Dims) -> Dims:
    while dims and not dims[-1]:
        dims = dims[:-1]
    return dims


def _bytes(a: Argument) -> int:
    """Bytes of the whole array; one that is empty counts, too."""
    return 1 + a.value.nbytes


# -- files -----------------------------------------------------------------------------------------

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


# -- rules as pins ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Imported:
    """Pins by path, and in sentences what rules could not decide or a mesh cannot hold."""

    pins: tuple[tuple[str, Dims], ...]
    unplaced: tuple[str, ...]


def pins_from(
    rules: Rules, inputs: Sequence[Input], names_of: Mapping[str, Names], mesh: MeshShape | None
) -> Imported:
    """The pins by which rules lay out a step's state.

    Logical rules speak of arrays with names, path rules of all others. Axes that the mesh has not
    are left out, as is what does not divide; without a mesh, everything is kept.
    """
    pins: list[tuple[str, Dims]] = []
    unplaced: list[str] = []
    if mesh is not None:
        spoken = {a for _, axes in rules.logical for a in axes}
        spoken.update(a for _, dims in rules.paths for axes in dims for a in axes)
        if absent := sorted(spoken - set(mesh.names)):
            text = f"the mesh ({mesh}) has no axis {', '.join(absent)}: rules count without"
            unplaced.append(text)
    for given in inputs:
        if given.role is not Role.STATE:
            continue
        names, path = names_of.get(given.path), given.path
        if names is not None and rules.logical:
            dims: Dims | None = axes_by_rules(rules.logical, names)
        else:
            dims = next((d for pattern, d in rules.paths if re.search(pattern, path)), None)
        if dims is None:
            unplaced.append(f"{given.path} {given.value.type_text}: no rule speaks of it")
            continue
        if len(dims) > len(given.value.shape):
            unplaced.append(f"{given.path} {given.value.type_text}: its rule has {len(dims)} dims")
            continue
        if mesh is not None:
            sizes, fitting = given.value.shape, list[Axes]()
            for d, asked in enumerate(dims):
                axes = tuple(a for a in asked if a in mesh.names)
                fits = sizes[d] % mesh.size(axes) == 0
                fitting.append(axes if fits else ())
                if not fits:
                    unplaced.append(
                        f"{given.path} {given.value.type_text}: dim {d} is not divisible by "
                        f"{'+'.join(axes)}={mesh.size(axes)} and is left whole"
                    )
            dims = tuple(fitting)
        pins.append((given.path, dims))
    return Imported(tuple(pins), tuple(unplaced))
