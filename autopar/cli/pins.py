"""Pins as text: 'params/**/kernel=P(None,"model")' to a pattern and its dims."""

from __future__ import annotations

import ast
from pathlib import Path

from autopar.errors import InputError, PinError
from autopar.ir.codec import Item, JsonError, parse_json
from autopar.ir.text_file import read_text

_SHOWN = 200
Dims = tuple[tuple[str, ...] | None, ...]


def read_pins(texts: tuple[str, ...]) -> dict[str, Dims]:
    """Pins by pattern; raises PinError that names the text which is none."""
    return dict(_read_pin(text) for text in texts)


def load_pins(path: Path) -> dict[str, Dims]:
    """The pins of a file that `autopar import` wrote; raises InputError where it has none."""
    try:
        held = Item(parse_json(read_text(path, "pins"))).fields()["pins"]
        return {pattern: tuple(map(_axes, dims.items())) for pattern, dims in held.pairs()}
    except JsonError as error:
        raise InputError(
            f"{str(path)!a} holds no pins: {error}; write "
            '{"pins": {PATTERN: [null, AXIS, [AXIS, ...]]}}, as autopar import does'
        ) from error


def _axes(entry: Item) -> tuple[str, ...] | None:
    if entry.value is None:
        return None
    return (entry.value,) if isinstance(entry.value, str) else entry.texts()


def _read_pin(text: str) -> tuple[str, Dims]:
    pattern, _, spec = text.partition("=")
    try:
        call = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _misread(text) from None
    named = isinstance(call, ast.Call) and ast.unparse(call.func) in ("P", "PartitionSpec")
    if not pattern.strip() or not isinstance(call, ast.Call) or not named or call.keywords:
        raise _misread(text)
    return pattern.strip(), tuple(_dim(entry, text) for entry in call.args)


def _dim(entry: ast.expr, text: str) -> tuple[str, ...] | None:
    """A dim of a spec: None, an axis, or a tuple of axes; quotes may be left out."""
    if isinstance(entry, ast.Constant) and entry.value is None:
        return None
    if isinstance(entry, ast.Constant) and isinstance(entry.value, str):
        return (entry.value,)
    if isinstance(entry, ast.Name):
        return (entry.id,)
    if isinstance(entry, ast.Tuple):
        inner = [_dim(e, text) for e in entry.elts]
        return tuple(axis for axes in inner if axes for axis in axes)
    raise _misread(text)


def _misread(text: str) -> PinError:
    return PinError(
        f"pin {text[:_SHOWN]!r} is not understood; write PATTERN=P(...), as in "
        "'params/**/kernel=P(None,\"model\")', with None or axis names, one for each dim"
    )
