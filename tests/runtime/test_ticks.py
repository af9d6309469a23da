"""Ticks: each loop has a collective of its own, and the program says what it said before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autopar.cluster import Cluster, device_order
from autopar.cluster.target import Target
from autopar.ir.sharding import MeshShape
from autopar.runtime.aot.launch import compile_ahead
from autopar.runtime.aot.program import AotProgram, abstract_mesh, export_jitted
from autopar.runtime.aot.ticks import add_ticks
from tests.runtime.aot_programs import needs_gpu_compiler

P = PartitionSpec
SHAPE = MeshShape(("data", "model"), (4, 2))


def layers(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A scan over layers whose body has a loop of three trips; no collective inside."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x)
        return x, jnp.sum(x, axis=-1)

    return jax.lax.scan(layer, x, weights)


def arguments(mesh: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Rows over the data axis, and weights on every device."""
    lies = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    shapes = zip(((8, 16), (5, 16, 16)), lies, strict=True)
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s) for shape, s in shapes)


def split(mesh: Any) -> Callable[..., Any]:
    """The program as it is, for the partitioner to split."""
    del mesh
    return layers


def mapped(mesh: Any) -> Callable[..., Any]:
    """The program written for one device's pieces."""
    specs = P("data"), P()
    out = P("data"), P(None, "data")
    return jax.shard_map(layers, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)


@pytest.mark.parametrize("of", [split, mapped])
def test_each_loop_sends_and_the_result_stays(of: Callable[[Any], Callable[..., Any]]) -> None:
    mesh = jax.make_mesh(SHAPE.sizes, SHAPE.names, axis_types=(AxisType.Auto,) * 2)
    given = arguments(mesh)
    rng = np.random.default_rng(0)
    arrays = [jax.device_put(rng.normal(size=a.shape).astype("f") / 4, a.sharding) for a in given]
    lowered = jax.jit(of(mesh)).lower(*given)
    module: Any = lowered.compiler_ir("stablehlo")
    assert "collective_permute" not in str(module)

    assert add_ticks(module, SHAPE) == 2
    module.operation.verify()
    compiled = lowered.compile()

    text = compiled.as_text() or ""
    assert text.count(" collective-permute(") + text.count(" collective-permute-start(") >= 2
    plain = jax.jit(layers)(*map(np.asarray, arrays))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), compiled(*arrays), plain)


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int16", "float16"])
def test_loops_over_any_numbers_tick(dtype: str) -> None:
    """As a binary search does, whose places are uint32."""

    def doubled(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda _, x: x * 2 - x // 3, x)

    mesh = jax.make_mesh(SHAPE.sizes, SHAPE.names, axis_types=(AxisType.Auto,) * 2)
    given = jax.device_put(np.arange(8).astype(dtype), NamedSharding(mesh, P("data")))
    lowered = jax.jit(doubled).lower(given)
    module: Any = lowered.compiler_ir("stablehlo")
    assert add_ticks(module, SHAPE) == 1
    module.operation.verify()
    np.testing.assert_array_equal(lowered.compile()(given), jax.jit(doubled)(np.asarray(given)))


def on_h100(of: Callable[[Any], Callable[..., Any]]) -> AotProgram:
    """The program for 8 H100."""
    cluster, mesh = Cluster.parse("8xh100"), abstract_mesh(SHAPE)
    target, order = Target.of(cluster), device_order(cluster, SHAPE)
    out = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())  # one gather, outside the loops
    jitted = jax.jit(of(mesh), out_shardings=out)
    return export_jitted(jitted, arguments(mesh), SHAPE, order, (), target)


@needs_gpu_compiler
@pytest.mark.parametrize("of", [split, mapped])
def test_loops_without_a_collective_have_time_on_h100(
    of: Callable[[Any], Callable[..., Any]],
) -> None:
    compiled = compile_ahead(on_h100(of))
    assert compiled.untimed == ()
    assert compiled.seconds is not None
    assert max(span.runs for span in compiled.spans) == 15
    assert {c.kind for c in compiled.collectives} == {"all-gather"}  # none of the ticks
