"""Layers at sizes of microbatch that nobody traced."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autopar.cluster import Cluster
from autopar.cluster.placement import submesh_shapes
from autopar.cost.stage import StageCost
from autopar.cost.timeline import Seconds
from autopar.frontend import StepSpec, trace
from autopar.ir.graph import Graph
from autopar.ir.sharding import MeshShape
from autopar.ir.stages import Remat
from autopar.passes.base import Setting
from autopar.passes.pipeline import PassPipeline
from autopar.planner.placed_stages import SubmeshContexts
from autopar.planner.request import Request
from autopar.planner.sliced_step import LayerPrograms, Source, slice_step
from autopar.planner.stage_table import LayerProfiler, stage_table
from autopar.rules import RuleBook
from tests.planner.slicing import SETTING, sliced


def shown(graph: Graph) -> str:
    """A graph's text without what depends on how often it runs."""
    return str(replace(graph, ops=tuple(replace(op, runs=1, rule=None) for op in graph.ops)))


@pytest.mark.parametrize("remat", Remat)
@pytest.mark.parametrize("model", ["mlp", "gpt_scan", "unet"])
def test_a_layer_between_two_sizes_is_the_layer_traced_there(model: str, remat: Remat) -> None:
    """Priced from a trace in eight microbatches, a layer in two is what a trace in two gives."""
    small = LayerPrograms(sliced(model, 8), RuleBook())
    traced = LayerPrograms(sliced(model, 2), RuleBook())
    assert len(small.layers) == len(traced.layers)
    for layer in range(len(small.layers)):
        plain, mine = small.at(layer, traced.rows), small.at(layer, traced.rows, remat)
        theirs = traced.at(layer, traced.rows, remat)
        assert plain.joint.graph.op_count <= mine.joint.graph.op_count
        assert shown(mine.joint.graph) == shown(theirs.joint.graph)
        assert [shown(p.graph) for p in mine.parts] == [shown(p.graph) for p in theirs.parts]


def test_lines_end_at_zero() -> None:
    few, many = (StageCost(Seconds(s, s, s), working_bytes=int(s)) for s in (10.0, 30.0))
    half = few.towards(many, 0.5)
    assert (half.forward, half.working_bytes) == (Seconds(20.0, 20.0, 20.0), 20)
    assert few.towards(many, -1.0) == StageCost()
    assert few.towards(few, 0.7) == few


def clipped(depth: int, rows: int = 32) -> LayerPrograms:
    """A step of so many equal layers whose update is scaled by the norm of all gradients."""

    def step(w: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        def loss(w: dict[str, jax.Array]) -> jax.Array:
            y = x
            for name in sorted(w):
                y = jnp.tanh(y @ w[name])
            return jnp.mean(y**2)

        grads = jax.grad(loss)(w)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - g / norm, w, grads)

    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    weights = {f"w{i:02}": shapes for i in range(depth)}
    return programs_of(step, depth, weights, jax.ShapeDtypeStruct((rows, 64), jnp.float32))


def programs_of(step: Callable[..., Any], depth: int, *args: Any) -> LayerPrograms:
    """A step in four microbatches and at most so many layers."""
    spec = StepSpec(step)
    source = Source.of(spec, args, {}, trace(spec, args, {}), Request(Cluster.parse("8xh100")))
    rules = RuleBook()
    return LayerPrograms(slice_step(source.trace_at(4, cut=True), rules, SETTING, depth), rules)


def profiler_of(programs: LayerPrograms, given: Setting, method: str = "dp") -> LayerProfiler:
    """Layers on four of the devices, by `dp` the rows split."""
    request = Request(Cluster.parse("8xh100"), passes=PassPipeline.of_options(method))
    shape = next(s for s in submesh_shapes(request.cluster) if s.device_count == 4)
    context = SubmeshContexts(request.cluster).at(shape, MeshShape(("data",), (4,)))
    return LayerProfiler(programs, context, request, given)


def test_a_sum_over_all_layers_is_priced_with_none() -> None:
    """What a norm adds up grows with the number of layers; what a layer is priced by does not."""
    few, many = clipped(8), clipped(24)
    assert len(many.layers) > len(few.layers)

    def sizes(programs: LayerPrograms) -> set[tuple[int, int]]:
        graphs = [programs.at(n, 8).joint.graph for n in range(len(programs.layers))]
        return {(len(graph.inputs), graph.op_count) for graph in graphs}

    assert sizes(few) == sizes(many)
    for n in range(len(many.layers)):
        program = many.at(n, 8)
        program.joint.graph.verify()
        for part in program.parts:
            part.graph.verify()
            assert len(part.equations) == len(part.graph.ops)
            assert set(part.equations) <= set(program.joint.equations)


@pytest.mark.parametrize(("rows", "sizes"), [(4, (1, 2, 10)), (20, (1, 2, 10)), (4, (1, 2))])
def test_layers_are_priced_for_rows_that_their_sharding_divides(
    rows: int, sizes: tuple[int, ...]
) -> None:
    """The second size of microbatch is none of `sizes` where that leaves devices uneven rows."""
    variant = profiler_of(clipped(8, 20), SETTING).roomy(rows, sizes, lambda _: True)
    assert variant is not None
    assert variant.unit == 4
    low, high = variant.rows
    assert (low % 4, high % 4) == (0, 0)
    assert 4 <= low < high <= 20


def test_rows_that_only_an_op_has_split_are_divided_too() -> None:
    """The rows of `x` lie whole; the product, a sum over them, reads a share on each device."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.mean(x.T @ x * w))(w)

    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (20, 64)))
    given = replace(SETTING, pins=(("x", ((), ("data",))),))
    variant = profiler_of(programs_of(step, 1, *shapes), given).roomy(4, (1, 2, 10), lambda _: True)
    assert variant is not None
    assert variant.unit == 4


@pytest.mark.parametrize("rows", [1, 2])
def test_fewer_rows_than_devices_are_divided_by_their_tokens(rows: int) -> None:
    """Tokens are rows times places: four devices share those of any number of rows."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            tokens = jnp.tanh(x.reshape(-1, 64) @ w)
            split = NamedSharding(mesh, PartitionSpec("data"))
            return jnp.mean(jax.lax.with_sharding_constraint(tokens, split) ** 2)

        return w - jax.grad(loss)(w)

    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (16, 8, 64)))
    programs = programs_of(step, 1, *shapes)
    variant = profiler_of(programs, SETTING, "auto").roomy(rows, (1, 2, 8), lambda _: True)
    assert variant is not None
    assert variant.unit == 1
    assert variant.divides(rows)


@pytest.mark.parametrize(("cluster", "fewest"), [("8xh100", 1), ("8x8xh100", 4)])
def test_submeshes_on_which_a_layer_holds_all_others_up_have_no_prices(
    cluster: str, fewest: int
) -> None:
    """Of 64 devices two would run one of eight equal layers, and 62 wait for them."""
    request = Request(Cluster.parse(cluster), passes=PassPipeline.of_options("dp", None, None))
    contexts = SubmeshContexts(request.cluster)
    table = stage_table(clipped(8, 64), (1, 4), request, SETTING, contexts)
    assert min(shape.device_count for shape in table.submeshes) == fewest
