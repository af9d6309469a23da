"""The options that say how a step is cut into stages and microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict, TypeVar

import click

from autopar.schedule.table import SCHEDULES

Count = int | Literal["auto"]
Command = TypeVar("Command", bound=Callable[..., object])


class Cut(TypedDict):
    """What the options come to."""

    stages: Count
    microbatches: Count | None
    schedule: str


def read_count(text: str) -> Count:
    """The number that a text is, or "auto"; raises BadParameter for anything else."""
    if text == "auto":
        return "auto"
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise click.BadParameter(f"{text!r} is neither a whole number from 1 on nor 'auto'")


_SCHEDULE = click.Choice(["auto", *SCHEDULES])


def stage_options(command: Command) -> Command:
    """The command with --stages, --microbatches and --schedule."""
    options = (
        click.option(
            "--stages",
            type=read_count,
            metavar="N|auto",
            default="1",
            show_default=True,
            help="Pipeline stages, each on a submesh of its own; auto searches them.",
        ),
        click.option(
            "--microbatches",
            type=read_count,
            metavar="N|auto",
            help="Into how many the batch is cut. Default: 1 for one stage, else auto.",
        ),
        click.option(
            "--schedule",
            type=_SCHEDULE,
            metavar="NAME",
            default="auto",
            show_default=True,
            help="Who runs what when; see `autopar schedule`.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
