"""Reading the plain parameters of an op where they are nested or may be left out."""

from __future__ import annotations

from autopar.errors import GraphError
from autopar.ir.graph import Op, Plain


def optional(op: Op, name: str) -> Plain:
    """A parameter, or None where the op has none of that name."""
    return next((value for key, value in op.params if key == name), None)


def items(value: Plain) -> tuple[Plain, ...]:
    """A parameter that is a tuple."""
    if not isinstance(value, tuple):
        raise GraphError(f"parameter {value!r} is not a tuple")
    return value


def ints(value: Plain) -> tuple[int, ...]:
    """A parameter that is a tuple of whole numbers."""
    return tuple(v for v in items(value) if isinstance(v, int))


def pairs(value: Plain) -> tuple[tuple[int, ...], ...]:
    """A parameter that is a tuple of tuples of whole numbers."""
    return tuple(ints(v) for v in items(value))


def fields(value: Plain) -> dict[str, Plain]:
    """A named tuple, such as dimension numbers, by field."""
    found: dict[str, Plain] = {}
    for item in items(value):
        match item:
            case (str() as name, content):
                found[name] = content
            case _:
                raise GraphError(f"parameter {value!r} does not name its fields")
    return found
