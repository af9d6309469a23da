"""`autopar export` and `import`: a plan as data and code for others, and their rules as pins."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from autopar import api, plans
from autopar.cli.console import err, out
from autopar.cli.group import IMPOSSIBLE
from autopar.cli.loading import load_target
from autopar.errors import InputError
from autopar.exporting.perfetto import perfetto_trace
from autopar.exporting.python import python_module
from autopar.exporting.rules import (
    Conflict,
    Names,
    flax_text,
    logical_rules,
    maxtext_text,
    path_rules,
    pins_from,
    read_rules,
)
from autopar.exporting.specs import spec_data, specs_text
from autopar.frontend import trace
from autopar.frontend.trace.logical import logical_names
from autopar.ir.codec import ByName, Codec, Item, JsonError, parse_json
from autopar.ir.paths import matches
from autopar.ir.plan import Plan
from autopar.ir.sharding import MeshShape, Sharding, spec_text
from autopar.ir.text_file import read_text, write_text
from autopar.ir.values import Role

_SHOWN = 8
_NAMES: Any = ByName[tuple[str | None, ...]]


@dataclass(frozen=True)
class Asked:
    """The options for rules: the sources of logical names, and `force` to write wrong rules too."""

    target: str | None
    names: Path | None
    force: bool


def export_plan(path: Path, kind: str, output: Path | None, asked: Asked) -> None:
    """Write a saved plan in the form `kind` to a file or stdout."""
    plan = plans.load(path)
    if kind == "partition-specs":
        text = specs_text(plan)
    elif kind == "python":
        text = python_module(plan)
    elif kind == "perfetto":
        text = perfetto_trace(plan)
    else:
        text = _rules(plan, kind, asked)
    _write(text, output)


def _rules(plan: Plan, kind: str, asked: Asked) -> str:
    state = [a for a in plan.arguments if a.role == Role.STATE.value]
    names = _names_of(plan, asked)
    if kind == "maxtext-rules" and not names:
        raise InputError(
            "a plan knows arrays by their paths, and MaxText's rules speak of logical names.\nGive "
            "them by --for FILE.py:FUNCTION, where flax boxes hold them, or --logical NAMES.json."
        )
    if not names:
        note = "no logical names given (--for, --logical): only rules for paths are written"
        err().print(note, style="bright_black")
    found = logical_rules([a for a in plan.arguments if a.path in names], names)
    if found.conflicts:
        _print_conflicts(found.conflicts, forced=asked.force)
        if not asked.force:
            sys.exit(IMPOSSIBLE)
    if kind == "maxtext-rules":
        return maxtext_text(plan, found.rules)
    return flax_text(plan, found.rules, path_rules(state))


def _names_of(plan: Plan, asked: Asked) -> dict[str, Names]:
    """The logical names of the plan's arguments, by path; those of the file count before boxes."""
    names: dict[str, Names] = {}
    if asked.target is not None:
        api.keep_to_cpu()
        loaded = load_target(asked.target)
        step = api.parallelize(loaded.step, cluster="1xcpu")
        names.update(logical_names(step.spec, loaded.args, loaded.kwargs))
    if asked.names is not None:
        for pattern, given in _read_names(asked.names).items():
            matched = [a for a in plan.arguments if matches(pattern, a.path)]
            for a in matched:
                if len(given) != len(a.shape):
                    raise InputError(
                        f"{a.path} has {len(a.shape)} dims, but {len(given)} names: {given}"
                    )
                names[a.path] = tuple(given)
            if not matched:
                raise InputError(f"{asked.names}: {pattern!r} is no path of the plan's arguments")
    known = {a.path: len(a.shape) for a in plan.arguments}
    return {path: n for path, n in names.items() if known.get(path) == len(n)}


def _read_names(path: Path) -> Mapping[str, Sequence[str | None]]:
    try:
        return dict(Codec().read(_NAMES, Item(parse_json(read_text(path, "names")))))
    except JsonError as error:
        raise InputError(
            f'{path}: {error}; write an object, {{"**/wq/kernel": ["embed", "heads"]}}'
        ) from error


def _print_conflicts(conflicts: Sequence[Conflict], *, forced: bool) -> None:
    count = len(conflicts)
    what = "tensor" if count == 1 else "tensors"
    err().print(f"logical rules cannot say how the plan lays out {count} {what}:", style="bold red")
    for c in conflicts[:_SHOWN]:
        planned, ruled = spec_text(Sharding(c.planned)), spec_text(Sharding(c.ruled))
        err().print(
            f"* {c.path} {c.names}: planned {planned}, by the rules {ruled}",
            soft_wrap=True,
            markup=False,
        )
    if count > _SHOWN:
        err().print(f"... and {count - _SHOWN} more")
    if not forced:
        err().print("Give these dims names of their own, or write the rules anyway with --force.")


# -- import ----------------------------------------------------------------------------------------


def import_as_pins(rules: Path, target: str, mesh: str | None, output: Path | None) -> None:
    """Read sharding rules of MaxText, flax and others, and write them as pins."""
    read = read_rules(rules)
    api.keep_to_cpu()
    loaded = load_target(target)
    step = api.parallelize(loaded.step, cluster="1xcpu")
    names = logical_names(step.spec, loaded.args, loaded.kwargs)
    inputs = trace(step.spec, loaded.args, loaded.kwargs).graph.inputs
    found = pins_from(read, inputs, names, MeshShape.of(mesh) if mesh else None)
    if not found.pins:
        raise InputError(
            f"{rules} places nothing of {target}: logical rules need flax boxes with names in "
            "what example_args() returns, and path rules patterns that are found in paths"
        )
    err().print(f"{len(found.pins)} arguments pinned, {len(found.unplaced)} remarks")
    for remark in found.unplaced[:_SHOWN]:
        err().print(f"* {remark}", soft_wrap=True, style="bright_black", markup=False)
    if len(found.unplaced) > _SHOWN:
        err().print(f"... and {len(found.unplaced) - _SHOWN} more", style="bright_black")
    pins = {path: spec_data(Sharding(dims)) for path, dims in found.pins}
    text = json.dumps({"pins": pins, "unplaced": list(found.unplaced)}, indent=1) + "\n"
    _write(text, output)


def _write(text: str, output: Path | None) -> None:
    """Write a text to a file, or where none is named to stdout."""
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(text, output)
        out().print(f"wrote {output}", soft_wrap=True, markup=False)
