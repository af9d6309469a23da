"""The meaning of a plan, row by row: its axes, modules, ops, collectives, kernels and memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.memory import held_while
from autopar.cost.timeline import Seconds, Timed, sent
from autopar.inspecting.axes import axis_uses
from autopar.inspecting.flow import Flow, flows_of
from autopar.inspecting.homes import UPDATE, has_scopes, homes_of, parameters_of
from autopar.inspecting.loaded_plan import LoadedPlan
from autopar.ir.inspection import (
    IN_STEP,
    IN_UPDATE,
    INSPECTED,
    WHOLE_STEP,
    AxisRole,
    CommRow,
    InspectedPart,
    Inspection,
    KernelSpan,
    MemoryCurve,
    MemoryLevel,
    ModuleRow,
    OpRow,
)
from autopar.ir.listing import LocalOp, Loop, Move
from autopar.ir.paths import common_path, module_of, ranged_path, unnumbered
from autopar.ir.peak import HeldKind
from autopar.ir.plan import Plan, PlannedStage
from autopar.ir.program import Part
from autopar.ir.sharding import replicated
from autopar.ir.values import Role
from autopar.planner.placed_stages import PlacedStages
from autopar.schedule.grid import Kind
from autopar.schedule.planned import busiest_submesh, simulation_of
from autopar.schedule.simulate import Span

_MOST_LEVELS = 200


def memory_curves(loaded: LoadedPlan, flows: Sequence[Flow]) -> tuple[MemoryCurve, ...]:
    """The curve of each submesh; the highest level of all is the plan's predicted peak."""
    limit = loaded.plan.origin.memory_bytes
    if loaded.plan.is_one_program:
        return (MemoryCurve(0, _thinned(list(_levels(flows[0]))), limit),)
    levels = stage_levels(loaded.plan, loaded.placed, flows)
    return tuple(MemoryCurve(k, _thinned(held), limit) for k, held in enumerate(levels))


def _levels(flow: Flow) -> Iterator[MemoryLevel]:
    """Levels of one program: kernels in the order in which memory is counted.

    Each takes its work and what is waited for of its collectives; a loop's trips are one.
    """
    listed, timed = flow.listed, flow.timed
    spent = {kernel.makes[0]: s.total for _, kernel, s in timed.spent() if kernel.makes}
    held = list(held_while(listed.graph, listed.listing, flow.sizes, timed))
    taken = [spent.get(h.kernel.makes[0], 0.0) if h.kernel.makes else 0.0 for h in held]
    scale, now = timed.seconds.total / (sum(taken) or 1.0), 0.0
    for h, seconds in zip(held, taken, strict=True):
        yield level_of(
            now * scale, flow.label(h.kernel.instruction(h.block), h.kernel.part), h.by_kind
        )
        now += seconds


def _thinned(levels: list[MemoryLevel]) -> tuple[MemoryLevel, ...]:
    """The highest and the lowest of each short time, where there are many."""
    if len(levels) <= _MOST_LEVELS:
        return tuple(levels)
    bins = _MOST_LEVELS // 2
    whole = levels[-1].seconds or 1.0
    kept: dict[int, list[MemoryLevel]] = {}
    for level in levels:
        found = kept.setdefault(min(bins - 1, int(level.seconds / whole * bins)), [level, level])
        if level.nbytes > found[0].nbytes:
            found[0] = level
        if level.nbytes < found[1].nbytes:
            found[1] = level
    pairs = (sorted(found, key=lambda level: level.seconds) for found in kept.values())
    return tuple(dict.fromkeys(level for pair in pairs for level in pair))


# -- stages under a schedule -----------------------------------------------------------------------

_AT_END = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


def level_of(seconds: float, label: str, held: Counter[HeldKind]) -> MemoryLevel:
    """A level with its kinds in their order."""
    return MemoryLevel(seconds, label, tuple((kind, held[kind]) for kind in HeldKind if held[kind]))


