"""Writes the tutorial as a Jupyter notebook: `python -m docs.tutorial.make`, beside its page.

Python blocks are cells, and so is each `$ autopar` line of a console block; all else is text. A
test makes the notebook again and compares, and another runs its cells.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PAGE, NOTEBOOK = HERE / "first-plan.md", HERE / "first-plan.ipynb"
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def notebook() -> str:
    """The notebook's JSON; the same page gives the same bytes."""
    cells = [
        _cell(number, kind, text)
        for number, (kind, text) in enumerate(_parts(PAGE.read_text(encoding="utf-8")))
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _parts(page: str) -> Iterator[tuple[str, str]]:
    """The page as text and code, in order."""
    at = 0
    for block in _BLOCK.finditer(page):
        yield "markdown", page[at : block.start()].strip()
        at = block.end()
        if block[1] == "python":
            yield "code", block[2].strip()
        else:
            commands = [line for line in block[2].splitlines() if line.startswith("$ ")]
            yield from (("code", f"!{line.removeprefix('$ ')}") for line in commands)
    yield "markdown", page[at:].strip()


def _cell(number: int, kind: str, text: str) -> dict[str, object]:
    if kind == "markdown":
        source = text.splitlines(keepends=True)
        return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source}
    return {
        "cell_type": kind,
        "execution_count": None,
        "id": f"cell-{number}",
        "metadata": {},
        "outputs": [],
        "source": text.splitlines(keepends=True),
    }


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")
