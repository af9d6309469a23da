"""Every primitive that this JAX knows, by name."""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
from functools import cache
from types import ModuleType
from typing import Any

import jax
from jax.extend.core import Primitive

# Kernel languages, other machines' back ends and JAX's own test aids.
_ELSEWHERE = (
    "pallas", "mosaic", "thunky", "tpu", "cloud", "clusters", "export", "debugger", "test",
)  # fmt: skip


@cache
def modules() -> tuple[ModuleType, ...]:
    """The modules of JAX that import here, kernel languages left out."""
    found: list[ModuleType] = []
    source = importlib.import_module("jax._src")
    for info in pkgutil.walk_packages(source.__path__, "jax._src."):
        if any(part in info.name for part in _ELSEWHERE):
            continue
        with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
            found.append(importlib.import_module(info.name))
    return tuple(found)


@cache
def primitives() -> dict[str, Any]:
    """Every primitive by name; lax wins where two share one."""
    found: dict[str, Any] = {}
    for module in (*modules(), jax.lax):
        for value in vars(module).values():
            if isinstance(value, Primitive):
                found[value.name] = value
    return found


def primitive(name: str) -> Any:
    """A primitive by name."""
    return primitives()[name]
