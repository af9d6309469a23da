"""A step planned together with functions of its state, each weighted by how often it runs.

    one graph     ops of evaluate (runs 1), then ops of train (runs 10), the state their inputs
    one solve     the sharding of the state that is cheapest for all of it, on each mesh
    candidates    train planned on its own, and with the state pinned so; each function beside it
    score         seconds of train + sum of weight x seconds of each function

The step planned on its own is a candidate, so no family is slower than it by the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph, Op, Operand
from autopar.ir.sharding import MeshShape
from autopar.ir.values import Input, Value
from autopar.passes.base import Pins
from autopar.planner.companion import shared_state, with_shared_state
from autopar.planner.memory_fit import MeshContext, StepOnMesh
from autopar.planner.planned import Planned
from autopar.planner.remat import Form
from autopar.planner.request import Request
from autopar.planner.sliced_step import Member, Source

_FINEST = 100  # the largest denominator of a weight
_NO_GAIN = 1e-9

Plan = Callable[[Source, Request], Planned]


def plan_family(
    source: Source, request: Request, meshes: Sequence[MeshShape], plan: Plan
) -> Planned:
    """The plan of the step with which its family takes the fewest seconds; raises as `plan`."""
    family, alone = source.family, replace(source, family=())
    best = plan(alone, request)
    least = _score(best, family, plan)
    joint = Form(None, _joint_graph(best, family))
    for mesh in meshes:
        context = MeshContext.of(mesh, request)
        with suppress(InfeasibleError):
            step = StepOnMesh(context, joint)
            solved = step.cheapest(request.budget_bytes).sharding.sharding_of
            state = {i.value.name: i.path for i in best.source.plain.graph.inputs}
            shared: Pins = tuple(
                (state[name], solved[name].dims)
                for name in _shared_names(best, family)
                if name in solved
            )
            pinned = replace(request, mesh=mesh, pins=(*shared, *request.pins))
            found = plan(alone, pinned)
            score = _score(found, family, plan)
            if score < least * (1 - _NO_GAIN):
                best, least = found, score
    # The pins were the family's and not the user's.
    origin = replace(best.plan.origin, pins=request.pins)
    return replace(best, request=request, plan=replace(best.plan, origin=origin))


def _score(planned: Planned, family: Sequence[Member], plan: Plan) -> float:
    """Seconds of a step and of the share of its family that runs with it."""
    seconds = planned.plan.prediction.seconds
    beside = Request(
        planned.request.cluster,
        planned.plan.mesh,
        memory_bytes=planned.request.memory_bytes,
        rules=planned.request.rules,
        beside=planned.plan,
    )
    for member in family:
        source = with_shared_state(member.source, planned.plan)
        seconds += member.weight * plan(source, beside).plan.prediction.seconds
    return seconds


# -- one graph -----------------------------------------------------------------------------------


def _shared_names(planned: Planned, family: Sequence[Member]) -> list[str]:
    """The inputs of the step that a member of the family takes too."""
    names = {i.path: i.value.name for i in planned.source.plain.graph.inputs}
    found = [shared_state(m.source.plain.graph, planned.plan) for m in family]
    return list(dict.fromkeys(names[a.path] for shared in found for a in shared.values()))


def _joint_graph(planned: Planned, family: Sequence[Member]) -> Graph:
    """The step's graph with the ops of its family before its own, every op with its runs.

    The family comes first, as the step's new state may take over the memory of the old.
    """
    step = planned.source.plain.graph
    shares = [Fraction(m.weight).limit_denominator(_FINEST) for m in family]
    often = math.lcm(*(s.denominator for s in shares))
    names = {i.path: i.value.name for i in step.inputs}
    inputs, ops, outputs = [*step.inputs], list[Op](), [*step.outputs]
    for number, (member, share) in enumerate(zip(family, shares, strict=True)):
        graph = member.source.plain.graph
        shared = shared_state(graph, planned.plan)
        own = _Names(f"m{number}.", {
            i.value.name: names[shared[i.path].path] for i in graph.inputs if i.path in shared
        })  # fmt: skip
        inputs += [own.input(i) for i in graph.inputs if i.path not in shared]
        ops += own.ops(graph, max(1, int(share * often)))
        outputs += map(own.operand, graph.outputs)
    ops += [replace(op, runs=op.runs * often) for op in step.ops]
    joint = Graph(step.name, tuple(inputs), tuple(ops), tuple(outputs), (), step.donated)
    joint.verify()
    return joint


class _Names:
    """Renames the values of a graph, but for those that another graph has too."""

    def __init__(self, prefix: str, shared: Mapping[str, str]) -> None:
        self._prefix, self._shared = prefix, shared

    def name(self, name: str) -> str:
        """The new name of a value."""
        return self._shared.get(name, f"%{self._prefix}{name.removeprefix('%')}")

    def operand(self, operand: Operand) -> Operand:
        """An operand by its new name; a literal as it is."""
        return self.name(operand) if isinstance(operand, str) else operand

    def value(self, value: Value) -> Value:
        """A value by its new name."""
        return replace(value, name=self.name(value.name))

    def input(self, given: Input) -> Input:
        """An input by its new name, with a path that the step's pins do not mean."""
        return replace(given, value=self.value(given.value), path=f"{self._prefix}{given.path}")

    def ops(self, graph: Graph, runs: int = 1) -> Iterator[Op]:
        """The ops of a graph, each run so many times."""
        for op in graph.ops:
            yield replace(
                op,
                operands=tuple(map(self.operand, op.operands)),
                results=tuple(map(self.value, op.results)),
                graphs=tuple(map(self._body, op.graphs)),
                runs=op.runs * runs,
            )

    def _body(self, body: Graph) -> Graph:
        return replace(
            body,
            inputs=tuple(replace(i, value=self.value(i.value)) for i in body.inputs),
            ops=tuple(self.ops(body)),
            outputs=tuple(map(self.operand, body.outputs)),
        )
