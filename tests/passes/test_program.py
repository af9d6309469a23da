"""A scheduled step gives the numbers of the plain loop, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.errors import GraphError
from autopar.ir.batching import Batching
from autopar.ir.stages import Remat
from tests.passes.loopback import assert_equals_plain, lowered, run
from tests.passes.sketch import arguments, plainly, with_stages
from tests.passes.steps import Chain, balanced, two_passes

PLAIN = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "serial", "serial-split")
CHUNKED = ("interleaved", "looped-bfs", "zb-v", "zb-interleaved")


@pytest.mark.parametrize("schedule", PLAIN)
@pytest.mark.parametrize("p", [2, 4])
def test_a_chain_under_every_schedule(schedule: str, p: int) -> None:
    chain = Chain(layers=4)
    sketch, batching = chain.sketch(), chain.batching()
    cuts = range(0, 4, 4 // p)
    assert_equals_plain(batching, sketch.staged(batching, cuts, schedule, p))


@pytest.mark.parametrize("schedule", CHUNKED)
def test_a_chain_with_two_chunks_a_submesh(schedule: str) -> None:
    chain = Chain(layers=4)
    sketch, batching = chain.sketch(), chain.batching()
    assert_equals_plain(batching, sketch.staged(batching, range(4), schedule, 2))


HARD = {
    "skip across three stages": Chain(layers=4, skips=((0, 3), (1, 3))),
    "tied": Chain(layers=4, tied=True),
    "clip": Chain(layers=4, clip=True, momentum=True),
    "decay": Chain(layers=4, decay=True, cast=True),
    "all": Chain(layers=4, skips=((1, 3),), tied=True, decay=True, clip=True, momentum=True,
                 bias=True, cast=True),
}  # fmt: skip


@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("name", HARD)
def test_what_makes_pipelines_hard(name: str, schedule: str, remat: Remat) -> None:
    sketch, batching = HARD[name].sketch(), HARD[name].batching()
    p = 2 if schedule == "zb-v" else 4
    stages = sketch.staged(batching, range(4), schedule, p)
    assert_equals_plain(batching, with_stages(stages, remat=remat))


@pytest.mark.parametrize("schedule", PLAIN)
def test_seven_layers_on_three_stages(schedule: str) -> None:
    chain = Chain(layers=7, m=5, clip=True, bias=True)
    sketch, batching = chain.sketch(), chain.batching()
    assert_equals_plain(batching, sketch.staged(batching, (0, 2, 4), schedule, 3))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_two_gradient_passes(schedule: str) -> None:
    sketch = two_passes()
    batching = sketch.batching(3, 2, loops=2)
    assert_equals_plain(batching, sketch.staged(batching, (0, 2), schedule, 2))


def test_two_gradient_passes_with_chunks() -> None:
    sketch = two_passes(m=4)
    batching = sketch.batching(4, 2, loops=2)
    assert_equals_plain(batching, sketch.staged(batching, range(4), "interleaved", 2))


@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("schedule", ["gpipe", "looped-bfs"])
def test_a_statistic_of_the_batch_behind_a_barrier(schedule: str, remat: Remat) -> None:
    sketch = balanced()
    batching = sketch.batching(4, 2, loops=2, barrier=True)
    p = 4 if schedule == "gpipe" else 2
    stages = sketch.staged(batching, range(4), schedule, p)
    assert_equals_plain(batching, with_stages(stages, remat=remat))


def test_a_barrier_needs_all_forwards_first() -> None:
    sketch = balanced()
    batching = sketch.batching(4, 2, loops=2, barrier=True)
    with pytest.raises(GraphError, match="1f1b mixes them; take gpipe"):
        lowered(batching, sketch.staged(batching, range(4), "1f1b", 4))


def test_one_stage_accumulates_gradients() -> None:
    chain = Chain(clip=True, tied=True)
    sketch, batching = chain.sketch(), chain.batching()
    parts, _ = assert_equals_plain(batching, sketch.staged(batching, (0,), "1f1b", 1))
    assert [p.name for p in parts] == ["F0", "B0", "update0.0"]


def test_a_whole_step_runs_in_stages_too() -> None:
    chain = Chain(m=1, clip=True, tied=True, decay=True)
    sketch = chain.sketch()
    plain = sketch.batching(1, 2)
    whole = Batching(plain.graph)
    stages = sketch.staged(whole, range(4), "1f1b", 4)
    _, program = lowered(whole, stages)
    given = arguments(plain)
    for a, b in zip(run(program, given), plainly(plain, given), strict=True):
        assert np.array_equal(a, b)
