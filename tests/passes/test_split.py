"""Every op is in the parts that it belongs to, and each part is a graph of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autopar.errors import GraphError
from autopar.ir.batching import FREE, Batching, Hoist, Moment, When
from autopar.ir.program import Part, PartKind, Run, Send
from autopar.ir.stages import Remat, StagePlan
from autopar.ir.values import Role
from autopar.passes.lower.partition.part_dataflow import PartDataflow
from autopar.passes.lower.partition.split import Assigned, split
from autopar.passes.lower.partition.submesh_graph import submesh_graph
from autopar.schedule.grid import Kind
from autopar.schedule.table import make_grid
from tests.passes.loopback import assert_equals_plain, lowered
from tests.passes.sketch import LOOP, ONCE, Sketch, number, with_stages
from tests.passes.steps import Chain


def _named(step: PartDataflow) -> dict[str, Part]:
    return {part.name: part for part in step.parts}


def _kinds(part: Part) -> Counter[str]:
    return Counter(op.kind for op in part.graph.ops)


def _inputs(part: Part) -> list[str]:
    return [i.value.name for i in part.graph.inputs]


def _staged(chain: Chain, cuts: range, schedule: str, p: int) -> tuple[Batching, StagePlan]:
    batching = chain.batching()
    return batching, chain.sketch().staged(batching, cuts, schedule, p)


def test_input_and_weight_gradients_are_a_partition() -> None:
    whole = _named(split(*_staged(Chain(layers=6), range(0, 6, 2), "1f1b", 3)))
    cut = _named(split(*_staged(Chain(layers=6), range(0, 6, 2), "zb-h1", 3)))
    for stage in (1, 2):
        backward, inputs, weights = (part[f"{k}{stage}"] for part, k in
                                     ((whole, "B"), (cut, "I"), (cut, "W")))  # fmt: skip
        shared = set(inputs.equations) & set(weights.equations)
        # What is made on demand may stand in both; all else in one of them.
        assert all(backward.graph.ops[backward.equations.index(i)].kind == "broadcast_in_dim"
                   for i in shared)  # fmt: skip
        assert set(inputs.equations) | set(weights.equations) == set(backward.equations)
        assert _kinds(weights)["dot_general"] == 2 == _kinds(inputs)["dot_general"]
        assert [len(p.accumulators) for p in (inputs, weights)] == [0, 2]


@pytest.mark.parametrize("remat", list(Remat))
def test_the_parts_of_one_stage_are_those_that_it_has_among_all(remat: Remat) -> None:
    batching, stages = _staged(Chain(layers=6, bias=True), range(0, 6, 2), "zb-h1", 3)
    cut = Assigned.of(batching, stages).recomputing(remat).cut()
    whole = cut.dataflow()
    for stage in range(3):
        alone = cut.dataflow(stage)
        assert alone.parts == tuple(p for p in whole.parts if p.stage == stage)
        assert submesh_graph(alone, stage) == submesh_graph(whole, stage)


def test_what_is_sent_or_returned_is_final_on_the_submesh_that_makes_it() -> None:
    step = split(*_staged(Chain(layers=4), range(0, 4, 2), "1f1b", 2))
    outputs = {n for n in step.step.graph.outputs if isinstance(n, str)}
    forward, backward = _named(step)["F0"], _named(step)["B1"]
    sent = [set(forward.graph.outputs) & set(_inputs(_named(step)["F1"])),
            set(backward.graph.outputs) & set(_inputs(_named(step)["B0"]))]  # fmt: skip
    assert len(sent[0]) == len(sent[1]) == 1
    for submesh, names in enumerate(sent):
        assert step.final[submesh] - outputs == names


def test_nothing_waits_for_the_first_stage_so_that_all_of_it_is_w() -> None:
    batching, stages = _staged(Chain(layers=4), range(0, 4, 2), "zb-h1", 2)
    parts, program = lowered(batching, stages)
    names = {p.name for p in parts}
    assert "W0" in names - {"I0"} == names
    row = make_grid("zb-h1", 2, batching.microbatches).rows[0]
    runs = [
        (program.parts[s.part].part.name, s.microbatch)
        for s in program.instructions
        if isinstance(s, Run) and program.parts[s.part].part.submesh == 0 and s.microbatch >= 0
    ]
    assert runs == [
        ("F0" if t.kind is Kind.FORWARD else "W0", t.microbatch)
        for t in row
        if t.kind is not Kind.WEIGHT_GRADIENT
    ]


def test_recomputation_keeps_only_what_comes_into_a_stage() -> None:
    batching, stages = _staged(Chain(layers=6, bias=True), range(0, 6, 2), "1f1b", 3)
    plain, again = (
        _named(split(batching, s)) for s in (stages, with_stages(stages, remat=Remat.FULL))
    )
    assert len(plain["F1"].graph.outputs) > len(again["F1"].graph.outputs) == 1
    assert set(_inputs(again["B1"])) >= set(_inputs(again["F1"]))
    assert set(again["F1"].equations) <= set(again["B1"].equations)
    # What leaves the last stage is not accumulated a second time.
    assert [len(again[n].accumulators) for n in ("F2", "B2")] == [1, 4]


def test_selective_remat_keeps_products_with_parameters() -> None:
    batching, stages = _staged(Chain(layers=6, bias=True, width=32), range(0, 6, 2), "1f1b", 3)
    again = _named(split(batching, with_stages(stages, remat=Remat.SELECTIVE)))
    full = _named(split(batching, with_stages(stages, remat=Remat.FULL)))
    assert _kinds(full["B1"])["dot_general"] > _kinds(again["B1"])["dot_general"]
    assert _kinds(again["B1"])["tanh"] == _kinds(full["B1"])["tanh"]


def test_split_recomputation_is_in_i_alone() -> None:
    batching, stages = _staged(Chain(layers=4), range(0, 4, 2), "zb-h1", 2)
    parts = _named(split(batching, with_stages(stages, remat=Remat.FULL)))
    assert _kinds(parts["I1"])["tanh"] == 2
    assert "tanh" not in _kinds(parts["W1"])


def test_casts_run_once_a_stage_and_expansions_in_every_part() -> None:
    s = Sketch()
    w = s.given("w", (300,), Role.STATE, 0)
    x = s.given("x", (2, 300, 300), Role.BATCH, 0)
    s.moment = FREE
    cast = s.op("mul", w, number(0.5))
    wide = s.op("add", s.op("transpose", s.spread(cast, (300, 300), 1), permutation=(1, 0)),
                number(1.0))  # fmt: skip
    s.moment = LOOP
    mask = s.op("mul", x, s.spread(wide, (2, 300, 300), 1, 2))
    loss = s.sums(s.total(mask))
    s.moment, s.region = ONCE, "update"
    s.returns(loss)
    s.returns(w, w)
    parts = _named(split(*_with_one_stage(s)))
    assert _kinds(parts["setup0"]) == {"mul": 1}
    assert _kinds(parts["F0"])["transpose"] == _kinds(parts["F0"])["add"] == 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "serial-split"])
@pytest.mark.parametrize("reads", [True, False])
def test_a_slope_runs_where_it_is_read_if_less_is_kept_so(reads: bool, schedule: str) -> None:
    s = Sketch()
    w = s.given("w", (3, 3), Role.STATE, 0)
    x = s.given("x", (2, 3), Role.BATCH, 0)
    y = s.op("tanh", s.dot(x, w, 1, 0))
    slope = s.op("sub", number(1.0), y)
    loss = s.sums(s.total(s.op("mul", y, y)))
    s.region = "backward"
    cotangent = s.op("mul", slope, y if reads else number(2.0))
    gradient = s.sums(s.dot(x, cotangent, 0, 0))
    s.moment, s.region = ONCE, "update"
    s.returns(loss)
    s.returns(s.op("sub", w, gradient), w)
    batching = s.batching(2, 2)
    stages = s.staged(batching, (0,), schedule, 1)
    parts = _named(split(batching, stages))
    backward = parts["W0" if schedule == "serial-split" else "B0"]
    assert ("sub" in _kinds(parts["F0"]), "sub" in _kinds(backward)) == (not reads, reads)
    # One value of the layer is kept either way; the loss is summed.
    assert parts["F0"].graph.outputs == (y if reads else slope, loss)
    assert_equals_plain(batching, stages)


def _with_one_stage(s: Sketch) -> tuple[Batching, StagePlan]:
    batching = s.batching(2, 2)
    return batching, s.staged(batching, (0,), "1f1b", 1)


def test_scalars_cross_once_between_two_rounds() -> None:
    parts, program = lowered(*_staged(Chain(layers=4, clip=True), range(4), "1f1b", 4))
    updates = [p for p in parts if p.kind is PartKind.UPDATE]
    assert {p.round for p in updates} == {0, 1}
    crossing = [s for s in program.instructions if isinstance(s, Send) and s.microbatch < 0]
    # Each of four stages tells the three others; nothing wider than a number crosses.
    assert len({(s.source, s.target) for s in crossing}) == len(crossing) == 12
    assert {p.value.shape for s in crossing for p in s.transfers} == {()}


def test_without_a_join_there_is_one_round() -> None:
    parts = split(*_staged(Chain(layers=4, momentum=True, decay=True), range(4), "1f1b", 4)).parts
    rounds = {p.round for p in parts if p.kind is PartKind.UPDATE}
    # The loss of all stages is a join.
    assert rounds == {0, 1}
    parts = split(*_staged(Chain(layers=4, momentum=True), range(4), "1f1b", 4)).parts
    assert {p.round for p in parts if p.kind is PartKind.UPDATE} == {0}


def test_a_skip_goes_straight_to_its_reader() -> None:
    _, program = lowered(*_staged(Chain(layers=4, skips=((1, 3),)), range(4), "1f1b", 4))
    forward = [s for s in program.instructions if isinstance(s, Send) and s.microbatch == 0]
    assert (0, 3) in {(s.source, s.target) for s in forward}
    assert all(len(s.transfers) == 1 for s in forward if (s.source, s.target) == (1, 2))


def test_a_tied_weight_is_sent_at_the_start_and_its_gradient_at_the_end() -> None:
    _, program = lowered(*_staged(Chain(layers=4, tied=True), range(4), "1f1b", 4))
    fed = [f for f in program.feeds if f.input == 0]
    assert [f.submesh for f in fed] == [0]
    once = [s for s in program.instructions if isinstance(s, Send) and s.microbatch < 0]
    assert [(s.source, s.target) for s in once] == [(0, 3), (3, 0)]
    assert [f.submesh for f in program.fetches if f.output == 0] == [0]


def test_a_hoist_is_computed_on_the_whole_batch_before_all_else() -> None:
    s = Sketch()
    w = s.given("w", (3,), Role.STATE, 0)
    x, mask = s.given("x", (2, 3), Role.BATCH, 0), s.given("mask", (2,), Role.BATCH, 1)
    h = s.op("mul", x, s.spread(w, (2, 3), 1))
    s.layer = 1
    count = s.total(mask)
    masked = s.op("mul", s.total(h, 1), mask)
    loss = s.sums(s.op("div", s.total(masked), count))
    s.region = "backward"
    share = s.op("div", mask, s.spread(count, (2,)))
    cotangent = s.spread(share, (2, 3), 0)
    s.layer = 0
    gradient = s.sums(s.total(s.op("mul", cotangent, x), 0))
    s.region, s.moment = "update", ONCE
    s.returns(s.op("sub", w, gradient), w)
    s.returns(loss)
    given = Sketch()
    given.given("mask", (8,), Role.BATCH, 0)
    total = given.total("%mask")
    given.outputs.append(total)
    graph = given.batching(1, 8).graph
    named = replace(graph.ops[0], results=(replace(graph.ops[0].results[0], name=count),))
    hoist = Hoist(replace(graph, ops=(named,), outputs=(count,)), (count,), (1,))
    batching = s.batching(4, 2, hoist=hoist)
    parts, program = assert_equals_plain(batching, s.staged(batching, (0, 1), "1f1b", 2))
    assert (parts[0].kind, parts[0].submesh) == (PartKind.HOIST, 1)
    assert all(count not in {r.name for op in p.graph.ops for r in op.results} for p in parts[1:])
    whole = [f for f in program.feeds if f.rows is None and f.input == 2]
    assert [len(f.registers) for f in whole] == [1]


def test_outputs_of_every_sort() -> None:
    s = Sketch()
    w = s.given("w", (3,), Role.STATE, 1)
    before = s.given("before", (3,), Role.STATE, 0)
    frozen = s.given("frozen", (3,), Role.STATE, 0)
    copy = s.given("copy", (3,), Role.STATE, 0)
    scale = s.given("scale", (3,), Role.CONSTANT)
    x = s.given("x", (2, 3), Role.BATCH, 0)
    h = s.op("mul", x, s.spread(frozen, (2, 3), 1))
    s.rows[h] = s.rows[x]
    s.layer = 1
    out = s.op("mul", h, s.spread(w, (2, 3), 1))
    s.rows[out] = s.rows[x]
    s.region = "backward"
    gradient = s.sums(s.total(out, 0))
    s.region, s.moment = "update", ONCE
    new = s.op("sub", w, gradient)
    s.returns(new, w)
    s.returns(w, before)  # the old value, on another submesh
    s.returns(frozen, frozen)  # as it came
    s.returns(new, copy)  # the same value twice
    for name in (out, h, x, gradient, scale, w):
        s.returns(name)
    s.returns(number(3.0))
    s.returns(number(3.0), s.given("reset", (), Role.STATE, 1))
    batching = s.batching(2, 2)
    stages = s.staged(batching, (0, 1), "gpipe", 2)
    _, program = lowered(batching, stages)
    fetches = {f.output: f for f in program.fetches}
    assert [fetches[o].submesh for o in range(4)] == [1, 0, 0, 0]
    assert len(fetches[4].registers) == len(fetches[6].registers) == 2
    assert_equals_plain(batching, s.staged(batching, (0, 1), "gpipe", 2))


def test_what_is_there_for_each_microbatch_is_not_read_once() -> None:
    s = Sketch()
    w = s.given("w", (3,), Role.STATE, 0)
    x = s.given("x", (2, 3), Role.BATCH, 0)
    total = s.total(s.op("mul", x, s.spread(w, (2, 3), 1)), 0)
    s.region, s.moment = "update", ONCE
    s.returns(s.op("sub", w, total), w)
    with pytest.raises(GraphError, match="reduce_sum makes, is there once for each of 2 micro"):
        split(*_with_one_stage(s))
    s.moment = Moment(When.ONCE, (0,))
    s.returns(s.op("mul", x, number(2.0)))
    s.outputs.pop(0)
    s.donated.clear()
    with pytest.raises(GraphError, match="input %x is cut into 2 microbatches, but read once"):
        split(*_with_one_stage(s))


def test_stages_must_lie_where_the_schedule_has_them() -> None:
    chain = Chain(layers=4)
    batching, sketch = chain.batching(), chain.sketch()
    stages = sketch.staged(batching, range(4), "interleaved", 2)
    turned = StagePlan(stages.layers, stages.stages, stages.submeshes, stages.microbatches, "zb-v")
    with pytest.raises(GraphError, match=r"\(0, 1, 0, 1\) do not suit zb-v"):
        split(batching, turned)
