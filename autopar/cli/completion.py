"""`autopar completion`: the script that teaches a shell the commands, options, names and files."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_AUTOPAR_COMPLETE"

Items = list[CompletionItem[str]]
Completion = Callable[[click.Context, click.Parameter, str], Items]


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, names and files.

    \b
    bash   eval "$(autopar completion bash)"            in ~/.bashrc
    zsh    eval "$(autopar completion zsh)"             in ~/.zshrc
    fish   autopar completion fish | source             in config.fish
    """
    kind = get_completion_class(shell)
    if kind is not None:
        click.echo(kind(context.find_root().command, {}, "autopar", _VARIABLE).source())


def files(context: click.Context, parameter: click.Parameter, begun: str) -> Items:
    """The shell's own files: for FILE.py:FUNCTION, of which a shell can complete the file."""
    del context, parameter
    return [CompletionItem(begun, type="file")]


def offered(names: Iterable[str], *, or_files: bool = False) -> Completion:
    """These names, of which others may be as good; files where none begins so, if they may be."""

    def complete(context: click.Context, parameter: click.Parameter, begun: str) -> Items:
        found: Items = [CompletionItem(name) for name in names if name.startswith(begun)]
        return found or (files(context, parameter, begun) if or_files else [])

    return complete
