"""Package fronts only point inside: short, and nothing is defined in them."""

import ast

from tests.house.source import SourceFile, source_files

MAX_INIT_LINES = 40


def test_package_fronts_only_point_inside() -> None:
    fronts = [file for file in source_files() if file.path.name == "__init__.py"]
    long = [f"{f.path}: {f.line_count}" for f in fronts if f.line_count > MAX_INIT_LINES]
    busy = [f"{f.path}" for f in fronts if not _only_names(f)]
    assert not long, f"__init__.py over {MAX_INIT_LINES} lines: {long}"
    assert not busy, f"__init__.py that define something: {busy}"


def _only_names(front: SourceFile) -> bool:
    """Whether a package front holds a docstring, imports and assignments alone.

    Imports for type checkers may stand under an `if`.
    """
    allowed = ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign
    branches = [node for node in front.tree.body if isinstance(node, ast.If)]
    inner = [n for branch in branches for n in (*branch.body, *branch.orelse)]
    rest = [n for n in front.tree.body[1:] if not isinstance(n, ast.If)]
    return all(isinstance(node, allowed) for node in (*rest, *inner))
