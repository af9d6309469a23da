"""Analysis of a step before it is cut: the loop, home, makers and readers of every op.

`assign_loops` gives every op its loop; `StepAnalysis` answers the questions of all later steps of
the cut. Ops are numbered as in the graph; a stage is NOWHERE for an op that joins several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.errors import GraphError
from autopar.ir.batching import Batching, Moment, When, moments_of_one
from autopar.ir.graph import Graph, Op
from autopar.ir.stages import Remat, StagePlan
from autopar.ir.values import Input, Role
from autopar.schedule.grid import Grid
from autopar.schedule.table import (
    Schedule,
    check_numbers,
    make_grid,
    schedule_named,
    stage_devices,
)

NOWHERE = -1  # the stage of an op that runs wherever it is read
# An op is repeated in every part that reads it, instead of keeping its result, if the result has
# more bytes than this, and more than so many times its sources, at so few FLOPs an item.
_KEPT_BYTES, _EXPANSION, _CHEAP = 65536, 4, 16


@dataclass(frozen=True)
class StepAnalysis:
    """A batched step on its stages, with look-up tables."""

    batching: Batching
    stages: StagePlan

    @classmethod
    def of(cls, batching: Batching, stages: StagePlan) -> StepAnalysis:
        """Analyse a step; raises GraphError if the stages do not fit their schedule."""
        step = cls(assign_loops(batching), stages)
        stages.verify()
        # The schedule must put the stages where they are, and be exact.
        schedule, chunks = step.schedule, stages.chunks
        check_numbers(schedule, len(stages.submeshes), batching.microbatches, chunks)
        submeshes = tuple(s.submesh for s in stages.stages)
        wanted = stage_devices(schedule.name, len(stages.submeshes), chunks)
        if submeshes != wanted:
            raise GraphError(
                f"stages on submeshes {submeshes} do not suit {schedule.name}, which puts them "
                f"on {wanted}"
            )
        if step.batching.barrier and not schedule.allows_barrier:
            raise GraphError(
                f"the step needs all forwards before all backwards, and {schedule.name} mixes "
                "them; take gpipe, or looped-bfs with several stages a submesh"
            )
        return step

    def recomputing(self, remat: Remat) -> StepAnalysis:
        """The same step where every stage recomputes so: no table depends on that."""
        stages = tuple(replace(s, remat=remat) for s in self.stages.stages)
        step = replace(self, stages=replace(self.stages, stages=stages))
        vars(step).update({k: v for k, v in vars(self).items() if k not in vars(step)})
        return step

    @property
    def schedule(self) -> Schedule:
        """The schedule of the stages; without one each microbatch runs to its end."""
        return _schedule_of(self.stages)

    # -- the graph -------------------------------------------------------------------------

    @cached_property
    def graph(self) -> Graph:
        """The graph of one microbatch."""
        return self.batching.graph

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Its ops."""
        return self.graph.ops

    @cached_property
    def given(self) -> Mapping[str, Input]:
        """Input name -> the graph's input."""
        return {i.value.name: i for i in self.graph.inputs}

    @cached_property
    def hoisted(self) -> frozenset[str]:
        """Values that are computed on the whole batch, whatever op of the graph makes them."""
        return frozenset(self.batching.hoist.values if self.batching.hoist is not None else ())

    @cached_property
    def maker(self) -> Mapping[str, int]:
        """Value name -> the op that makes it."""
        return {
            r.name: i
            for i, op in enumerate(self.ops)
            for r in op.results
            if r.name not in self.hoisted
        }

    @cached_property
    def live(self) -> tuple[bool, ...]:
        """True for ops that an output of the step needs, or that call Python."""
        needed = {o for o in self.graph.outputs if isinstance(o, str)}
        live = [False] * len(self.ops)
        for i in reversed(range(len(self.ops))):
            op = self.ops[i]
            made = [r.name for r in op.results if r.name not in self.hoisted]
            live[i] = op.acts or not needed.isdisjoint(made)
            if live[i]:
                needed.update(op.value_operands)
        return tuple(live)

    def when(self, i: int) -> When:
        """The frequency of an op: free, once a microbatch, or once."""
        return self.batching.moments[i].when

    def loops(self, i: int) -> tuple[int, ...]:
        """The loops of an op, or the one that it follows."""
        return self.batching.moments[i].loops

    def has_rows(self, name: str) -> bool:
        """True if each microbatch has a value of that name for itself."""
        if name in self.given:
            return self.given[name].role is Role.BATCH
        return name in self.maker and self.when(self.maker[name]) is When.LOOP

    @cached_property
    def leaving(self) -> frozenset[str]:
        """Values that are accumulated or returned."""
        outputs = (o for o in self.graph.outputs if isinstance(o, str))
        return frozenset([*outputs, *self.batching.accumulator_of])

    # -- ops that every part repeats for itself --------------------------------------------

    @cached_property
    def loop_reads(self) -> tuple[bool, ...]:
        """True for ops that run in a loop, and for free ops that these read, also indirectly."""
        read: set[str] = set()
        found = [False] * len(self.ops)
        for i in reversed(range(len(self.ops))):
            op, when = self.ops[i], self.when(i)
            found[i] = self.live[i] and (
                when is When.LOOP or (when is When.FREE and any(r.name in read for r in op.results))
            )
            if found[i]:
                read.update(op.value_operands)
        return tuple(found)

    @cached_property
    def is_repeated(self) -> tuple[bool, ...]:
        """True for ops that each part which reads them runs itself, as that costs less.

        These are rematerializable ops, free ops that only expand, and loop ops of no stage that
        need nothing of any stage.
        """
        found = [False] * len(self.ops)
        source_bytes: dict[str, int] = {}

        def sources(op: Op) -> int:
            """Bytes at the ends of a chain of repeated ops: what it takes to run them again."""
            read, values = set(op.value_operands), self.graph.values
            return sum(source_bytes[n] if n in source_bytes else values[n].nbytes for n in read)

        for i, op in enumerate(self.ops):
            if not self.live[i] or not op.results or op.graphs or op.host_calls:
                continue
            if any(r.name in self.leaving for r in op.results):
                continue
            when, repeated = self.when(i), op.rule is not None and op.rule.on_demand
            # A free op of a loop that only expands: a mask of positions, zeros.
            if when is When.FREE and self.loop_reads[i]:
                made = sum(r.nbytes for r in op.results)
                items = sum(r.item_count for r in op.results)
                expands = made > max(_KEPT_BYTES, _EXPANSION * sources(op))
                repeated = repeated or (expands and op.flops <= _CHEAP * items)
            # A loop op of no stage, made of nothing that a stage makes.
            elif when is When.LOOP and self.home[i] == NOWHERE:
                makers = [self.maker[n] for n in op.value_operands if n in self.maker]
                adrift = all(found[j] or self.when(j) is not When.LOOP for j in makers)
                repeated = repeated or adrift
            found[i] = repeated
            if repeated:
                source_bytes.update(dict.fromkeys((r.name for r in op.results), sources(op)))
        return tuple(found)

    @cached_property
    def reads(self) -> tuple[tuple[str, ...], ...]:
        """The values that each op reads of other parts, looking through ops that are repeated."""
        found: list[tuple[str, ...]] = []
        for op in self.ops:
            names: list[str] = []
            for name in op.value_operands:
                j = self.maker.get(name, -1)
                # An operand that this part makes for itself is as good as its own operands.
                names += found[j] if j >= 0 and self.is_repeated[j] else (name,)
            found.append(tuple(dict.fromkeys(names)))
        return tuple(found)

    @cached_property
    def placed(self) -> tuple[int, ...]:
        """The ops that belong to one part, in order: all that are live and not repeated."""
        flags = zip(self.live, self.is_repeated, strict=True)
        return tuple([i for i, (live, repeated) in enumerate(flags) if live and not repeated])

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The placed ops that read each op."""
        found: list[list[int]] = [[] for _ in self.ops]
        for i in self.placed:
            for j in dict.fromkeys(self.maker[n] for n in self.reads[i] if n in self.maker):
                found[j].append(i)
        return tuple(map(tuple, found))

    # -- stages and submeshes --------------------------------------------------------------

    @cached_property
    def _stage_of_layer(self) -> tuple[int, ...]:
        return tuple(
            s
            for s, stage in enumerate(self.stages.stages)
            for _ in range(stage.first, stage.last + 1)
        )

    @cached_property
    def home(self) -> tuple[int, ...]:
        """The stage of each op; NOWHERE for one that runs where it is read."""
        homes = self.stages.layers.homes
        # The layer pass says where every op belongs; without it, layers are runs of ops.
        if homes:
            return tuple(self._stage_of_layer[h] if h >= 0 else NOWHERE for h in homes)
        layers = zip(self._stage_of_layer, self.stages.layers.layers, strict=True)
        found = [s for s, layer in layers for _ in range(layer.op_count)]
        return tuple(found + [0] * (len(self.ops) - len(found)))

    def submesh(self, stage: int) -> int:
        """The submesh of a stage."""
        return self.stages.stages[stage].submesh

    @cached_property
    def first_stage(self) -> tuple[int, ...]:
        """The first stage on each submesh."""
        found = [s.submesh for s in self.stages.stages]
        return tuple(found.index(u) for u in range(len(self.stages.submeshes)))

    def input_stage(self, name: str) -> int:
        """The first stage that needs a graph input; 0 for one that no layer needs."""
        homes = self.stages.layers.input_homes
        needed = homes[self.input_index[name]] if homes else ()
        return self._stage_of_layer[needed[0]] if needed else 0

    @cached_property
    def input_index(self) -> Mapping[str, int]:
        """Input name -> its number."""
        return {i.value.name: n for n, i in enumerate(self.graph.inputs)}

    def state_home(self, name: str) -> int:
        """The submesh on which a state input lives; -1 for an input that is no state."""
        given = self.given.get(name)
        if given is None or given.role is not Role.STATE:
            return -1
        return self.submesh(self.input_stage(name))

    @cached_property
    def return_home(self) -> Mapping[int, int]:
        """Output number -> the submesh of the state that it becomes."""
        names = [i.value.name for i in self.graph.inputs]
        return {o: self.state_home(names[i]) for o, i in self.graph.donated}

    def is_kept(self, output: int) -> bool:
        """True if an output is an input that comes back as it is, so that no part returns it."""
        name = self.graph.outputs[output]
        if not isinstance(name, str) or name not in self.given:
            return False
        is_same = (output, self.input_index[name]) in self.graph.donated
        return is_same or name in self.batching.rows_of


def grid_of(stages: StagePlan, microbatches: int) -> Grid:
    """The grid of a stage plan."""
    name = _schedule_of(stages).name
    return make_grid(name, len(stages.submeshes), microbatches, stages.chunks)


def _schedule_of(stages: StagePlan) -> Schedule:
    return schedule_named("serial" if stages.schedule == "none" else stages.schedule)


# -- loops -----------------------------------------------------------------------------------


def assign_loops(batching: Batching) -> Batching:
    """Give every op of a batching the loop in which its stages can run it.

    With several microbatches the batch pass has found the loops. Two cases are left:

    - One microbatch: nothing is accumulated, and there are the loops of `moments_of_one`.

    - A barrier between all forwards and all backwards: all backward ops are in loop 1, also those
      that could run in loop 0.
    """
    if batching.microbatches == 1:
        batching = replace(batching, accumulators=(), barrier=False)
        moments = moments_of_one(batching.graph)
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


def _behind_barrier(batching: Batching) -> tuple[Moment, ...]:
    """Put backward ops in loop 1, and ops that run once after the last loop that they read."""
    moments: list[Moment] = []
    end: dict[str, int] = {}
    for op, moment in zip(batching.graph.ops, batching.moments, strict=True):
        # All backwards wait for all forwards, so that they are a loop of their own.
        if moment.when is When.LOOP and op.origin.region == "backward":
            moment = Moment(When.LOOP, (1,))
        elif moment.when is When.ONCE:
            reads = op.value_operands
            moment = Moment(When.ONCE, (max([*moment.loops, *(end.get(n, 0) for n in reads)]),))
        if moment.loops:
            end.update((r.name, moment.loops[-1]) for r in op.results)
        moments.append(moment)
    return tuple(moments)
