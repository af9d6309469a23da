"""The parts of the model by module path: their parameters, work and stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.inspecting.flow import Flow
from autopar.ir.inspection import WHOLE_STEP, ModuleRow, OpRow
from autopar.ir.paths import common_path, unnumbered
from autopar.ir.values import Role


@dataclass
class _Module:
    """The work and parameters of one module, its own modules included."""

    ops: int = 0
    flops: int = 0
    parameter_bytes: int = 0
    seconds: float = 0.0
    stages: set[int] = field(default_factory=set[int])


def module_rows(flows: Sequence[Flow], ops: Sequence[OpRow]) -> tuple[ModuleRow, ...]:
    """The modules with all that is in them, in the model's order; "" is the whole step.

    Modules whose paths differ in numbers are one row where they have as many FLOPs and parameters.
    `ops` are those of the listings, each by itself.
    """
    modules: dict[str, _Module] = {}
    for op in ops:
        for path in _around(op.spot.module):
            module = modules.setdefault(path, _Module())
            module.ops += 1
            module.flops += op.flops
            module.seconds += op.seconds
            module.stages.add(op.spot.stage)
    for owner, nbytes in _owned(flows):
        for path in _around(owner):
            modules.setdefault(path, _Module()).parameter_bytes += nbytes
    groups: dict[tuple[object, ...], list[str]] = {}
    for path, module in modules.items():
        stages = tuple(sorted(module.stages))
        key = unnumbered(path), module.flops, module.parameter_bytes, stages
        groups.setdefault(key, []).append(path)
    return tuple(_row(paths, [modules[p] for p in paths]) for paths in groups.values())


def _around(path: str) -> Iterator[str]:
    """The step, then every module that a path leads through, the whole path last."""
    yield ""
    for end, letter in enumerate(path):
        if letter == "/":
            yield path[:end]
    if path:
        yield path


def _owned(flows: Sequence[Flow]) -> Iterator[tuple[str, int]]:
    """The bytes of each parameter with the module that reads it first."""
    seen: set[str] = set()
    for flow in flows:
        for given in flow.listed.graph.inputs:
            reader = flow.reader(given.value.name) if given.role is Role.STATE else None
            if reader is None or reader.origin.region == "update" or given.path in seen:
                continue
            seen.add(given.path)
            yield reader.origin.module, given.value.nbytes


def _row(paths: Sequence[str], modules: Sequence[_Module]) -> ModuleRow:
    return ModuleRow(
        path=common_path(paths),
        depth=paths[0].count("/") + 1 if paths[0] else 0,
        count=len(paths),
        ops=sum(m.ops for m in modules),
        flops=sum(m.flops for m in modules),
        parameter_bytes=sum(m.parameter_bytes for m in modules),
        seconds=sum(m.seconds for m in modules),
        stages=tuple(sorted({s for m in modules for s in m.stages} - {WHOLE_STEP})),
    )
