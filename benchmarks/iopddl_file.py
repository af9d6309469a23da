"""Reads and writes sharding problems in the IOPDDL contest's JSON form, plain or gzipped.

Intervals are half-open there and inclusive in `Usage`. A cost of `FORBIDDEN` or more says that the
choice, or the pair, is not allowed: infinity here.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from autopar.errors import InputError
from autopar.passes.shard.solver.problem import Edge, Floats, Problem, Usage

FORBIDDEN = 10**17
_WRITTEN = 10**18
_LARGEST_EXACT = 2**53


def read_iopddl(path: str | Path) -> Problem:
    """The problem in a file; the name's end tells whether it is gzipped.

    Raises InputError, naming the file and the entry, where it is not such a problem.
    """
    path = Path(path)
    return _Reader(path).problem(_parsed(path))


def write_iopddl(problem: Problem, path: str | Path, name: str = "") -> None:
    """Write a problem whose costs and bytes are whole numbers.

    Raises InputError where one is not, where a node holds memory at two intervals, or where
    there is no limit.
    """
    path = Path(path)
    text = json.dumps({"problem": _written(problem, name or path.name.split(".")[0])})
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write(text)


def _parsed(path: Path) -> object:
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from error


@dataclass(frozen=True)
class _Reader:
    """Turns parsed JSON into arrays; every fault names the file and the entry."""

    path: Path

    def problem(self, parsed: object) -> Problem:
        body = self._entry(parsed, "problem")
        nodes, edges = self._entry(body, "nodes"), self._entry(body, "edges")
        costs = self._rows(nodes, "nodes.costs", "costs")
        nbytes = self._rows(nodes, "nodes.usages", "usages")
        spans = self._pairs(nodes, "nodes.intervals", "intervals")
        if not len(costs) == len(nbytes) == len(spans):
            raise self._fault(
                "nodes", f"{len(spans)} intervals, {len(costs)} costs, {len(nbytes)} usages"
            )
        for v, (cost, held) in enumerate(zip(costs, nbytes, strict=True)):
            if not len(cost) or len(cost) != len(held):
                raise self._fault(f"node {v}", f"{len(cost)} costs and {len(held)} usages")
            if held.min() < 0:
                raise self._fault(f"node {v}", "negative usage")
        usages = tuple(
            Usage(v, first, last - 1, held)
            for v, ((first, last), held) in enumerate(zip(spans, nbytes, strict=True))
            if self._span(v, first, last) and held.any()
        )
        costs = tuple(_allowed(c) for c in costs)
        return Problem(costs, self._edges(edges, costs), usages, self._limit(body))

    def _edges(self, edges: object, costs: Sequence[Floats]) -> tuple[Edge, ...]:
        ends = self._pairs(edges, "edges.nodes", "nodes")
        tables = self._rows(edges, "edges.costs", "costs")
        if len(ends) != len(tables):
            raise self._fault("edges", f"{len(ends)} pairs of nodes and {len(tables)} tables")
        found: list[Edge] = []
        for i, ((u, v), csr) in enumerate(zip(ends, tables, strict=True)):
            if not (0 <= u < len(costs) and 0 <= v < len(costs)) or u == v:
                raise self._fault(f"edge {i}", f"joins nodes {u} and {v} of {len(costs)}")
            shape = (len(costs[u]), len(costs[v]))
            if len(csr) != shape[0] * shape[1]:
                raise self._fault(f"edge {i}", f"{len(csr)} costs, not {shape[0]} x {shape[1]}")
            found.append(Edge(u, v, _allowed(csr).reshape(shape)))
        return tuple(found)

    def _limit(self, body: object) -> float:
        limit = self._entry(body, "usage_limit")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise self._fault("usage_limit", f"{limit!r} is not a whole number of bytes")
        return float(limit)

    def _span(self, node: int, first: int, last: int) -> bool:
        if first < 0:
            raise self._fault(f"node {node}", f"its interval starts at {first}")
        return first < last

    def _rows(self, entry: object, label: str, key: str) -> tuple[Floats, ...]:
        rows = self._entry(entry, key, label)
        if not isinstance(rows, list):
            raise self._fault(label, "not a list")
        listed = cast("list[object]", rows)
        return tuple(self._row(row, f"{label}[{i}]") for i, row in enumerate(listed))

    def _row(self, row: object, label: str) -> Floats:
        try:
            found = np.asarray(row, dtype=np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._fault(label, "not a list of whole numbers") from error
        if found.ndim != 1:
            raise self._fault(label, "not a list of whole numbers")
        return found.astype(np.float64)

    def _pairs(self, entry: object, label: str, key: str) -> list[tuple[int, int]]:
        rows = self._entry(entry, key, label)
        try:
            found = np.asarray(rows, dtype=np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._fault(label, "not a list of pairs of whole numbers") from error
        if found.size and (found.ndim != 2 or found.shape[1] != 2):
            raise self._fault(label, "not a list of pairs of whole numbers")
        return [(int(a), int(b)) for a, b in found.reshape(-1, 2)]

    def _entry(self, parsed: object, key: str, label: str = "") -> object:
        if not isinstance(parsed, dict) or key not in parsed:
            raise self._fault(label or key, "missing")
        return cast("dict[str, object]", parsed)[key]

    def _fault(self, label: str, what: str) -> InputError:
        return InputError(f"{self.path}: {label}: {what}")


def _allowed(costs: Floats) -> Floats:
    return np.where(costs >= FORBIDDEN, np.inf, costs)


def _written(problem: Problem, name: str) -> dict[str, object]:
    if not np.isfinite(problem.limit_bytes):
        raise InputError("the IOPDDL form needs a memory limit")
    spans = [[0, 0] for _ in problem.costs]
    nbytes = [[0] * len(c) for c in problem.costs]
    for usage in problem.usages:
        if any(nbytes[usage.node]):
            raise InputError(f"node {usage.node} holds memory at two intervals: IOPDDL has one")
        spans[usage.node] = [usage.first, usage.last + 1]
        nbytes[usage.node] = _whole(usage.nbytes)
    return {
        "name": name,
        "nodes": {
            "intervals": spans,
            "costs": [_whole(c) for c in problem.costs],
            "usages": nbytes,
        },
        "edges": {
            "nodes": [[e.left, e.right] for e in problem.edges],
            "costs": [_whole(e.table.ravel()) for e in problem.edges],
        },
        "usage_limit": int(problem.limit_bytes),
    }


def _whole(values: npt.NDArray[np.float64]) -> list[int]:
    finite = np.where(np.isfinite(values), values, 0.0)
    if (finite != np.rint(finite)).any() or (np.abs(finite) > _LARGEST_EXACT).any():
        raise InputError("the IOPDDL form holds whole numbers only")
    exact = np.where(np.isfinite(values), finite, _WRITTEN).astype(np.int64)
    return [int(w) for w in exact]
