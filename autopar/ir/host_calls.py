"""The primitives that call Python on the host while a step runs."""

from __future__ import annotations

# Each is run from one device a step, and never a second time: its function may count or write.
HOST_CALLS = frozenset(
    {"buffer_callback", "debug_callback", "debug_print", "io_callback", "pure_callback"}
)
