"""The project's own Python files, read once; those whose syntax is asked for are parsed once."""

import ast
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE_ROOMS = ("autopar", "passes", "runtime")
OTHER_ROOMS = ("tests", "examples", "benchmarks")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceFile:
    """A Python file of the project: its path from the root, and its text."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree: parsing all files takes seconds."""
        return ast.parse(self.text)

    @property
    def line_count(self) -> int:
        return self.text.count("\n")

    @property
    def is_source(self) -> bool:
        return self.path.parts[0] in SOURCE_ROOMS

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of it: walking every tree anew for every question takes seconds, too."""
        return tuple(ast.walk(self.tree))

    def at(self, node: ast.stmt | ast.expr) -> str:
        """Where a reader finds the node, as an editor takes it."""
        return f"{self.path}:{node.lineno}"


@cache
def all_files() -> tuple[SourceFile, ...]:
    """Every Python file once: the links autopar/passes and autopar/runtime are not followed."""
    paths = sorted(
        path
        for room in SOURCE_ROOMS + OTHER_ROOMS
        for path in (ROOT / room).rglob("*.py")
        if path.resolve() == path
    )
    return tuple(
        SourceFile(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in paths
    )


@cache
def source_files() -> tuple[SourceFile, ...]:
    """The files that are shipped."""
    return tuple(file for file in all_files() if file.is_source)
