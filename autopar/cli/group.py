"""The group of commands: how a command ends, on an error, an interrupt or a closed pipe."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from autopar.errors import AutoparError, InputError, PlanFileError

IMPOSSIBLE, MISUSED, INTERRUPTED = 1, 2, 130
_SHOWN = 80
_FULL = 10_000  # characters: no sentence of help is so long


class Command(click.Command):
    """A command whose errors are told in red with no traceback, and set the exit code.

    1 means that there is no such plan, 2 that something handed in cannot be used, 130 that Ctrl-C
    ended it.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; none may have a NUL byte, as no path, name or spec has one."""
        for word in args:
            if "\0" in word:
                raise click.UsageError(f"{word[:_SHOWN]!r} has a NUL byte", ctx)
        return click.Command.parse_args(self, ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command with what was given."""
        try:
            return click.Command.invoke(self, ctx)
        except AutoparError as error:
            from autopar.cli.console import print_error

            print_error(error)
            misused = isinstance(error, InputError | PlanFileError)
            sys.exit(MISUSED if misused else IMPOSSIBLE)
        except KeyboardInterrupt:
            from autopar.cli.console import err

            err().print("interrupted", style="red")
            sys.exit(INTERRUPTED)


class Commands(click.Group):
    """Commands that end well where stdout does not take what they write.

    A reader that has seen enough, such as head, ends them with 0; a full disk with 2 and a word.
    Characters that the terminal's encoding lacks are written as question marks. Help lists them by
    what they are for: `tasks` has the names under each heading.
    """

    command_class = Command

    def __init__(self, *args: Any, tasks: Mapping[str, Sequence[str]], **extra: Any) -> None:
        click.Group.__init__(self, *args, **extra)
        self._tasks = tasks

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each task, with their first sentences in full."""
        for task, names in self._tasks.items():
            with formatter.section(task):
                formatter.write_dl([(n, self.commands[n].get_short_help_str(_FULL)) for n in names])

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command that the words name, and end the process."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        with _end_quietly():
            try:
                return click.Group.main(self, *args, **extra)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; click itself would end with 1 where nobody reads on."""
        with _end_quietly():
            return click.Group.invoke(self, ctx)


@contextmanager
def _end_quietly() -> Generator[None]:
    try:
        yield
    except BrokenPipeError:
        _write_no_more()
        sys.exit(0)
    except OSError as error:
        _write_no_more()
        of = f" {str(error.filename)[:_SHOWN]!r}" if error.filename is not None else ""
        click.echo(f"error: cannot read or write{of}: {error.strerror or error}", err=True)
        sys.exit(MISUSED)


def _write_no_more() -> None:
    """Let what is left in stdout's buffer go nowhere, or Python tries it once more at its end."""
    try:
        number = sys.stdout.fileno()
    except (OSError, AttributeError):  # a test's stdout
        return
    with open(os.devnull, "w", encoding="ascii") as nowhere:
        os.dup2(nowhere.fileno(), number)
