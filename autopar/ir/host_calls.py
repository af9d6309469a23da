"""The primitives that call Python on the host while a step runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.ir.values import Value

# Each is run from one device a step, and never a second time: its function may count or write.
HOST_CALLS = frozenset(
    {"buffer_callback", "debug_callback", "debug_print", "io_callback", "pure_callback"}
)
# Of these the ones that are made though nobody reads what they give.
ACTING_CALLS = HOST_CALLS - {"pure_callback"}


def is_ordered_call(params: Mapping[str, Any]) -> bool:
    """True if a call, by its parameters, keeps its place among the other ordered ones."""
    return bool(params.get("ordered")) or "Ordered" in str(params.get("effect"))


def handed_on_by(value: Value) -> str:
    """The combiner by which devices that have nothing get the value of the one that has it.

    The largest keeps the sign of a zero, which a sum may lose; complex numbers have no largest.
    """
    return "or" if value.dtype == "bool" else "sum" if value.dtype.startswith("c") else "max"
