"""Manners that every file keeps, each as one question put to its syntax tree."""

import ast
from collections.abc import Callable
from typing import TypeGuard

import pytest

from tests.house.source import ROOT, SourceFile, all_files, source_files

BANNED_NAMES = {"util", "utils", "misc", "helper", "helpers", "common"}
BANNED_WORDS = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
HEADLESS = {"What", "Whether", "How", "Where", "Which", "When", "Every", "All", "One"}
PRINTING_ROOMS = ("autopar/cli/", "benchmarks/", "examples/")


def test_every_module_opens_with_a_sentence() -> None:
    wrong = [str(file.path) for file in all_files() if not _opens_with_a_sentence(file)]
    assert not wrong, f"modules that do not open with a sentence and its full stop: {wrong}"


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    headless = [
        f"{file.path}: {text.splitlines()[0]}"
        for file in source_files()
        for node in file.nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and (text := ast.get_docstring(node)) is not None
        and text.split()[0] in HEADLESS
    ]
    assert not headless, f"docstrings that open with a clause or a bare number: {headless}"


def test_no_room_is_called_after_nothing() -> None:
    wrong = [str(f.path) for f in all_files() if BANNED_NAMES & set(f.path.with_suffix("").parts)]
    assert not wrong, f"names that say nothing: {wrong}"


def test_every_folder_of_source_is_a_package() -> None:
    bare = {
        f.path.parent for f in source_files() if not (ROOT / f.path.parent / "__init__.py").exists()
    }
    assert not bare, f"folders that no wheel would hold, for want of an __init__.py: {bare}"


def test_nothing_is_left_for_later() -> None:
    left = [
        f"{file.path}:{number}"
        for file in all_files()
        for number, line in enumerate(file.text.splitlines(), 1)
        if any(word in line for word in BANNED_WORDS)
    ]
    assert not left, f"work left for later: {left}"


def test_only_the_command_line_prints() -> None:
    rooms = [f for f in all_files() if not f.path.as_posix().startswith(PRINTING_ROOMS)]
    printing = [
        file.at(node) for file in rooms for node in file.nodes if _is_call_of(node, "print")
    ]
    assert not printing, f"prints: {printing}"


def _is_call_of(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(alias.name in ("environ", "getenv") for alias in node.names)
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
        return False
    return node.value.id == "os" and node.attr in ("environ", "getenv", "putenv")


def _hides_that_it_is_abstract(node: ast.AST) -> bool:
    if not isinstance(node, ast.ClassDef) or node.name.lstrip("_").startswith("Abstract"):
        return False
    from_abc = any(ast.unparse(base) in ("ABC", "abc.ABC") for base in node.bases)
    return from_abc or any(_is_abstract_method(item) for item in node.body)


def _is_abstract_method(item: ast.stmt) -> bool:
    if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return any(ast.unparse(d).endswith("abstractmethod") for d in item.decorator_list)


UNMANNERLY: dict[str, Callable[[ast.AST], bool]] = {
    "global": lambda node: isinstance(node, ast.Global),
    "environment": _reads_environment,
    "super": lambda node: _is_call_of(node, "super"),
    "hasattr": lambda node: _is_call_of(node, "hasattr"),
    "abstract class without the name": _hides_that_it_is_abstract,
}


@pytest.mark.parametrize("fault", UNMANNERLY)
def test_source_has_manners(fault: str) -> None:
    is_fault = UNMANNERLY[fault]
    found = [
        file.at(node)
        for file in source_files()
        for node in file.nodes
        if isinstance(node, ast.stmt | ast.expr) and is_fault(node)
    ]
    assert not found, f"{fault}: {found}"


def _opens_with_a_sentence(file: SourceFile) -> bool:
    docstring = ast.get_docstring(file.tree) or ""
    return docstring.split("\n\n")[0].rstrip().endswith(".")
