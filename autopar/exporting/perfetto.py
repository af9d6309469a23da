"""A plan's predicted step as a trace in Chrome's form, which Perfetto and chrome://tracing draw.

one program   a device's two streams: work, and wires (collectives)
stages        a track for each submesh: F0.0 F0.1 B0.0 ..., then what comes once a step
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from autopar.inspecting.inspect import inspect
from autopar.inspecting.loaded_plan import reopen
from autopar.ir.codec import Json
from autopar.ir.plan import Plan
from autopar.schedule.planned import once_seconds_of, simulation_of

_MICROSECONDS = 1e6  # the unit of such traces

Span = tuple[str, str, float, float, dict[str, Json]]  # track, name, start, end, what else is known


def perfetto_trace(plan: Plan) -> str:
    """The trace as JSON; raises PlanError where the plan keeps no step."""
    spans = list(_kernels(plan) if plan.is_one_program else _tasks(plan))
    tracks = {name: number for number, name in enumerate(dict.fromkeys(s[0] for s in spans))}
    title = f"{plan.origin.step} on {plan.origin.cluster_name}, predicted"
    events: list[Json] = [_named("process_name", 0, title)]
    events += [_named("thread_name", number, name) for name, number in tracks.items()]
    for track, name, start, end, known in spans:
        event: dict[str, Json] = {
            "ph": "X", "name": name, "cat": "predicted", "pid": 0, "tid": tracks[track],
            "ts": start * _MICROSECONDS, "dur": (end - start) * _MICROSECONDS, "args": known,
        }  # fmt: skip
        events.append(event)
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"traceEvents": [\n{lines}\n], "displayTimeUnit": "ms"}}\n'


def _named(what: str, track: int, name: str) -> Json:
    return {"ph": "M", "name": what, "pid": 0, "tid": track, "args": {"name": name}}


def _kernels(plan: Plan) -> Iterator[Span]:
    """The kernels of one device, each with the module and the line that it is of."""
    for span in inspect(reopen(plan), ("spans",)).spans:
        known: dict[str, Json] = {"module": span.spot.module, "line": span.spot.line}
        yield span.stream, span.label, span.start_seconds, span.end_seconds, known


def _tasks(plan: Plan) -> Iterator[Span]:
    """The tasks of each submesh, then its work once a step."""
    once = once_seconds_of(plan)
    for submesh, spans in enumerate(simulation_of(plan).spans):
        track, end = f"mesh{submesh}", 0.0
        for span in spans:
            task, end = span.task, span.end_seconds
            known: dict[str, Json] = {"stage": task.stage, "microbatch": task.microbatch}
            yield track, str(task), span.start_seconds, end, known
        if once[submesh] > 0:
            yield track, "once a step", end, end + once[submesh], {}
