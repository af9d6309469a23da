"""The programs in flight on a submesh: how many there may be, and who waits for the oldest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import jax

# More than about forty programs with collectives under way abort the CPU client of JAX 0.10: its
# thread pools fill up with devices that wait for one another.
_CPU_LIMIT = 16

Admit = Callable[[Any], None]


def in_flight_limit(platform: str) -> int:
    """The number of programs that may be under way on a submesh; 0 for any number."""
    return _CPU_LIMIT if platform == "cpu" else 0


def wait(token: Any) -> None:
    """Wait until a program has run, or has failed: its results tell that to whoever reads them."""
    try:
        token.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return


def admit_any(token: Any) -> None:
    """Lets any number of programs be under way."""


def nearest_awaited(limit: int) -> int:
    """The smallest number of programs between one that is issued and one that is waited for."""
    return limit // 2 + 1 if limit else 0


def limit_in_flight(limit: int) -> Admit:
    """A function that takes the token of each program, and waits where `limit` are under way.

    It waits for the older half of them at once, as to fall asleep and wake up takes the host as
    long as to start a program. Of these the newest comes first: the others are done by then.
    """
    if not limit:
        return admit_any
    pending: deque[Any] = deque()
    half = (limit + 1) // 2

    def admit(token: Any) -> None:
        if len(pending) >= limit:
            for older in reversed([pending.popleft() for _ in range(half)]):
                wait(older)
        pending.append(token)

    return admit
