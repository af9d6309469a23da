"""`autopar import`: the sharding rules of MaxText, flax and others as pins."""

from __future__ import annotations

import json
from pathlib import Path

import click

from autopar import api
from autopar.cli.completion import files
from autopar.cli.console import err, told
from autopar.cli.loading import load_target
from autopar.errors import InputError
from autopar.exporting.importing import Imported, pins_from
from autopar.exporting.rule_files import read_rules
from autopar.exporting.specs import spec_data
from autopar.frontend import trace
from autopar.frontend.trace.logical import logical_names
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import Sharding
from autopar.ir.text_file import write_text

_SHOWN = 8


@click.command("import")
@click.argument("rules", metavar="RULES.yml|.py|.json", type=click.Path(path_type=Path))
@click.option(
    "--for",
    "target",
    metavar="FILE.py:FUNCTION",
    required=True,
    help="The step whose arguments the rules are for.",
    shell_complete=files,
)
@click.option("--mesh", help="As for autopar plan: axes that it has not are left out of the rules.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: stdout."
)
@told
def import_command(rules: Path, target: str, mesh: str | None, output: Path | None) -> None:
    """Read sharding rules as pins, for `autopar plan --pins`.

    \b
    .yml   logical_axis_rules of a MaxText config
    .py    lists of ("embed", "data") for flax, or of (r"kernel$", P(None, "model")) for paths
    .json  such a list, or what logical_axis_rules and partition_rules hold

    Logical rules need arrays with names: flax boxes in what example_args() returns. What the
    rules leave open is told, and the planner decides it.
    """
    read = read_rules(rules)
    api.keep_to_cpu()
    loaded = load_target(target)
    step: api.ParallelStep = api.parallelize(loaded.step, cluster="1xcpu")
    names = logical_names(step.spec, loaded.args, loaded.kwargs)
    inputs = trace(step.spec, loaded.args, loaded.kwargs).graph.inputs
    found = pins_from(read, inputs, names, MeshShape.of(mesh) if mesh else None)
    if not found.pins:
        raise InputError(
            f"{rules} places nothing of {target}: logical rules need flax boxes with names in "
            "what example_args() returns, and path rules patterns that are found in paths"
        )
    _tell(found)
    pins = {path: spec_data(Sharding(dims)) for path, dims in found.pins}
    text = json.dumps({"pins": pins, "unplaced": list(found.unplaced)}, indent=1) + "\n"
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(text, output)


def _tell(found: Imported) -> None:
    err().print(f"{len(found.pins)} arguments pinned, {len(found.unplaced)} remarks")
    for text in found.unplaced[:_SHOWN]:
        err().print(f"* {text}", soft_wrap=True, style="bright_black", markup=False)
    if len(found.unplaced) > _SHOWN:
        err().print(f"... and {len(found.unplaced) - _SHOWN} more", style="bright_black")
