"""Where the command line writes: answers on stdout, everything else on stderr."""

from __future__ import annotations

import functools
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec

import click
from rich.console import Console, ConsoleDimensions
from rich.text import Text

from autopar.errors import AutoparError, InputError, PlanFileError
from autopar.ir.json_reader import Json

IMPOSSIBLE, MISUSED, INTERRUPTED = 1, 2, 130

P = ParamSpec("P")


def out() -> Console:
    """The console of answers."""
    return _as_wide_as_told(Console(highlight=False))


def err() -> Console:
    """The console of progress, warnings and errors."""
    return _as_wide_as_told(Console(stderr=True, highlight=False))


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


def check_folder(output: Path) -> None:
    """Raise InputError where a file's folder is missing: before work is done that would be lost."""
    if not output.parent.is_dir():
        raise InputError(f"there is no folder {str(output.parent)!r} for {str(output)!r}: make it")


def told(command: Callable[P, None]) -> Callable[P, None]:
    """The command with autopar's errors told in red, with no traceback, and its exit code set.

    1 means that there is no such plan, 2 that something handed in cannot be used, 130 that Ctrl-C
    ended it.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
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
