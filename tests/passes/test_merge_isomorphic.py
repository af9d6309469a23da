"""Folding: what looks alike shares a decision, nothing else does, and it costs next to nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.graph import Graph
from autopar.ir.record import parse_graph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.passes.shard.model.assemble import Assembled
from autopar.passes.shard.model.decisions import Reading
from autopar.passes.shard.model.lifetimes import lifetimes
from autopar.passes.shard.model.merge_isomorphic import merge_isomorphic, unmerged, wire
from autopar.passes.shard.model.read import read_graph
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.solver.elimination import eliminate
from autopar.passes.shard.solver.problem import narrow
from tests.passes.driving import Traced, assembled, setting, traced
from tests.toys import TOYS

CHAIN = """graph chain(%x: f32[8,16] batch "x", %w: f32[16,16] state "w") {
  %0: f32[8,16] = tanh(%x)
  %1: f32[8,16] = tanh(%0)
  %2: f32[8,16] = tanh(%1)
  %3: f32[8,16] = tanh(%2)
  %4: f32[8,16] = tanh(%3)
  %5: f32[8,16] = tanh(%4)
  return %5
}"""


def block(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A pre-norm MLP with a residual."""
    y = (x - x.mean(-1, keepdims=True)) * params["scale"]
    return x + jax.nn.gelu(y @ params["up"] + params["bias"]) @ params["down"]