def stage_levels(
    plan: Plan, placed: PlacedStages, flows: Sequence[Flow]
) -> Iterator[list[MemoryLevel]]:
    """By submesh, a level for each of its tasks and one for what it does once a step.

    What is in flight is held beside what is always held and the most that a part needs to work.
    """
    simulation = simulation_of(plan)
    for k, flight in enumerate(placed.in_flight):
        mine = [s for s in plan.stages if s.submesh == k]
        counted = flight * sum(s.activation_bytes for s in mine)
        always = _always(
            [(p, f) for p, f in zip(placed.parts, flows, strict=True) if p.submesh == k]
        )
        # What is set up once for all microbatches, and what the busiest part holds at work.
        always[HeldKind.TEMPORARY] = mine[0].peak_bytes - counted - always.total()
        yield list(_in_flight(simulation.spans[k], plan.stages, always, counted))


def _in_flight(
    spans: Sequence[Span], stages: Sequence[PlannedStage], always: Counter[HeldKind], counted: int
) -> Iterator[MemoryLevel]:
    """The levels of a submesh; at most, so much is in flight as the plan has `counted`."""
    # F adds the activations of its stage, B or W gives them back: the most is what was counted.
    held, now = list[int](), 0
    for span in spans:
        nbytes = stages[span.task.stage].activation_bytes
        now += nbytes if span.task.kind is Kind.FORWARD else 0
        held.append(now)
        now -= nbytes if span.task.kind in _AT_END else 0
    most = max(1, *held)
    for span, nbytes in zip(spans, held, strict=True):
        activations = Counter({HeldKind.ACTIVATION: nbytes * counted // most})
        yield level_of(span.start_seconds, str(span.task), always + activations)
    yield level_of(spans[-1].end_seconds, "update", always)


def _always(parts: Sequence[tuple[Part, Flow]]) -> Counter[HeldKind]:
    """Bytes of arguments and of sums over microbatches on a device of a submesh, by kind."""
    trained = {path for _, flow in parts for path in flow.read_before_update}
    found: dict[str, tuple[HeldKind, int]] = {}
    for part, flow in parts:
        listed, sizes = flow.listed, flow.sizes
        sharding_of = listed.sharding.sharding_of
        given = sizes.inputs(listed.listing)
        for i in listed.graph.inputs:
            if i.path and i.role is not Role.BATCH:
                kind = HeldKind.PARAMETER if i.path in trained else HeldKind.OPTIMIZER
                kind = kind if i.role is Role.STATE else HeldKind.CONSTANT
                found[i.path] = kind, given[i.value.name]
        for a in part.accumulators:
            value = listed.graph.values[a.value]
            sharding = sharding_of.get(a.value, replicated(len(value.shape)))
            nbytes = sizes.of(replace(value, dtype=a.dtype or value.dtype), sharding)
            found[a.value] = HeldKind.GRADIENT, nbytes
    totals = Counter[HeldKind]()
    for kind, nbytes in found.values():
        totals[kind] += nbytes
    return totals


def inspect(loaded: LoadedPlan, parts: Sequence[InspectedPart] = INSPECTED) -> Inspection:
    """A plan read closely: nothing is solved, and every figure is of the predictions' models.

    Only the `parts` that are asked for are filled.
    """
    plan, wanted = loaded.plan, frozenset(parts)
    flows = flows_of(loaded.listings)
    in_axes = axis_uses(loaded.batching.graph, flows) if wanted & {"axes", "collectives"} else ()
    roles = {(use.submesh, use.axis): use.roles for use in in_axes}
    if wanted - {"axes"} and not has_scopes(flows):
        homes = homes_of(flows)
        for flow in flows:
            flow.homes.update(homes)
    ops = [op for flow in flows for op in ops_of(flow)] if wanted & {"ops", "modules"} else []
    in_spans = "spans" in wanted and plan.is_one_program
    return Inspection(
        meshes=tuple(s.mesh for s in plan.submeshes),
        axes=in_axes,
        modules=module_rows(flows, ops) if "modules" in wanted else (),
        ops=op_rows(ops) if "ops" in wanted else (),
        collectives=comm_rows(flows, roles) if "collectives" in wanted else (),
        spans=kernel_spans(flows[0]) if in_spans else (),
        memory=memory_curves(loaded, flows) if "memory" in wanted else (),
        busiest=busiest_submesh(plan),
    )


# -- modules ---------------------------------------------------------------------------------------


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
    `ops` are those of the listings, each by itself, with their modules. What is in none is a row
    of its own, and so is the update.
    """
    # 1. The work of every op, for each module around it.
    modules: dict[str, _Module] = {}
    for op in ops:
        none = IN_UPDATE if op.spot.region == UPDATE else IN_STEP
        for path in _around(op.spot.module or none):
            module = modules.setdefault(path, _Module())
            module.ops += 1
            module.flops += op.flops
            module.seconds += op.seconds
            module.stages.add(op.spot.stage)
    # 2. The bytes of each parameter, once, for the module that reads it first.
    seen: set[str] = set()
    has_modules = has_scopes(flows)
    for given, reader in parameters_of(flows):
        if given.path in seen:
            continue
        seen.add(given.path)
        home = reader.module or IN_STEP if has_modules else module_of(given.path)
        for path in _around(home):
            modules.setdefault(path, _Module()).parameter_bytes += given.value.nbytes
    # 3. Modules that are alike but for numbers in their paths, as one row.
    groups: dict[tuple[object, ...], list[str]] = {}
    for path, module in modules.items():
        stages = tuple(sorted(module.stages))
        key = unnumbered(path), module.flops, module.parameter_bytes, stages
        groups.setdefault(key, []).append(path)
    named = any(path not in ("", IN_STEP, IN_UPDATE) for path in modules)
    return tuple(
        _row(paths, [modules[p] for p in paths])
        for paths in groups.values()
        if named or paths[0] == ""
    )


def _around(path: str) -> Iterator[str]:
    """The step, then every module that a path leads through, the whole path last."""
    yield ""
    for end, letter in enumerate(path):
        if letter == "/":
            yield path[:end]
    if path:
        yield path


def _row(paths: Sequence[str], modules: Sequence[_Module]) -> ModuleRow:
    return ModuleRow(
        path=ranged_path(paths),
        depth=paths[0].count("/") + 1 if paths[0] else 0,
        count=len(paths),
        ops=sum(m.ops for m in modules),
        flops=sum(m.flops for m in modules),
        parameter_bytes=sum(m.parameter_bytes for m in modules),
        seconds=sum(m.seconds for m in modules),
        stages=tuple(sorted({s for m in modules for s in m.stages} - {WHOLE_STEP})),
    )


# -- ops -------------------------------------------------------------------------------------------

_Key = tuple[object, ...]


def op_rows(ops: Sequence[OpRow]) -> tuple[OpRow, ...]:
    """Ops by themselves as rows of those that are alike, in the order in which they first run."""
    groups: dict[_Key, list[OpRow]] = {}
    for row in ops:
        spot = replace(row.spot, module=unnumbered(row.spot.module))
        key = (row.kind, spot, row.shape, row.dtype, row.sharding, row.operands)
        groups.setdefault(key, []).append(row)
    return tuple(
        replace(
            first,
            spot=replace(first.spot, module=common_path([row.spot.module for row in rows])),
            count=len(rows),
            runs=sum(row.runs for row in rows),
            flops=sum(row.flops for row in rows),
            seconds=sum(row.seconds for row in rows),
        )
        for rows in groups.values()
        for first in rows[:1]
    )


def ops_of(flow: Flow) -> Iterator[OpRow]:
    """The ops of a listing, each by itself.

    A loop's own row counts neither FLOPs nor seconds of what is in it, which has rows of its own.
    """
    listed = flow.listed
    spent, mesh = _spent(flow), listed.sharding.mesh
    types = {name: v.type_text for name, v in listed.graph.nested_values.items()}
    for step, runs in flow.steps:
        if not isinstance(step, LocalOp | Loop) or not step.results:
            continue
        op = flow.op(step)
        value, sharding = op.results[0], step.result_shardings[0]
        shardings = step.operand_shardings if isinstance(step, LocalOp) else ()
        yield OpRow(
            path=step.equation,
            kind=op.kind,
            spot=flow.spot(step),
            value=value.name,
            shape=value.shape,
            dtype=value.dtype,
            sharding=sharding,
            local_shape=sharding.shard_shape(value.shape, mesh),
            operands=tuple(
                (types[o], s)
                for o, s in zip(op.operands, shardings, strict=False)
                if isinstance(o, str)
            ),
            count=1,
            runs=runs,
            flops=op.flops * runs if isinstance(step, LocalOp) else 0,
            seconds=spent.get(step.results, 0.0) * listed.runs,
        )


def _spent(flow: Flow) -> dict[tuple[str, ...], float]:
    """Seconds of work by the results of the instruction that a kernel is named after.

    What is fused into it is part of it. Copies and slices that are no ops count to the op or loop
    that reads them; of what is only returned, to the op behind it.
    """
    found = defaultdict[tuple[str, ...], float](float)
    behind: dict[str, tuple[str, ...]] = {}  # by piece, the results of the op that it comes from
    waiting: dict[str, float] = {}  # by piece, what it took to copy it
    for block, kernel, seconds in flow.timed.spent():
        # A kernel also pays for the copies that it reads; if it is a copy itself, it waits.
        step = kernel.instruction(block)
        reads = sorted(kernel.reads)
        taken = seconds.compute + sum(waiting.pop(r) for r in reads if r in waiting)
        home = next((behind[r] for r in reads if r in behind), ())
        if isinstance(step, LocalOp):
            home = step.results
            found[home] += taken
        elif taken:
            waiting[kernel.makes[0]] = taken
        behind.update(dict.fromkeys(kernel.makes, home))
    # Copies that no kernel reads: a loop's, or what is only returned.
    for name, taken in waiting.items():
        reader = flow.readers.get(name)
        found[reader.results if reader is not None else behind[name]] += taken
    return found


# -- collectives -----------------------------------------------------------------------------------

Roles = Mapping[tuple[int, str], tuple[AxisRole, ...]]  # of an axis of a submesh


def comm_rows(flows: Sequence[Flow], roles: Roles) -> tuple[CommRow, ...]:
    """The collectives, those that are alike in one row, the costliest first.

    That is the order in which the terminal, the page and JSON list them. Seconds are as they are
    timed: neighbors that run as one share what that takes by their bytes.
    """
    groups: dict[tuple[object, ...], list[CommRow]] = {}
    for flow in flows:
        for row in comms_of(flow, roles):
            spot = replace(row.spot, module=unnumbered(row.spot.module))
            moved = unnumbered(row.value), row.shape, row.dtype, row.before, row.after, row.nbytes
            key = row.kind, row.axes, row.submesh, spot, row.reader, moved
            groups.setdefault(key, []).append(row)
    found: list[CommRow] = []
    for rows in groups.values():
        first, members = rows[0], tuple(dict.fromkeys(row.value for row in rows))
        found.append(
            replace(
                first,
                spot=replace(first.spot, module=common_path([row.spot.module for row in rows])),
                value=common_path(members),
                runs=sum(row.runs for row in rows),
                seconds=sum(row.seconds for row in rows),
                exposed_seconds=sum(row.exposed_seconds for row in rows),
                members=members,
            )
        )
    return tuple(sorted(found, key=lambda row: (-row.seconds, -row.total_bytes)))


def comms_of(flow: Flow, roles: Roles) -> Iterator[CommRow]:
    """The collectives of a listing, each by itself."""
    listed = flow.listed
    spent = {(move.result, j): seconds for move, j, seconds in sent(flow.timed)}
    for move, runs in flow.steps:
        if not isinstance(move, Move):
            continue
        reader = flow.reader(move.result)
        for j, made in enumerate(move.collectives):
            seconds = spent.get((move.result, j), Seconds())
            subject = flow.subject(move.source)
            yield CommRow(
                kind=made.kind,
                axes=made.axes,
                roles=tuple(
                    dict.fromkeys(r for a in made.axes for r in roles.get((listed.submesh, a), ()))
                ),
                submesh=listed.submesh,
                spot=flow.spot(move),
                value=subject,
                shape=move.value.shape,
                dtype=move.value.dtype,
                before=move.before,
                after=move.after,
                reader=reader.kind if reader is not None else "",
                nbytes=made.nbytes,
                runs=runs,
                seconds=seconds.communication * listed.runs,
                exposed_seconds=seconds.exposed * listed.runs,
                members=(subject,),
            )


# -- kernels in time -------------------------------------------------------------------------------

_MOST_SPANS = 2000
_MOST_OF_A_LOOP = 200_000


def kernel_spans(flow: Flow, most: int = _MOST_SPANS) -> tuple[KernelSpan, ...]:
    """The kernels of a listing by their start, short neighbors merged until there are few.

    They end where the last kernel does. A share of what runs beside another trip of a loop is
    waited for after all (see `autopar.cost.timeline`): that is in the step's seconds alone.
    """
    spans = sorted(_spans(flow, flow.timed, 0.0), key=lambda s: (s.start_seconds, s.stream))
    short = max((s.end_seconds for s in spans), default=0.0) / most
    while len(spans) > most:
        spans = _merged(spans, short)
        short *= 2
    return tuple(spans)


def _spans(flow: Flow, timed: Timed, begin: float) -> Iterator[KernelSpan]:
    """The kernels of a block that begins then, loops trip by trip where that is not too much."""
    streams = timed.streams
    for k, (kernel, (start, end)) in enumerate(zip(timed.kernels, streams.spans, strict=True)):
        if start == end:
            continue
        step = kernel.instruction(timed.block)
        if isinstance(step, Loop) and _count_trips(timed, k) <= _MOST_OF_A_LOOP:
            now = begin + start
            for trips in timed.bodies[k]:
                for _ in range(trips.runs):
                    yield from _spans(flow, trips.timed, now)
                    now += trips.timed.seconds.total
            continue
        label = flow.label(step, kernel.part)
        if isinstance(step, Move) and len(kernel.makes) > 1:
            label += f" and {len(kernel.makes) - 1} more"
        # A collective that nothing may run beside is waited for, though it stands among the work.
        is_sent = isinstance(step, Move) and bool(step.collectives)
        stream = "wires" if is_sent else "work"
        yield KernelSpan(stream, begin + start, begin + end, label, flow.spot(step))


def _count(timed: Timed) -> int:
    """The number of spans of a block, loops trip by trip."""
    return len(timed.kernels) + sum(_count_trips(timed, k) for k in timed.bodies)


def _count_trips(timed: Timed, k: int) -> int:
    """The number of spans of all trips of the loop that a kernel is."""
    return sum(trips.runs * _count(trips.timed) for trips in timed.bodies[k])


def _merged(spans: Sequence[KernelSpan], short: float) -> list[KernelSpan]:
    """Spans of a stream that follow each other within a `short` time, as one."""
    done: list[KernelSpan] = []
    for stream in ("work", "wires"):
        group: list[KernelSpan] = []
        for span in (s for s in spans if s.stream == stream):
            if group and span.end_seconds - group[0].start_seconds > short:
                done.append(_one(group))
                group = []
            group.append(span)
        if group:
            done.append(_one(group))
    return sorted(done, key=lambda s: (s.start_seconds, s.stream))


def _one(group: Sequence[KernelSpan]) -> KernelSpan:
    longest = max(group, key=lambda s: s.end_seconds - s.start_seconds)
    label = longest.label if len(group) == 1 else f"{longest.label.split(' + ')[0]} + others"
    return replace(
        longest,
        start_seconds=group[0].start_seconds,
        end_seconds=group[-1].end_seconds,
        label=label,
    )
