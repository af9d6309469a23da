"""Runs a program in numpy, register by register, and lowers sketches to programs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder
from autopar.ir.batching import Batching
from autopar.ir.graph import Graph
from autopar.ir.program import Feed, Part, Program, Run, Send, Start
from autopar.ir.sharding import MeshShape, replicated
from autopar.ir.sharding_plan import Outcome, ShardingPlan, Status
from autopar.ir.stages import StagePlan
from autopar.ir.values import Literal
from autopar.passes.lower.partition.split import split
from autopar.passes.lower.partition.submesh_graph import left_partial, part_plan, submesh_graph
from autopar.passes.lower.program import lower_pipeline
from tests.lowering import lower_checked
from tests.passes.sketch import Array, arguments, compute, joined, plainly, rows_of


def whole_plan(graph: Graph, stages: StagePlan, submesh: int) -> ShardingPlan:
    """Everything whole on every device, what is made on demand aside."""
    free = {r.name for op in graph.ops if op.rule and op.rule.on_demand for r in op.results}
    values = tuple(
        (n, replicated(len(v.shape))) for n, v in graph.nested_values.items() if n not in free
    )
    outcome = Outcome(Status.OPTIMAL, 0.0, 0.0, "")
    return ShardingPlan(stages.submeshes[submesh].mesh, values, (), (), (), outcome)


def lowered(
    batching: Batching, stages: StagePlan, plans: Sequence[ShardingPlan] = ()
) -> tuple[tuple[Part, ...], Program]:
    """The parts and the program of a step, checked."""
    step = split(batching, stages)
    graphs = [submesh_graph(step, u) for u in range(len(stages.submeshes))]
    given = plans or [whole_plan(graph.graph, stages, u) for u, graph in enumerate(graphs)]
    resharders = [Resharder(Prices(_cluster(s.mesh), s.mesh)) for s in stages.submeshes]
    listings = [
        lower_checked(
            part.graph,
            part_plan(part, graphs[part.submesh], given[part.submesh]),
            resharders[part.submesh],
            left_partial(part, graphs[part.submesh]),
        )
        for part in step.parts
    ]
    return step.parts, lower_pipeline(step, listings)


def run(program: Program, given: Sequence[Array]) -> list[Array]:
    """The outputs of a program; a register that is not there is a KeyError."""
    files: list[dict[int, Array]] = [{} for _ in program.submeshes]
    for feed in program.feeds:
        _feed(files[feed.submesh], feed, given[feed.input], program.microbatches)
    for step in program.instructions:
        if isinstance(step, Run):
            _run(program, step, files[program.submesh_of(step)])
        elif isinstance(step, Send):
            for transfer in step.transfers:
                files[step.target][transfer.target] = files[step.source][transfer.source]
        elif isinstance(step, Start):
            for value, register in zip(step.values, step.registers, strict=True):
                files[step.submesh][register] = np.zeros(value.shape)
        else:
            for register in step.registers:
                del files[step.submesh][register]
    return [joined([files[f.submesh][r] for r in f.registers], f.rows) for f in program.fetches]


def _feed(file: dict[int, Array], feed: Feed, array: Array, m: int) -> None:
    for i, register in enumerate(feed.registers):
        file[register] = np.array(float(i)) if feed.is_index else rows_of(array, feed.rows, m, i)


def _run(program: Program, step: Run, file: dict[int, Array]) -> None:
    given = program.parts[step.part]
    part = given.part
    names = [i.value.name for i in part.graph.inputs]
    env = {name: file[r] for name, r in zip(names, step.inputs, strict=True)}
    for position in given.donated:
        del file[step.inputs[position]]
    compute(part.graph.ops, env)
    plain = len(part.graph.outputs) - len(part.accumulators)
    made = [
        np.full(o.shape, float(o.text)) if isinstance(o, Literal) else env[o]
        for o in part.graph.outputs
    ]
    file.update(zip(step.outputs, made[:plain], strict=True))
    for register, more in zip(step.accumulators, made[plain:], strict=True):
        file[register] = file[register] + more


def assert_equals_plain(batching: Batching, stages: StagePlan) -> tuple[tuple[Part, ...], Program]:
    """The program of a step gives the very numbers of the plain loop."""
    parts, program = lowered(batching, stages)
    given = arguments(batching)
    found, wanted = run(program, given), plainly(batching, given)
    for output, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert np.array_equal(a, b), f"output {output} differs by {np.abs(a - b).max()}"
    return parts, program


def _cluster(mesh: MeshShape) -> Cluster:
    return Cluster.parse(f"{mesh.device_count}xcpu")
