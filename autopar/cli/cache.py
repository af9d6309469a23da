"""`autopar cache`: the plans that are kept on disk."""

from __future__ import annotations

from pathlib import Path

from autopar.cli.console import out, print_json
from autopar.errors import InputError
from autopar.ir.codec import Json
from autopar.ir.plan import Plan
from autopar.ir.text import show_bytes
from autopar.options import cache_of
from autopar.report.table import Table

_SHOWN = 12  # letters of a key


def tell_cache(action: str, folder: Path | None, as_json: bool) -> None:
    """List the entries of a cache, tell its size, or clear it."""
    cache = cache_of(folder)
    if cache is None:
        raise InputError(
            "no folder of plans is known: name one, as in `autopar cache list plans`, or set "
            "JAX_COMPILATION_CACHE_DIR, beside which plans are kept"
        )
    entries = cache.entries()
    nbytes = sum(entry.nbytes for entry in entries)
    if action == "clear":
        cache.clear()
    if as_json:
        print_json(
            {
                "action": action,
                "folder": str(cache.folder),
                "plans": len(entries),
                "nbytes": nbytes,
                "entries": [
                    {"path": str(e.path), "nbytes": e.nbytes, "plan": _plan_text(e.plan)}
                    for e in entries
                ],
            }
        )
        return
    console = out()
    if action == "list" and entries:
        rows: list[dict[str, Json]] = [
            {"key": e.path.stem[:_SHOWN], "plan": _plan_text(e.plan), "nbytes": e.nbytes}
            for e in entries
        ]
        console.print(Table.of("Plans", {"key": "key", "plan": "plan", ">size": "nbytes"}, rows))
        console.print()
    done = "deleted from" if action == "clear" else "in"
    count = f"{len(entries)} plan{'' if len(entries) == 1 else 's'}"
    console.print(f"{count}, {show_bytes(nbytes)}, {done} {cache.folder}")


def _plan_text(plan: Plan | None) -> str:
    """The step and the cluster of a plan, or that there is none in the file."""
    if plan is None:
        return "damaged: it will be made anew"
    origin = plan.origin
    return f"{origin.step} on {origin.cluster_name}, {origin.method}"
