"""Writes text files whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(text: str, path: str | Path) -> None:
    """Write ASCII text to a temporary file beside `path`, then put it in place."""
    target = Path(path)
    # Not mkstemp, whose files nobody else may read.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with temporary.open("w", encoding="ascii") as out:
            out.write(text)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
