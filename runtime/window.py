"""Keeps the number of programs under way on each submesh within bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import jax

# More than about forty programs with collectives under way abort the CPU client of JAX 0.10: its
# thread pools fill up with devices that wait for one another.
_CPU_LIMIT = 16

Admit = Callable[[Any], None]


def window_limit(platform: str) -> int:
    """How many programs may be under way on a submesh; 0 for any number."""
    return _CPU_LIMIT if platform == "cpu" else 0


def wait(token: Any) -> None:
    """Wait until a program has run, or has failed: its results tell that to whoever reads them."""
    try:
        token.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return


def no_window(token: Any) -> None:
    """Lets any number of programs be under way."""


def window(limit: int) -> Admit:
    """A function that takes the token of each program, and waits for the `limit`-th before it."""
    if not limit:
        return no_window
    pending: deque[Any] = deque()

    def admit(token: Any) -> None:
        if len(pending) >= limit:
            wait(pending.popleft())
        pending.append(token)

    return admit
