"""The commands of `autopar`, and their help."""

from __future__ import annotations

from importlib.metadata import version

import click

from autopar.cli.calibrate import calibrate_command
from autopar.cli.clusters import clusters_command
from autopar.cli.completion import completion_command
from autopar.cli.console import Commands
from autopar.cli.demo import demo_command
from autopar.cli.diff import diff_command
from autopar.cli.explain import explain_command
from autopar.cli.export import export_command
from autopar.cli.import_rules import import_command
from autopar.cli.lint import lint_command
from autopar.cli.partition import partition_command
from autopar.cli.plan import plan_command
from autopar.cli.profile import profile_command
from autopar.cli.report import report_command
from autopar.cli.schedule import schedule_command
from autopar.cli.show import show_command
from autopar.cli.verify import verify_command
from autopar.cli.why_not import why_not_command


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(version("autopar"), prog_name="autopar")
def main() -> None:
    """Auto-parallelize JAX train steps: plan for a cluster that need not be there, and run.

    Exit codes: 0 all is well, 1 there is no such plan, 2 something given cannot be used, 130 Ctrl-C
    ended it.
    """


for _command in (
    plan_command,
    lint_command,
    show_command,
    explain_command,
    why_not_command,
    diff_command,
    report_command,
    export_command,
    import_command,
    verify_command,
    clusters_command,
    calibrate_command,
    schedule_command,
    profile_command,
    partition_command,
    demo_command,
    completion_command,
):
    main.add_command(_command)
