"""The consoles of the command line: answers on stdout, everything else on stderr."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Generator
from contextlib import contextmanager

import click
from rich.console import Console, ConsoleDimensions
from rich.text import Text

from autopar.errors import AutoparError
from autopar.ir.codec import Json

_UNBROKEN = 1000  # columns, where it is known neither how wide a page is nor who reads it
JSON_VERSION = 1  # of what `--json` prints: it changes where a key goes or means something else


class _Piped(Console):
    """A console whose reader may stop reading: the group of commands ends the process well then."""

    def on_broken_pipe(self) -> None:
        """Let the error through; rich would end with 1."""
        raise BrokenPipeError


def out() -> Console:
    """The console of answers."""
    console = _as_wide_as_said(_Piped(highlight=False, markup=False, emoji=False))
    if not console.is_terminal and not shutil.get_terminal_size((0, 0)).columns:
        console.width = _UNBROKEN  # a row of a table is one line for grep
    return console


def err() -> Console:
    """The console of progress, warnings and errors."""
    return _as_wide_as_said(Console(stderr=True, highlight=False, markup=False, emoji=False))


def _as_wide_as_said(console: Console) -> Console:
    """A dumb terminal is 80 columns wide to rich, whatever it says of itself."""
    if console.is_dumb_terminal:
        console.size = ConsoleDimensions(*shutil.get_terminal_size())
    return console


def print_json(data: dict[str, Json]) -> None:
    """Print one JSON object on stdout and nothing else; it says which version its form is of."""
    versioned = {"json_version": JSON_VERSION, **data}
    click.echo(json.dumps(versioned, indent=1, ensure_ascii=True))


def print_warnings(messages: list[str]) -> None:
    """Print what the user should know but need not mend."""
    for message in messages:
        err().print(Text.assemble(("warning: ", "bold yellow"), message), soft_wrap=True)


@contextmanager
def gather_warnings() -> Generator[list[str]]:
    """Autopar's warnings of the block as texts, each once; those of other packages stay hidden."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    found = (str(w.message) for w in caught if issubclass(w.category, UserWarning))
    messages.extend(dict.fromkeys(found))


def print_error(error: AutoparError) -> None:
    """An error in red, with what it lists below it."""
    headline, _, rest = str(error).partition("\n")
    text = Text.assemble(("error: ", "bold red"), (headline, "red"))
    if rest:
        text.append(f"\n{rest}")
    err().print(text, soft_wrap=True)
