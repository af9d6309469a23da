"""Writes text files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_text(text: str, path: str | Path) -> None:
    """Write ASCII text to a temporary file beside `path`, then put it in place."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as out:
            out.write(text)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
