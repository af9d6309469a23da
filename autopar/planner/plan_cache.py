"""Plans on disk, found by content: what was planned before is not planned again.

    key = sha256 of  the step: its graph with lines and names
                     the cluster and every option of the request
                     the planner: its own code, and the releases of JAX and of the solvers
    FOLDER/<key>.json is the plan, as `plan.save` writes it

Planning is deterministic byte for byte, so a plan from here is the one that would be made. An entry
that cannot be used is refused, told of in the log and replaced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from autopar.errors import AutoparError, InputError
from autopar.ir.plan import Plan
from autopar.ir.plan_file import FORMAT, load_plan, plan_to_json, save_plan
from autopar.planner.planned import Planned
from autopar.planner.request import Request
from autopar.planner.restore import restore
from autopar.planner.sliced_step import Source
from autopar.progress import LOGGER

_RELEASES = ("autopar", "jax", "jaxlib", "numpy", "numba", "highspy", "PuLP")
_PLAIN = (
    "mesh", "memory_bytes", "pins", "mesh_axes", "remat", "batch_axes", "order",
    "compiler_options",
)  # fmt: skip


def plan_key(source: Source, request: Request) -> str:
    """The key of the plan of a step for a request: a hash of all that the plan rests on."""
    spec, graph = source.spec, source.traced.graph
    content = {
        "format": FORMAT,
        "releases": [version(name) for name in _RELEASES],
        "code": _code_hash(),
        "step": [source.traced.key, str(graph), sorted(spec.kept)],
        "cluster": [request.cluster.name, request.cluster.to_toml()],
        "options": [repr(getattr(request, name)) for name in _PLAIN],
        "passes": [str(request.passes), repr(request.passes)],
        "rules": sorted(request.rules.extra.items()),
        "family": [[m.source.traced.key, repr(m.weight)] for m in source.family],
        "beside": plan_to_json(request.beside) if request.beside is not None else "",
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@lru_cache(maxsize=1)
def _code_hash() -> str:
    """The hash of autopar's own source: a planner that was changed makes other plans."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(_sources(root)):
        found.update(path.relative_to(root).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    """The Python files below a folder, those behind links to folders among them."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


@dataclass(frozen=True)
class Entry:
    """A plan in the cache, or a file there that is none: then `plan` is None."""

    path: Path
    nbytes: int
    plan: Plan | None


@dataclass(frozen=True)
class PlanCache:
    """The plans in a folder, which is made with the first of them."""

    folder: Path

    def planned(self, source: Source, request: Request, make: Callable[[], Planned]) -> Planned:
        """The planned step: out of the cache where its plan is here, else made and kept."""
        path = self.folder / f"{plan_key(source, request)}.json"
        found = _restored(path, source, request)
        if found is None:
            found = make()
            self._keep(path, found.plan)
        return found

    def _keep(self, path: Path, plan: Plan) -> None:
        """Put a plan in, whole or not at all; a folder that cannot be written is told of."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_plan(plan, path)
        except (AutoparError, OSError) as error:
            LOGGER.warning("the plan cache cannot keep %s: %s", path, error)

    def entries(self) -> tuple[Entry, ...]:
        """The plans in the folder, by key."""
        return tuple(Entry(p, p.stat().st_size, _plan_in(p)) for p in self._paths())

    def clear(self) -> int:
        """Delete the entries; the number of them. Nothing else in the folder is touched."""
        paths = self._paths()
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def _paths(self) -> list[Path]:
        """The files of the entries, by key."""
        paths = sorted(self.folder.glob("*.json")) if self.folder.is_dir() else []
        return [path for path in paths if _is_key(path.stem)]


def _restored(path: Path, source: Source, request: Request) -> Planned | None:
    """The planned step, if the plan of a file can be used."""
    if not path.is_file():
        return None
    try:
        plan = load_plan(path)
        if plan.origin.graph_key != source.traced.key:
            raise InputError("it is the plan of another step")
        found = restore(plan, source, request)
    except AutoparError as error:
        LOGGER.warning(
            "%s: the plan cache has an entry that cannot be used, and makes it anew: %s: %s",
            source.traced.name, path, error,
        )  # fmt: skip
        path.unlink(missing_ok=True)
        return None
    LOGGER.info("%s: the plan is from the cache: %s", source.traced.name, path)
    return found


def _is_key(name: str) -> bool:
    return len(name) == hashlib.sha256().digest_size * 2 and set(name) <= set("0123456789abcdef")


def _plan_in(path: Path) -> Plan | None:
    try:
        return load_plan(path)
    except AutoparError:
        return None
