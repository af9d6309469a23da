"""Rooms stay small: no long files, no long functions, and one budget for all of them."""

import ast

from tests.house.source import FunctionNode, SourceFile, all_files, source_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_INIT_LINES = 40

# Everything that is shipped. Raise it on purpose, in a change that says what was bought with it.
LINE_BUDGET = 58_000


def test_no_file_is_long() -> None:
    long = [f"{f.path}: {f.line_count}" for f in all_files() if f.line_count > MAX_FILE_LINES]
    assert not long, f"files over {MAX_FILE_LINES} lines: {long}"


def test_no_function_is_long() -> None:
    long = [
        f"{file.at(node)} {node.name}: {_body_lines(node)}"
        for file in all_files()
        for node in file.nodes()
        if isinstance(node, FunctionNode) and _body_lines(node) > MAX_FUNCTION_LINES
    ]
    assert not long, f"function bodies over {MAX_FUNCTION_LINES} lines: {long}"


def test_package_fronts_only_point_inside() -> None:
    fronts = [file for file in source_files() if file.path.name == "__init__.py"]
    long = [f"{f.path}: {f.line_count}" for f in fronts if f.line_count > MAX_INIT_LINES]
    busy = [f"{f.path}" for f in fronts if not _only_names(f)]
    assert not long, f"__init__.py over {MAX_INIT_LINES} lines: {long}"
    assert not busy, f"__init__.py that define something: {busy}"


def test_the_whole_fits_its_budget() -> None:
    total = sum(file.line_count for file in source_files())
    assert total <= LINE_BUDGET, f"{total} lines, and the budget is {LINE_BUDGET}"


def _body_lines(function: FunctionNode) -> int:
    """Lines from the first statement after the docstring to the end."""
    has_docstring = ast.get_docstring(function, clean=False) is not None
    body = function.body[1:] if has_docstring else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def _only_names(front: SourceFile) -> bool:
    """Whether a package front holds a docstring, imports and assignments alone.

    Imports for type checkers may stand under an `if`.
    """
    allowed = ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign
    branches = [node for node in front.tree.body if isinstance(node, ast.If)]
    inner = [n for branch in branches for n in (*branch.body, *branch.orelse)]
    rest = [n for n in front.tree.body[1:] if not isinstance(n, ast.If)]
    return all(isinstance(node, allowed) for node in (*rest, *inner))
