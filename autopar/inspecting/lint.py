"""Reads a step before it is planned: what of it can be sharded and cut up, and what cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.frontend import StepSpec, TracedStep, trace
from autopar.gc_pause import paused_collection
from autopar.inspecting.arguments import (
    constant_findings,
    dtype_findings,
    memory_findings,
    state_findings,
)
from autopar.inspecting.coverage import coverage_of, rule_findings
from autopar.inspecting.divisors import argument_findings, value_findings
from autopar.inspecting.gathers import gather_findings
from autopar.inspecting.leaves import Leaf, leaves_of
from autopar.inspecting.rows import read_rows
from autopar.ir.findings import Finding, Findings, Severity
from autopar.ir.graph import Graph
from autopar.planner.request import Request
from autopar.planner.source import Source
from autopar.rules import attach_rules


def lint(
    spec: StepSpec, args: Sequence[object], kwargs: Mapping[str, object], request: Request
) -> Findings:
    """What is found of a step on these arguments, arrays or shapes, for a request's cluster.

    A request for a number of microbatches asks whether there are so many. Nothing is planned and no
    device is touched. Raises TraceError where the step does not trace.
    """
    with paused_collection():
        traced = trace(spec, args, dict(kwargs))
        graph = attach_rules(traced.graph, request.rules)
        leaves = tuple(leaves_of(graph))
        source = Source.of(spec, args, dict(kwargs), traced, request)
        batch, found = read_rows(source, request)
        found += tuple(_findings(traced, graph, leaves, request))
    order = list(Severity)
    return Findings(
        step=traced.name,
        cluster=request.cluster.name,
        devices=request.cluster.device_count,
        coverage=coverage_of(leaves),
        batch=batch,
        found=tuple(sorted(found, key=lambda f: (order.index(f.severity), -f.nbytes, f.text))),
    )


def _findings(
    traced: TracedStep, graph: Graph, leaves: Sequence[Leaf], request: Request
) -> Iterator[Finding]:
    devices = request.cluster.device_count
    yield from rule_findings(leaves)
    yield from argument_findings(graph, devices)
    yield from value_findings(graph, leaves, devices)
    yield from gather_findings(leaves, devices)
    yield from state_findings(graph)
    yield from constant_findings(graph)
    yield from dtype_findings(traced, leaves)
    yield from memory_findings(graph, devices, request.budget_bytes)
