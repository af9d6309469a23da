"""When every op of a step runs, as its stages need to know it."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.batching import FREE, Batching, Moment, When
from autopar.ir.graph import Graph, Op
from autopar.ir.values import Role


def timed(batching: Batching) -> Batching:
    """The same batching with a moment for every op, in the loop in which its stages can run it.

    With one microbatch nothing is accumulated, and every step can run: what reads the batch is in a
    loop, but for updates; a forward op that reads what a backward op or an update made begins
    another loop. Behind a barrier all backward ops are in the second loop, also those that could
    run in the first.
    """
    if batching.microbatches == 1:
        batching = replace(batching, accumulators=(), barrier=False)
        moments = _moments_of_whole(batching.graph)
    elif batching.barrier:
        moments = _behind_barrier(batching)
    else:
        return batching
    loops_of = {
        r.name: moment.loops
        for op, moment in zip(batching.graph.ops, moments, strict=True)
        for r in op.results
    }
    return replace(
        batching,
        moments=moments,
        loops=1 + max((m.loops[-1] for m in moments if m.loops), default=0),
        accumulators=tuple(
            a if a.loop in loops_of[a.value] else replace(a, loop=loops_of[a.value][-1])
            for a in batching.accumulators
        ),
    )


def _moments_of_whole(graph: Graph) -> tuple[Moment, ...]:
    moments: list[Moment] = []
    fresh = {i.value.name for i in graph.inputs if i.role is Role.BATCH}
    made: dict[str, tuple[Moment, bool]] = {}  # and whether a new loop must read it
    for op in graph.ops:
        reads = op.value_operands()
        read = [made[n] for n in reads if n in made]
        if not read and fresh.isdisjoint(reads):
            moments.append(FREE)
            continue
        moment, late = _moment_in_whole(op, read)
        moments.append(moment)
        made.update((r.name, (moment, late)) for r in op.results)
    return tuple(moments)


def _moment_in_whole(op: Op, read: list[tuple[Moment, bool]]) -> tuple[Moment, bool]:
    """The moment of an op of a whole step, and whether it is past its loop's forward pass."""
    loop = max((m.loops[0] for m, _ in read), default=0)
    latest = [(m, late) for m, late in read if m.loops[0] == loop]
    region = op.origin.region
    if region == "update":
        return Moment(When.ONCE, (loop,)), True
    begun_again = any(m.when is When.ONCE or (late and region == "forward") for m, late in latest)
    return Moment(When.LOOP, (loop + begun_again,)), region == "backward"


def _behind_barrier(batching: Batching) -> tuple[Moment, ...]:
    """Backward ops in loop 1, and what runs once after the last loop that it reads."""
    moments: list[Moment] = []
    end: dict[str, int] = {}
    for op, moment in zip(batching.graph.ops, batching.moments, strict=True):
        if moment.when is When.LOOP and op.origin.region == "backward":
            moment = Moment(When.LOOP, (1,))
        elif moment.when is When.ONCE:
            reads = op.value_operands()
            moment = Moment(When.ONCE, (max([*moment.loops, *(end.get(n, 0) for n in reads)]),))
        if moment.loops:
            end.update((r.name, moment.loops[-1]) for r in op.results)
        moments.append(moment)
    return tuple(moments)
