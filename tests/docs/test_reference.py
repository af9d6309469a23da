"""The reference names all there is: every public name, every error, every command and option."""

import importlib
import inspect
import re
import runpy

import click
import pytest

import autopar
from autopar import errors
from autopar.cli.main import main
from tests.house.source import ROOT

REFERENCE = ROOT / "docs" / "reference"
MAKE = runpy.run_path(str(REFERENCE / "make.py"))
PAGES = MAKE["pages"]()
SCRIPT = runpy.run_path(str(REFERENCE / "json_schemas.py"))
EVERYWHERE = {"--json", "--help"}  # the page says of these, once, what they do


def _documented(page: str) -> list[object]:
    """What the page describes; a name that is none fails here."""
    names = MAKE["described_names"]((REFERENCE / page).read_text(encoding="utf-8"))
    return [
        getattr(importlib.import_module(module), name)
        for module, _, name in (path.rpartition(".") for path in names)
    ]


@pytest.mark.parametrize("page", ["api.md", "errors.md", "primitives.md"])
def test_a_page_from_the_code_is_what_the_script_writes(page: str) -> None:
    kept = (REFERENCE / page).read_text(encoding="utf-8")
    assert kept == PAGES[page], "run `python -m docs.reference.make`"


def test_every_public_name_is_in_the_reference() -> None:
    told = _documented("api.md")
    missing = [
        name for name in autopar.__all__ if name != "errors" and getattr(autopar, name) not in told
    ]
    assert not missing, f"docs/reference/api.md does not describe {missing}"


def test_every_error_is_in_the_reference() -> None:
    told = _documented("errors.md")
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    missing = [c.__name__ for c in classes if c not in told]
    assert not missing, f"docs/reference/errors.md does not describe {missing}"


def _sections() -> dict[str, str]:
    """The text about each command, by its name."""
    text = (REFERENCE / "cli.md").read_text(encoding="utf-8")
    parts = re.split(r"^## autopar ([\w-]+).*\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _options(command: click.Command) -> set[str]:
    named = [o for p in command.params if isinstance(p, click.Option) for o in p.opts]
    return {option for option in named if option.startswith("--")}


@pytest.mark.parametrize("name", main.commands)
def test_every_option_of_a_command_is_in_the_reference(name: str) -> None:
    section = _sections().get(name)
    assert section is not None, f"docs/reference/cli.md has no section '## autopar {name}'"
    told = set(re.findall(r"`(?:-\w`, `)?(--[\w-]+)", section))
    there = _options(main.commands[name])
    assert there - EVERYWHERE <= told
    assert told <= there | EVERYWHERE


def test_the_reference_has_no_command_that_is_gone() -> None:
    assert set(_sections()) <= set(main.commands)


def test_the_schemas_are_those_of_the_forms() -> None:
    kept = {p.name: p.read_text(encoding="utf-8") for p in (REFERENCE / "schemas").iterdir()}
    assert kept == SCRIPT["schemas"](), "run `python -m docs.reference.json_schemas`"


def test_every_command_that_prints_json_has_a_form() -> None:
    told = {name.split()[0] for name in SCRIPT["FORMS"]}
    printing = {
        name for name, c in main.commands.items() if any("--json" in p.opts for p in c.params)
    }
    assert told == printing
