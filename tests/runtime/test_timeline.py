"""What a step did is measured span by span, and drawn as simulations are."""

from __future__ import annotations

import json
from itertools import pairwise

import jax
import numpy as np

from autopar.ir.program import Run, Send
from autopar.runtime.timeline import MeasuredSpan, Timeline, chrome_trace
from tests.runtime.stages import Model, one_forward_one_backward
from tests.runtime.test_pipeline import bound, executor, staged


def by_hand() -> Timeline:
    """Two submeshes: 1 s each of F and B, and an update; mesh1 waits for a transfer."""
    return Timeline(
        2,
        (
            MeasuredSpan(0, "F0", "F", 0, 0, 1.0, 2.0),
            MeasuredSpan(0, "B0", "B", 0, 0, 5.0, 6.0),
            MeasuredSpan(0, "update0.0", "update", 0, -1, 6.0, 6.5),
            MeasuredSpan(1, "F1", "F", 1, 0, 3.0, 4.0),
            MeasuredSpan(1, "B1", "B", 1, 0, 4.0, 5.0),
            MeasuredSpan(0, "send to mesh1", "send", -1, 0, 2.0, 3.0, 1),
        ),
    )


def test_bubbles_are_what_is_not_computed() -> None:
    timeline = by_hand()
    assert timeline.makespan_seconds == 6.5
    assert timeline.busy_seconds == (2.5, 2.0)
    assert timeline.makespan_bubble == 4.5
    loop = timeline.loop
    assert loop.makespan_seconds == 5.0
    assert loop.busy_seconds == (2.0, 2.0)
    assert loop.bubble_fraction == 0.6


def test_the_grid_is_that_of_a_simulation() -> None:
    assert str(by_hand().loop).splitlines() == [
        "measured  p=2  makespan 5 s  bubble 3 s",
        "device 0 | F0 ········ B0",
        "device 1 | ····· F0 B0 ··",
    ]


def test_a_chrome_trace_has_a_track_for_each_submesh_and_way() -> None:
    trace = json.loads(json.dumps(chrome_trace(by_hand())))
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {0: "mesh0", 1: "mesh1", 2: "mesh0 to mesh1"}
    events = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if "ts" in e]
    assert (0, "F0.0", 1e6, 1e6) in events
    assert (0, "update0.0", 6e6, 5e5) in events
    assert (2, "send to mesh1.0", 2e6, 1e6) in events


def test_every_program_and_transfer_is_measured(devices: list[jax.Device]) -> None:
    model, meshes = Model(), bound([(2,), (2,)], devices)
    _, program = staged(model, meshes, one_forward_one_backward)
    run = executor(model, meshes, one_forward_one_backward)
    wanted = run(model.flat(model.weights()))
    got, timeline = run.run_traced(model.flat(model.weights()))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(g, w)
    measured = [i for i in program.instructions if isinstance(i, Run | Send)]
    assert len(timeline.spans) == len(measured)
    for row in timeline.rows:
        ends = [s.end_seconds for s in row]
        assert ends == sorted(ends)
        assert all(a.end_seconds <= b.start_seconds for a, b in pairwise(row))
    order = [(s.name, s.microbatch) for s in timeline.rows[1]]
    planned = [
        (program.parts[i.part].part.name, i.microbatch)
        for i in program.instructions
        if isinstance(i, Run) and program.submesh_of(i) == 1
    ]
    assert order == planned
