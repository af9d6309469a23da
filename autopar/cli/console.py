"""Where the command line writes: answers on stdout, everything else on stderr."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, cast

import click
from rich.console import Console, ConsoleDimensions
from rich.text import Text

from autopar.errors import AutoparError, InputError, PlanFileError
from autopar.ir.json_reader import Json

IMPOSSIBLE, MISUSED, INTERRUPTED = 1, 2, 130
_SHOWN = 80

P = ParamSpec("P")


def out() -> Console:
    """The console of answers."""
    return _as_wide_as_told(Console(highlight=False, markup=False, emoji=False))


def err() -> Console:
    """The console of progress, warnings and errors."""
    return _as_wide_as_told(Console(stderr=True, highlight=False, markup=False, emoji=False))


def _as_wide_as_told(console: Console) -> Console:
    """A dumb terminal is 80 columns wide to rich, whatever it says of itself."""
    if console.is_dumb_terminal:
        console.size = ConsoleDimensions(*shutil.get_terminal_size())
    return console


def print_json(data: dict[str, Json]) -> None:
    """One JSON object on stdout and nothing else."""
    click.echo(json.dumps(data, indent=1, ensure_ascii=True))


def print_warnings(messages: list[str]) -> None:
    """What the user should know but need not mend."""
    for message in messages:
        err().print(Text.assemble(("warning: ", "bold yellow"), message), soft_wrap=True)


@contextmanager
def gathered_warnings() -> Generator[list[str]]:
    """Autopar's warnings of the block as texts, each once; those of other packages stay hidden."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    found = (str(w.message) for w in caught if issubclass(w.category, UserWarning))
    messages.extend(dict.fromkeys(found))


class Commands(click.Group):
    """Commands that end well where stdout does not take what they write.

    A reader that has seen enough, such as head, ends them with 0; a full disk with 2 and a word.
    Characters that the terminal's encoding lacks are written as question marks.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command that the words name, and end the process."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        with _written_out():
            try:
                return click.Group.main(self, *args, **extra)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; click itself would end with 1 where nobody reads on."""
        with _written_out():
            return click.Group.invoke(self, ctx)


@contextmanager
def _written_out() -> Generator[None]:
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


def told(command: Callable[P, None]) -> Callable[P, None]:
    """The command with autopar's errors told in red, with no traceback, and its exit code set.

    1 means that there is no such plan, 2 that something handed in cannot be used, 130 that Ctrl-C
    ended it.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            _check_no_nul(kwargs)
            command(*args, **kwargs)
        except AutoparError as error:
            headline, _, rest = str(error).partition("\n")
            text = Text.assemble(("error: ", "bold red"), (headline, "red"))
            if rest:
                text.append(f"\n{rest}")
            err().print(text, soft_wrap=True)
            misused = isinstance(error, InputError | PlanFileError)
            sys.exit(MISUSED if misused else IMPOSSIBLE)
        except KeyboardInterrupt:
            err().print("interrupted", style="red")
            sys.exit(INTERRUPTED)

    return run


def _check_no_nul(options: Mapping[str, object]) -> None:
    """Raise InputError where a word has a NUL byte, which no path, name or spec may have."""
    for name, given in options.items():
        words = cast("Sequence[object]", given) if isinstance(given, tuple) else (given,)
        found = [str(word) for word in words if isinstance(word, str | Path)]
        if any("\0" in word for word in found):
            raise InputError(f"{name.replace('_', '-')} has a NUL byte: {found[0][:_SHOWN]!r}")
