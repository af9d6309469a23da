"""The parts of a submesh as one graph to shard, and the sharding of that graph cut into parts.

    parts of mesh0      F0: a = x @ w       W0: dw = x.T @ da      update: w -= sum(dw)
    one graph           a = x @ w (runs m)  dw = x.T @ da (runs m) w -= dw (runs 1)

So one sharding decision covers them all: a value has the same sharding on both sides of a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.ir.graph import Graph
from autopar.ir.program import Part, PartKind, SubmeshGraph
from autopar.ir.sharding import Sharding, replicated
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.values import Input
from autopar.passes.lower.partition.part_assignment import PartKey
from autopar.passes.lower.partition.part_dataflow import PartDataflow


def submesh_graph(dataflow: PartDataflow, submesh: int) -> SubmeshGraph:
    """Join the parts of one submesh into one graph, whose ops are in the order of the step's.

    The hoist is left out: it runs on the whole batch, replicated on every device.
    """
    step = dataflow.step
    parts = [
        part
        for part in dataflow.parts
        if part.submesh == submesh and part.kind is not PartKind.HOIST
    ]
    # An op that several parts repeat is once in the graph, with the number of all its runs.
    runs: dict[int, int] = {}
    for part in parts:
        more = step.batching.microbatches if PartKey.of(part).is_looped else 1
        for i in part.equations:
            runs[i] = runs.get(i, 0) + more
    ops = tuple(step.ops[i].running(runs[i]) for i in sorted(runs))
    made = {r.name for op in ops for r in op.results}
    # Values between the parts of the submesh are inner values; inputs come from elsewhere.
    given = {i.value.name: i for part in parts for i in part.graph.inputs}
    ordered = sorted(given, key=lambda name: step.input_index.get(name, len(given)))
    inputs = [given[name] for name in ordered if name not in made]
    outputs, paths, donated = _outputs(dataflow, parts, [i.value.name for i in inputs])
    graph = Graph(f"{step.graph.name}.mesh{submesh}", tuple(inputs), ops, outputs, paths, donated)
    graph.verify()
    stashed = tuple(_stashed_values(dataflow, parts))
    return SubmeshGraph(
        submesh, graph, tuple(sorted(runs)), stashed, dataflow.final.get(submesh, frozenset())
    )


def _outputs(
    dataflow: PartDataflow, parts: Sequence[Part], inputs: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, int], ...]]:
    """The outputs of the submesh, their paths, and the state that they replace."""
    names: list[str] = []
    paths: list[str] = []
    donated: list[tuple[int, int]] = []
    for part in parts:
        summed = {a.value for a in part.accumulators}
        returns = {o: part.graph.inputs[i].value.name for o, i in part.graph.donated}
        for o, name in enumerate(map(str, part.graph.outputs)):
            # Only values that are sent or returned leave; an accumulator leaves by the part that
            # passes it on.
            if name in summed or name not in dataflow.final[part.submesh]:
                continue
            # New state replaces old; it is an output even if the value is one already.
            if o in returns:
                donated.append((len(names), inputs.index(returns[o])))
            elif name in names:
                continue
            names.append(name)
            paths.append(part.graph.output_paths[o] if part.graph.output_paths else "")
    return tuple(names), tuple(paths) if any(paths) else (), tuple(donated)


def _stashed_values(dataflow: PartDataflow, parts: Sequence[Part]) -> Iterator[str]:
    """The values of loops that wait on the submesh between two of its parts."""
    touched: dict[str, set[PartKey]] = {}
    for part in parts:
        key = PartKey.of(part)
        if not key.is_looped:
            continue
        summed = {a.value for a in part.accumulators}
        for name in (*map(str, part.graph.outputs), *(i.value.name for i in part.graph.inputs)):
            makers = dataflow.makers.plain.get(name, ())
            if name not in summed and any(maker.is_looped for maker in makers):
                touched.setdefault(name, set()).add(key)
    yield from (name for name, keys in touched.items() if len(keys) > 1)


# -- the plan of a part ----------------------------------------------------------------------


def part_plan(part: Part, joint: SubmeshGraph, plan: ShardingPlan) -> ShardingPlan:
    """Cut the sharding of one part out of that of its submesh.

    An input of the part has the sharding that the part which made it leaves; a hoist is replicated.
    """
    if part.kind is PartKind.HOIST:
        # Everything replicated, but for results that the other parts read sharded.
        hoist = {name: replicated(len(v.shape)) for name, v in part.graph.nested_values.items()}
        for output in map(str, part.graph.outputs):
            if output in plan.sharding_of:
                hoist[output] = plan.sharding_of[output]
        return replace(
            plan, values=tuple(hoist.items()), assignments=(), uses=(), shared_partials=()
        )
    inside = part.graph.nested_values
    values = {name: sharding for name, sharding in plan.values if name in inside}
    values.update((i.value.name, _incoming(part, i, joint, plan)) for i in part.graph.inputs)
    # Op paths begin with the number of the op: in the submesh's graph j, in the part's i.
    path_of = {joint.places[e]: i for i, e in enumerate(part.equations)}
    return replace(
        plan,
        values=tuple(values.items()),
        assignments=tuple(
            ((path_of[p[0]], *p[1:]), given) for p, given in plan.assignments if p[0] in path_of
        ),
        uses=tuple(use for use in plan.uses if use[0] in inside),
        shared_partials=tuple(
            ((path_of[p[0]], *p[1:]), operands)
            for p, operands in plan.shared_partials
            if p[0] in path_of
        ),
    )


def left_partial(part: Part, joint: SubmeshGraph) -> frozenset[str]:
    """The outputs of a part that may stay partial sums until another part reads them."""
    summed = frozenset(a.value for a in part.accumulators)
    return summed | (frozenset(map(str, part.graph.outputs)) - joint.final)


def _incoming(part: Part, given: Input, joint: SubmeshGraph, plan: ShardingPlan) -> Sharding:
    """The sharding of an input of a part: partial only if no other submesh reads the value."""
    name = given.value.name
    # What a remat gives back has the sharding of the value in its body, or of its operand.
    seen: Mapping[str, Sharding] = plan.sharding_of
    known = name
    while known not in seen and known in joint.graph.aliases:
        known = joint.graph.aliases[known]
    sharding = seen.get(known, replicated(len(given.value.shape)))
    # A value that leaves the submesh is combined where it is made, so all its readers find it
    # whole, but for a part that passes it on.
    if name in joint.final and name not in part.graph.outputs:
        return Sharding(sharding.dims)
    return sharding
