"""Writes what the reference takes from the code: `python -m docs.reference.make`.

The page of primitives is written whole, from the table of rules. The pages of names and errors say
where a name is described: `<!-- autopar.Plan -->`, up to `<!-- end -->`. Between these comments its
signature, its docstring and its public members are written, so that GitHub shows them as a built
site does. After a colon are the members to show, with `<!-- autopar.RuleBook: -->` none. A test
makes the pages again and compares: run this where a rule, a signature or a docstring has changed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from autopar.rules import primitive_fates

HERE = Path(__file__).parent

_PRIMITIVES = """\
# Primitives

What becomes of every primitive of JAX 0.10 to 0.12 in a step, by name. `docs/reference/make.py`
writes this page from the table of rules.

A primitive of another package is not listed: one that compiles as a JAX function is planned as
that function, as those of equinox and lineax are. Any other runs whole on every device, with a
warning that names your line, until it is [given a rule](../how-to/add-a-rule.md). A kernel of
Pallas is cut along each dim of its grid, such as one that `vmap` added, whose blocks it computes
each on its own: block i of every tensor that has the dim, all results among them, and no
`program_id` or `num_programs` of it in the kernel.

| primitive | what becomes of it |
|---|---|
"""

_REGION = re.compile(r"^<!-- ([\w.]+)(:[\w, ]*)? -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^ {4}(\w+): ", re.MULTILINE)
_CODE = re.compile(r"(`[^`]*`)")
_SHOWN_DECORATORS = {"property", "classmethod", "staticmethod"}
_SPECIAL = {"__call__"}

Described = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def pages() -> dict[str, str]:
    """The text of each page, by the name of its file."""
    rows = "".join(f"| `{name}` | {what} |\n" for name, what in primitive_fates())
    kept = {name: (HERE / name).read_text(encoding="utf-8") for name in ("api.md", "errors.md")}
    described = {name: _REGION.sub(_described, text) for name, text in kept.items()}
    return {"primitives.md": _PRIMITIVES + rows, **described}


def described_names(page: str) -> list[str]:
    """The names that a page describes, as `autopar.Plan`."""
    return [name for name, _ in _REGION.findall(page)]


def _described(region: re.Match[str]) -> str:
    name, members = region.groups()
    kept = None if members is None else re.findall(r"\w+", members)
    opening = region[0].partition("\n")[0]
    return "\n\n".join([opening, *_description(name, kept), "<!-- end -->"])


def _description(name: str, kept: Sequence[str] | None) -> Iterator[str]:
    """The paragraphs about a name; of a class those of the `kept` members too."""
    module, _, short = name.rpartition(".")
    found = getattr(importlib.import_module(module), short)
    lines, body = _parsed(Path(inspect.getfile(inspect.unwrap(found))))
    *_, node = (  # the last one: before it stand the overloads of a function
        n for n in body if isinstance(n, Described) and n.name == found.__name__
    )
    yield f"### `{name}`"
    yield _signature(node, lines)
    yield from _text(node)
    if isinstance(node, ast.ClassDef):
        members = {n.name: n for n in node.body if isinstance(n, Described)}
        public = [n for n in members if not n.startswith("_") or n in _SPECIAL]
        for member in public if kept is None else kept:
            yield f"#### `{short}.{member}`"
            yield _signature(members[member], lines)
            yield from _text(members[member])


@cache
def _parsed(path: Path) -> tuple[list[str], list[ast.stmt]]:
    """The lines of a file and its statements."""
    text = path.read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text).body


def _signature(node: Described, lines: Sequence[str]) -> str:
    """How it is called, as the code has it, and the fields of a class.

    The block is marked `py`, which GitHub colors; tests run the blocks that are marked `python`.
    """
    shown = [
        lines[decorator.lineno - 1]
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Name) and decorator.id in _SHOWN_DECORATORS
    ]
    shown += lines[node.lineno - 1 : node.body[0].lineno - 1]
    fields = [n for n in node.body if isinstance(node, ast.ClassDef) and _is_public_field(n)]
    if not fields:
        shown[-1] = shown[-1].removesuffix(":")
    for field in fields:
        shown += lines[field.lineno - 1 : field.end_lineno]
    text = textwrap.dedent("\n".join(shown))
    return f"```py\n{text}\n```"


def _is_public_field(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
    )


def _text(node: Described) -> Iterator[str]:
    """The paragraphs of a docstring; its arguments as a list."""
    for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
        if not paragraph.startswith("Args:\n"):
            yield _escaped(paragraph)
            continue
        _, *entries = _ENTRY.split(paragraph)
        pairs = zip(entries[::2], entries[1::2], strict=True)
        yield "\n".join(f"- **{name}**: {_escaped(' '.join(told.split()))}" for name, told in pairs)


def _escaped(text: str) -> str:
    """Text as Markdown that reads the same: what is not code has no markup."""
    parts = _CODE.split(text)
    return "".join(p if p.startswith("`") else re.sub(r"([*<\[])", r"\\\1", p) for p in parts)


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")
