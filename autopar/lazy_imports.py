"""Imports public names when they are first asked for, as JAX takes a second to import."""

from __future__ import annotations

import importlib
from collections.abc import Callable

_HOMES = {
    "Cluster": "autopar.cluster",
    "MeshShape": "autopar.ir.sharding",
    "Plan": "autopar.ir.plan",
    "RuleBook": "autopar.rules",
    "errors": "autopar.errors",
    **dict.fromkeys(
        (
            "OwnRows", "ParallelStep", "distributed", "lint", "parallelize", "partition_spec",
            "plan", "shardings", "verify", "why_not",
        ),
        "autopar.api",
    ),
    **dict.fromkeys(
        ("compare", "inspect", "load", "save"), "autopar.plans"),
    "write_report": "autopar.pages",
    "explain": "autopar.reasons",
}  # fmt: skip


def later(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of the package: a name's module is imported when asked for.

    So the pytest plugin and the shell's completion, which need no JAX, do not wait for it.
    """

    def attribute(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(home)
        return module if home == f"{package}.{name}" else getattr(module, name)

    return attribute, lambda: sorted(_HOMES)