def stack(layers: int, width: int, batch: int, remat: bool = False) -> Traced:
    """A train step of some equal layers, unrolled, with momentum."""

    def loss(params: Sequence[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        body = jax.checkpoint(block) if remat else block
        for layer in params:
            x = body(layer, x)
        return jnp.mean(x**2)

    def step(
        params: list[dict[str, jax.Array]], speed: list[dict[str, jax.Array]], x: jax.Array
    ) -> tuple[object, object, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, x)
        speed = jax.tree.map(lambda v, g: 0.9 * v + g, speed, grads)
        return jax.tree.map(lambda p, v: p - 0.1 * v, params, speed), speed, value

    shapes = {"scale": (width,), "up": (width, 4 * width), "bias": (4 * width,),
              "down": (4 * width, width)}  # fmt: skip
    layer = {n: jnp.ones(s) for n, s in shapes.items()}
    state = [layer] * layers
    return traced(step, state, state, jnp.ones((batch, width)))


@functools.cache
def deep(layers: int, remat: bool = False) -> Graph:
    return stack(layers, 512, 256, remat).graph


# -- classes -----------------------------------------------------------------------------------


def test_arcs_of_a_chain() -> None:
    wiring = wire(parse_graph(CHAIN))
    assert wiring.names == ("%x", "%w", "%0", "%1", "%2", "%3", "%4", "%5")
    assert wiring.sources.tolist() == [0, 2, 3, 4, 5, 6, 7]
    assert wiring.readers.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert wiring.first_output == 8


@pytest.mark.parametrize(("hops", "classes"), [(0, 1), (1, 3), (2, 5), (3, 6)])
def test_a_chain_folds_but_for_its_ends(hops: int, classes: int) -> None:
    merged = merge_isomorphic(parse_graph(CHAIN), hops, {})
    assert len(merged.graph.ops) == classes
    assert sum(v.count for variants in merged.variants for v in variants) == 6
    assert merged.graph.outputs == (merged.homes["%5"],)


def test_the_middle_of_a_chain_reads_itself() -> None:
    """One class stands for ops that read the one before it, and each other: two variants."""
    merged = merge_isomorphic(parse_graph(CHAIN), 1, {})
    middle = merged.classes[2]
    assert [(v.op.operands, v.count) for v in merged.variants[middle]] == [
        (("%0",), 1),
        (("%1",), 3),
    ]


def test_marked_inputs_stay_apart() -> None:
    graph = deep(6)
    path = next(i.path for i in graph.inputs if i.value.shape == (512, 2048))
    plain, marked = merge_isomorphic(graph, 0, {}), merge_isomorphic(graph, 0, {path: "pin"})
    assert len(marked.graph.inputs) == len(plain.graph.inputs) + 1


@pytest.mark.parametrize("remat", [False, True])
def test_classes_do_not_grow_with_depth(remat: bool) -> None:
    counts = [len(merge_isomorphic(deep(n, remat), 4, {}).graph.ops) for n in (12, 24)]
    assert counts[0] == counts[1]
    assert counts[1] < len(deep(24, remat).ops) / 2


@pytest.mark.parametrize("remat", [False, True])
def test_every_value_has_a_home_of_its_type(remat: bool) -> None:
    graph = deep(8, remat)
    merged = merge_isomorphic(graph, 2, {})
    merged.graph.verify()
    whole, inner = graph.nested_values, merged.graph.nested_values
    assert merged.homes.keys() == whole.keys()
    for name, home in merged.homes.items():
        assert whole[name].type_text == inner[home].type_text
    assert sum(merged.counts.values()) == len(whole)


@pytest.mark.parametrize("name", TOYS)
def test_many_hops_fold_nothing_that_matters(name: str) -> None:
    """With as many hops as ops only true look-alikes fold: the plan costs what it did."""
    fun, args = TOYS[name]
    graph, given = traced(fun, *args).graph, setting("2,2", "2x2xh100")
    whole = Optimal().run(graph, given).outcome
    folded = Optimal(merge_above=0, hops=len(graph.ops)).run(graph, given).outcome
    assert folded.seconds == pytest.approx(whole.seconds, rel=1e-3)


# -- what sharing costs --------------------------------------------------------------------------


def expressed(plan: ShardingPlan, reading: Reading, whole: Assembled) -> tuple[int, ...]:
    """A plan as an assignment of the problem in which nothing is shared."""
    wanted: list[object] = [None] * len(whole.choices)
    for path, node in reading.op_decisions.items():
        wanted[node] = plan.assignment_of[path]
    for node, decision in enumerate(reading.decisions):
        if decision.value is not None:
            wanted[node] = plan.sharding_of[decision.value.name]
    for key, node in whole.uses.items():
        wanted[node] = plan.use_of.get((key.value, key.phase))
    return tuple(
        options.index(want) if want in options else 0
        for options, want in zip(whole.choices, wanted, strict=True)
    )


@pytest.mark.parametrize(
    ("mesh", "cluster", "remat"),
    [("8", "8xh100", False), ("2,4", "8xh100", False), ("2,4", "8xcpu", True)],
)
def test_sharing_costs_less_than_a_percent(mesh: str, cluster: str, remat: bool) -> None:
    """The plan of the merged step, priced where every op is its own, beside the best there."""
    given = setting(mesh, cluster)
    graph = deep(4, remat)
    reading, whole = assembled(graph, given)
    best = Optimal(merge_above=10**6).run(graph, given).outcome.seconds
    shared = Optimal(merge_above=0).run(graph, given)
    assert shared.outcome.sentence
    seconds = whole.problem.seconds(improve_uses(whole, expressed(shared, reading, whole)))
    assert seconds <= 1.01 * best


def improve_uses(whole: Assembled, choice: tuple[int, ...]) -> tuple[int, ...]:
    """What the folded problem has no node for, a value read by one class, is set to its best."""
    shared = set(whole.uses.values())
    left = [
        np.arange(len(cost)) if v in shared else np.array([choice[v]])
        for v, cost in enumerate(whole.problem.costs)
    ]
    narrowed = narrow(whole.problem, left)
    return narrowed.restore(eliminate(narrowed.problem).choice)


def memory_of(graph: Graph, hops: int | None) -> list[tuple[str, int, int]]:
    """(type, first, last) of everything held."""
    merged = unmerged(graph) if hops is None else merge_isomorphic(graph, hops, {})
    reading = read_graph(merged)
    return sorted((held.value.type_text, held.first, held.last) for held in lifetimes(reading))


@pytest.mark.parametrize("remat", [False, True])
def test_memory_is_of_the_whole_step(remat: bool) -> None:
    """Look-alikes share a place, but each is held at its own time."""
    graph = deep(4, remat)
    assert memory_of(graph, 4) == memory_of(graph, None)
