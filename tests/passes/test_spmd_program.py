"""An SPMD program gives the numbers of the plain loop, bit for bit, where every device has all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder
from autopar.errors import LoweringError
from autopar.ir.batching import Batching
from autopar.ir.sharding import MeshShape
from autopar.ir.spmd_program import NONE, Loop, Source, SpmdProgram, Wave
from autopar.ir.stages import StagePlan
from autopar.ir.values import Literal
from autopar.passes.lower.spmd_program import lower_spmd
from tests.passes.loopback import lowered
from tests.passes.sketch import Array, arguments, compute, joined, plainly, rows_of
from tests.passes.steps import Chain, balanced, two_passes

LONE = MeshShape((), ())
RESHARDER = Resharder(Prices(Cluster.parse("1xcpu"), LONE))


def spmd(batching: Batching, stages: StagePlan) -> SpmdProgram:
    return lower_spmd(lowered(batching, stages)[1], RESHARDER)


class Machine:
    """Runs an SPMD program in numpy: on each submesh a cell for every cell, full of NaN at first.

    A ring that is read where nothing was put, or that was written over too soon, shows as another
    number at the end.
    """

    def __init__(self, given: SpmdProgram, arrays: Sequence[Array]) -> None:
        self.spmd, self.count = given, len(given.program.submeshes)
        m = given.program.microbatches
        self.cells: list[list[Array]] = [
            [
                np.full((*([c.depth] if c.depth else []), *c.shape), np.nan)
                for _ in range(self.count)
            ]
            for c in given.cells
        ]
        fed = {(f.submesh, f.registers[0]): f for f in given.program.feeds}
        for held in given.feeds:
            for s, r in enumerate(held.registers):
                if r == NONE:
                    continue
                feed = fed[s, r]
                rows = [rows_of(arrays[feed.input], feed.rows, m, i) for i in range(m)]
                self.cells[held.cell][s] = np.stack(rows) if feed.rows else rows[0]

    def outputs(self) -> dict[int, Array]:
        for segment in self.spmd.segments:
            if isinstance(segment, Wave):
                self._wave(segment)
            else:
                self._loop(segment)
        places = {
            (s, r): (held.cell, s)
            for held in self.spmd.fetches
            for s, r in enumerate(held.registers)
        }
        found: dict[int, Array] = {}
        for fetch in self.spmd.program.fetches:
            cell, s = places[fetch.submesh, fetch.registers[0]]
            held = self.cells[cell][s]
            found[fetch.output] = joined(list(held) if fetch.rows else [held], fetch.rows)
        return found

    def _wave(self, wave: Wave) -> None:
        for shift in wave.shifts:
            assert len({a for a, _ in shift.pairs}) == len(shift.pairs)
            assert len({b for _, b in shift.pairs}) == len(shift.pairs)
            sent = {b: self.cells[shift.source][a] for a, b in shift.pairs}
            for b, value in sent.items():
                self.cells[shift.target][b] = value
        for s, k in enumerate(wave.parts):
            if k != NONE:
                self._keep(k, s, 0, self._run([k], s, 0)[k])

    def _loop(self, loop: Loop) -> None:
        for cell in loop.sums:
            for s in range(self.count):
                self.cells[cell][s] = np.zeros(self.spmd.cells[cell].shape)
        for tick in range(loop.tick_count):
            arriving = []
            for turn in loop.turns:
                made: dict[int, dict[int, list[Array]]] = {}
                for s, parts in enumerate(turn.parts):
                    i = turn.ticks[tick][s]
                    if i != NONE:
                        made[s] = self._run(parts, s, i)
                        for k, values in made[s].items():
                            self._keep(k, s, i, values)
                for lane in turn.lanes:
                    for a, b, k, o in lane.senders:
                        if a in made:
                            arriving.append((lane.target, b, turn.ticks[tick][a], made[a][k][o]))
            for cell, s, i, value in arriving:
                self._put(cell, s, i, value)

    def _run(self, parts: Sequence[int], s: int, i: int) -> dict[int, list[Array]]:
        made: dict[int, list[Array]] = {}
        for k in parts:
            part, own = self.spmd.parts[k], self.spmd.program.parts[k].part
            names = [g.value.name for g in own.graph.inputs]
            env = {n: self._read(x, s, i, made) for n, x in zip(names, part.inputs, strict=True)}
            compute(own.graph.ops, env)
            values = [
                np.full(o.shape, float(o.text)) if isinstance(o, Literal) else env[o]
                for o in own.graph.outputs
            ]
            made[k] = values[: len(part.outputs)]
            for cell, more in zip(part.sums, values[len(part.outputs) :], strict=True):
                self.cells[cell][s] = self.cells[cell][s] + more
        return made

    def _read(self, x: Source, s: int, i: int, made: dict[int, list[Array]]) -> Array:
        if x.part != NONE:
            return made[x.part][x.output]
        if x.cell == NONE:
            return np.array(float(i))
        held, depth = self.cells[x.cell][s], self.spmd.cells[x.cell].depth
        return held[i % depth] if depth else held

    def _keep(self, k: int, s: int, i: int, values: Sequence[Array]) -> None:
        for cell, value in zip(self.spmd.parts[k].outputs, values, strict=True):
            if cell != NONE:
                self._put(cell, s, i, value)

    def _put(self, cell: int, s: int, i: int, value: Array) -> None:
        depth = self.spmd.cells[cell].depth
        if depth:
            self.cells[cell][s][i % depth] = value
        else:
            self.cells[cell][s] = value


def assert_equals_plain(batching: Batching, stages: StagePlan) -> SpmdProgram:
    given = arguments(batching)
    made = spmd(batching, stages)
    found, wanted = Machine(made, given).outputs(), plainly(batching, given)
    for output, value in found.items():
        assert np.array_equal(value, wanted[output]), f"output {output} differs"
    assert len(found) == len(wanted)
    return made


HARD = {
    "plain": Chain(layers=4),
    "skips": Chain(layers=4, skips=((0, 3), (1, 3))),
    "tied": Chain(layers=4, tied=True),
    "clip": Chain(layers=4, clip=True, momentum=True),
    "all": Chain(layers=4, m=6, skips=((1, 3),), tied=True, decay=True, clip=True, momentum=True,
                 bias=True, cast=True),
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("name", HARD)
def test_what_makes_pipelines_hard(name: str, p: int, schedule: str) -> None:
    sketch, batching = HARD[name].sketch(), HARD[name].batching()
    assert_equals_plain(batching, sketch.staged(batching, range(0, 4, 4 // p), schedule, p))


def test_two_loops_one_after_the_other() -> None:
    sketch = two_passes()
    batching = sketch.batching(3, 2, loops=2)
    made = assert_equals_plain(batching, sketch.staged(batching, (0, 2), "1f1b", 2))
    assert len(made.loops) == 2


def test_what_a_later_loop_reads_is_held_for_every_microbatch() -> None:
    sketch = balanced()
    batching = sketch.batching(4, 2, loops=2, barrier=True)
    assert_equals_plain(batching, sketch.staged(batching, range(4), "gpipe", 4))


@pytest.mark.parametrize("p", [1, 2, 4])
def test_what_is_told_of_every_microbatch_is_read_in_its_own_tick_too(p: int) -> None:
    """The last stage's results are given back, and its backward reads them as they are made."""
    chain = Chain(layers=4)
    sketch = chain.sketch()
    sketch.returns(next(op.results[0].name for op in reversed(sketch.ops) if op.kind == "tanh"))
    batching = sketch.batching(chain.m, chain.rows)
    assert_equals_plain(batching, sketch.staged(batching, range(0, 4, 4 // p), "1f1b", p))


def _ticks(p: int, m: int, schedule: str) -> list[str]:
    chain = Chain(layers=4, m=m)
    sketch, batching = chain.sketch(), chain.batching()
    made = spmd(batching, sketch.staged(batching, range(0, 4, 4 // p), schedule, p))
    return [line for line in str(made).splitlines() if line.startswith("tick")]


def test_a_tick_is_a_forward_and_a_backward() -> None:
    assert _ticks(2, 4, "1f1b") == [
        "tick   0 F0.0",
        "tick   1 F0.1 F1.0 B1.0",
        "tick   2 F0.2 B0.0 F1.1 B1.1",
        "tick   3 F0.3 B0.1 F1.2 B1.2",
        "tick   4 B0.2 F1.3 B1.3",
        "tick   5 B0.3",
    ]


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 4), (4, 2)])
def test_there_are_as_many_ticks_as_1f1b_needs(p: int, m: int) -> None:
    assert len(_ticks(p, m, "1f1b")) == m + 2 * (p - 1)


def test_all_forwards_come_first_where_they_are_to() -> None:
    lines = _ticks(4, 8, "gpipe")
    stage0 = [i for i, line in enumerate(lines) if "B0." in line]
    assert min(stage0) > max(i for i, line in enumerate(lines) if "F0." in line)


def test_equal_stages_share_every_cell() -> None:
    """In the middle; the first and the last stage have an end of their own."""
    chain = Chain(layers=4, momentum=True)
    sketch, batching = chain.sketch(), chain.batching()
    made = spmd(batching, sketch.staged(batching, range(4), "1f1b", 4))
    state = [h for h in made.feeds if h.is_consumed]
    everywhere = [h for h in state if NONE not in h.registers]
    assert len(everywhere) == 2  # a weight and its velocity
    assert all(made.cells[h.cell].shape == () for h in state if h not in everywhere)


def test_a_stage_holds_two_more_microbatches_than_the_next() -> None:
    chain = Chain(layers=4, m=8)
    sketch, batching = chain.sketch(), chain.batching()
    made = spmd(batching, sketch.staged(batching, range(4), "1f1b", 4))
    assert made.peak_in_flight == (7, 5, 3, 1)
    assert max(cell.depth for cell in made.cells) == 8  # of the batch, all rows
    fed = {h.cell for h in made.feeds}
    assert max(c.depth for n, c in enumerate(made.cells) if n not in fed) == 7


def test_other_meshes_and_split_backwards_are_refused() -> None:
    chain = Chain(layers=4)
    sketch, batching = chain.sketch(), chain.batching()
    with pytest.raises(LoweringError, match="a backward pass in two halves"):
        spmd(batching, sketch.staged(batching, range(4), "zb-h1", 4))
    with pytest.raises(LoweringError, match="submesh 0 has 2 stages"):
        spmd(batching, sketch.staged(batching, range(4), "interleaved", 2))
