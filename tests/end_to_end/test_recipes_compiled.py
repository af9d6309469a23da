"""The recipes of two kinds of axis, of sequences and of experts, read off the compiled HLO.

Nothing here runs: the steps are as big as they have to be, and are compiled on shapes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import pytest

import autopar
from autopar.hlo.collectives import read_collectives
from autopar.hlo.tensors import HloCollective
from benchmarks import models

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 2, 1024, 16, 4096, 512, 16
HIDDEN = 4 * WIDTH
GROUP = 4  # devices on the last axis; the first has two
STREAM = BATCH // 2 * LENGTH * WIDTH * 4  # the residual stream of a data parallel group
SMALL = WIDTH * 4 * 64  # below are norms, biases, the loss
# One group of each axis, by the first device in it.
DATA, MODEL = (0, 4), (0, 1, 2, 3)


def compiled(model: models.Model, method: str) -> tuple[autopar.Plan, tuple[HloCollective, ...]]:
    """A step planned by a recipe on 2 x 4 devices: the plan, and its collectives of some size."""
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    step = autopar.parallelize(model.step, cluster="8xh100", mesh=(2, 4), method=method)
    plan = step.plan_for(state, model.example_batch)
    every = read_collectives(step.compile(state, model.example_batch).as_text())
    return plan, tuple(c for c in every if c.nbytes > SMALL)


@pytest.fixture(scope="module")
def gpt() -> models.Model:
    return models.gpt(
        layers=LAYERS, width=WIDTH, heads=HEADS, vocab=VOCABULARY, sequence=LENGTH, batch=BATCH,
        optimizer="sgd", dtype="float32",
    )  # fmt: skip


def kernels(plan: autopar.Plan) -> dict[str, str]:
    """How each matrix of the layers lies, by its module's name."""
    return {
        a.path.split("/")[-2]: str(a.sharding)
        for a in plan.arguments
        if a.path.endswith("kernel") and "params/layer" in a.path
    }


def along(found: tuple[HloCollective, ...], kind: str, group: tuple[int, ...]) -> int:
    """Bytes that a kind of collective moves among the groups of one axis."""
    return sum(c.total_bytes for c in found if c.kind == kind and group in c.groups)


def test_sequence_parallel_blocks_gather_and_scatter_the_stream(gpt: models.Model) -> None:
    plan, found = compiled(gpt, "sequence")
    assert kernels(plan) == {
        **dict.fromkeys(("query", "key", "value", "up"), "[-, model]"),
        **dict.fromkeys(("out", "down"), "[model, -]"),
    }
    # No sum of the stream comes out whole: each block is closed by a scatter, opened by a gather.
    assert along(found, "all-reduce", MODEL) == 0
    blocks = 2 * LAYERS
    scattered, gathered = (
        along(found, k, MODEL) // STREAM for k in ("reduce-scatter", "all-gather")
    )
    assert scattered >= 2 * blocks  # forward and backward
    assert gathered >= 2 * blocks + 1  # and the head's input
    assert gathered <= 3 * blocks + 3  # gathered again for the weights' gradients, and no more


def test_hybrid_sharding_gathers_within_and_sums_across(gpt: models.Model) -> None:
    plan, found = compiled(gpt, "hsdp")
    for a in plan.arguments:
        if a.role == "state":
            assert "data" not in a.sharding.axes(), a
    layers = LAYERS * (4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN) * 4
    # Each layer's matrices: gathered forward and backward, scattered within, summed across.
    assert along(found, "all-gather", MODEL) >= 2 * layers
    assert along(found, "reduce-scatter", MODEL) >= layers
    assert along(found, "all-reduce", DATA) >= layers // GROUP
    assert along(found, "all-gather", DATA) == along(found, "reduce-scatter", DATA) == 0


def test_sharded_tensors_gather_across_and_split_features_within(gpt: models.Model) -> None:
    plan, found = compiled(gpt, "fsdp+tp")
    assert all(text.count("data") == text.count("model") == 1 for text in kernels(plan).values())
    layers = LAYERS * (4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN) * 4
    # A device gathers its own features' shards only, and scatters only their gradients.
    assert layers // GROUP <= along(found, "all-gather", DATA) <= 3 * layers // GROUP
    assert layers // GROUP <= along(found, "reduce-scatter", DATA) <= 2 * layers // GROUP
    assert along(found, "reduce-scatter", MODEL) + along(found, "all-reduce", MODEL) >= STREAM


def test_experts_are_reached_by_all_to_alls() -> None:
    model: Any = models.moe(
        layers=LAYERS, width=WIDTH, heads=HEADS, experts=8, hidden=HIDDEN, vocab=VOCABULARY,
        sequence=LENGTH, batch=BATCH, optimizer="sgd", dtype="float32",
    )  # fmt: skip
    plan, found = compiled(model, "expert")
    for a in plan.arguments:
        if a.role == "state":
            split = "/experts/up" in a.path or "/experts/down" in a.path
            assert str(a.sharding) == "[model, -, -]" if split else not a.sharding.axes(), a
    counts = Counter(c.kind for c in found)
    # Dispatch and combine, forward and backward; nothing is gathered or scattered.
    assert counts["all-to-all"] == 4 * LAYERS
    assert all(MODEL in c.groups for c in found if c.kind == "all-to-all")
    assert set(counts) == {"all-to-all", "all-reduce"}
    # A device sums the gradients of its own experts only, with those that hold the same ones.
    experts = LAYERS * 8 * 2 * WIDTH * HIDDEN * 4
    assert along(found, "all-reduce", DATA) == experts // GROUP
