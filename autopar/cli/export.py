"""`autopar export`: a plan as data and code that need no autopar."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from autopar import api
from autopar.cli.completion import files
from autopar.cli.console import IMPOSSIBLE, err, told
from autopar.cli.loading import load_target
from autopar.errors import InputError
from autopar.exporting.python import python_module
from autopar.exporting.rule_files import flax_text, maxtext_text
from autopar.exporting.rules import Conflict, Names, logical_rules, path_rules
from autopar.exporting.specs import specs_text
from autopar.frontend.trace.logical import logical_names
from autopar.ir.json_reader import Item, JsonError, parse_json
from autopar.ir.paths import matches
from autopar.ir.plan import Argument, Plan
from autopar.ir.sharding import Sharding, spec_text
from autopar.ir.text_file import read_text, write_text
from autopar.ir.values import Role

KINDS = ("partition-specs", "python", "flax-rules", "maxtext-rules")
_SHOWN = 8


@dataclass(frozen=True)
class Asked:
    """Where logical names come from, and whether rules that are wrong in places will do."""

    target: str | None
    names: Path | None
    force: bool


@click.command("export")
@click.argument("path", metavar="PLAN.json", type=click.Path(path_type=Path))
@click.option("--as", "kind", type=click.Choice(KINDS), required=True, help="What to write.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: stdout."
)
@click.option(
    "--for",
    "target",
    metavar="FILE.py:FUNCTION",
    help="Rules: take the logical names that flax has put on the step's arguments.",
    shell_complete=files,
)
@click.option(
    "--logical",
    "names",
    type=click.Path(path_type=Path),
    help='Rules: a JSON object of names by path pattern: {"**/wq/kernel": ["embed", "heads"]}.',
)
@click.option("--force", is_flag=True, help="Write rules even where they are wrong.")
@told
def export_command(path: Path, kind: str, output: Path | None, **options: object) -> None:
    """Write a plan for use without autopar.

    \b
    partition-specs  JSON: the mesh, and the PartitionSpec of each argument and output
    python           a module that puts a step under jax.jit, laid out inside as planned, too
    flax-rules       path patterns with PartitionSpecs and, where names are known, logical rules
    maxtext-rules    logical_axis_rules, mesh_axes and data_sharding for a MaxText config

    Exit codes: 0 written, 1 the plan cannot be said in that form, 2 something cannot be used.
    """
    plan, asked = api.load(path), Asked(**options)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    if kind == "partition-specs":
        text = specs_text(plan)
    elif kind == "python":
        text = python_module(plan)
    else:
        text = _rules(plan, kind, asked)
    if output is None:
        click.echo(text, nl=False)
        return
    write_text(text, output)


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
        step: api.ParallelStep = api.parallelize(loaded.step, cluster="1xcpu")
        names.update(logical_names(step.spec, loaded.args, loaded.kwargs))
    if asked.names is not None:
        for pattern, given in _read_names(asked.names).items():
            matched = [a for a in plan.arguments if matches(pattern, a.path)]
            names.update((a.path, _fitted(given, a)) for a in matched)
            if not matched:
                raise InputError(f"{asked.names}: {pattern!r} is no path of the plan's arguments")
    known = {a.path: len(a.shape) for a in plan.arguments}
    return {path: n for path, n in names.items() if known.get(path) == len(n)}


def _read_names(path: Path) -> Mapping[str, Sequence[str | None]]:
    try:
        held = Item(parse_json(read_text(path, "names"))).pairs()
        return {pattern: [_name(entry) for entry in names.items()] for pattern, names in held}
    except JsonError as error:
        raise InputError(
            f'{path}: {error}; write an object, {{"**/wq/kernel": ["embed", "heads"]}}'
        ) from error


def _name(entry: Item) -> str | None:
    return entry.text() if entry.value is not None else None


def _fitted(given: Sequence[str | None], a: Argument) -> Names:
    if len(given) != len(a.shape):
        raise InputError(f"{a.path} has {len(a.shape)} dims, but {len(given)} names: {given}")
    return tuple(given)


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
