"""What collectives hold while they run, and how they want it, beside what XLA compiles for GPUs."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar.cluster import Cluster
from autopar.cluster.target import Target
from autopar.ir.sharding import MeshShape
from autopar.planner.planned import Planned
from autopar.runtime.aot.launch import compile_ahead
from autopar.runtime.aot.program import abstract_mesh
from autopar.verifying.programs import programs_of
from tests.runtime.aot_programs import needs_gpu_compiler

WIDTH = 4096


def told_and_compiled(planned: Planned, cluster: Cluster) -> tuple[int, int]:
    """The peak of a step's memory as it is told, and as XLA has it."""
    (program,) = programs_of(planned, cluster, Target.of(cluster))
    export: Any = program.export
    return program.peak_bytes, compile_ahead(export()).peak_bytes


@needs_gpu_compiler
@pytest.mark.parametrize("layers", [2, 3])
def test_by_xla_a_gather_and_a_scatter_hold_what_they_send(layers: int) -> None:
    """Of two devices each sends half of what it gathers, and twice what is left of a scatter."""

    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = x @ w.astype(jnp.bfloat16)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(ws: list[jax.Array], x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x)), ()

    cluster = Cluster.parse("2xh100")
    ws = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * layers
    x = jax.ShapeDtypeStruct((2 * WIDTH, WIDTH), jnp.bfloat16)
    planned = autopar.parallelize(step, cluster=cluster, mesh=2, method="fsdp", cache=False)
    told, compiled = told_and_compiled(planned.planned(ws, x), cluster)
    assert told == pytest.approx(compiled, rel=0.001)


@needs_gpu_compiler
def test_by_xla_a_product_is_written_once_more_to_be_scattered_along_its_rows() -> None:
    """Rows (a b) of a product are scattered along b, which is to lie outermost."""
    cluster = Cluster.parse("8xh100")
    mesh = abstract_mesh(MeshShape(("model",), (8,)))
    cut = NamedSharding(mesh, PartitionSpec(None, "model", None))

    def step(w: jax.Array, x: jax.Array) -> Any:
        y = jax.lax.with_sharding_constraint(x @ w.astype(jnp.bfloat16), cut)
        return w, jnp.mean(y.astype(jnp.float32) ** 2)

    w = jax.ShapeDtypeStruct((8 * WIDTH, 1024), jnp.float32)
    x = jax.ShapeDtypeStruct((16, 1024, 8 * WIDTH), jnp.bfloat16)
    pins = {"w": PartitionSpec("model", None), "x": PartitionSpec(None, None, "model")}
    planned = autopar.parallelize(step, cluster=cluster, mesh={"model": 8}, pins=pins, cache=False)
    told, compiled = told_and_compiled(planned.planned(w, x), cluster)
    assert told == pytest.approx(compiled, rel=0.001)


@needs_gpu_compiler
def test_by_xla_a_scan_takes_what_is_gathered_as_it_lies() -> None:
    """A stack and a weight along their last dims."""
    cluster = Cluster.parse("8xh100")

    def step(ws: dict[str, jax.Array], x: jax.Array) -> Any:
        def layer(carry: Any, w: jax.Array) -> Any:
            c, scale = carry
            return (jnp.tanh(c @ w) @ ws["shared"], scale * 0.5), ()

        return ws, jnp.mean(jax.lax.scan(layer, (x, 1.0), ws["stack"])[0][0])

    ws = {
        "shared": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        "stack": jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32),
    }
    pins = {"ws/shared": PartitionSpec(None, "data"), "ws/stack": PartitionSpec(None, None, "data")}
    _compare_loops(step, ws, pins, cluster, " along 1", " along 2")


@needs_gpu_compiler
def test_by_xla_what_is_gathered_for_a_while_is_written_once_more() -> None:
    cluster = Cluster.parse("8xh100")

    def step(ws: dict[str, jax.Array], x: jax.Array) -> Any:
        def layer(carry: Any) -> Any:
            c, i = carry
            return jnp.tanh(c @ ws["w"]), i + 1

        y, _ = jax.lax.while_loop(lambda carry: carry[1] < 4, layer, (x, 0))
        return ws, jnp.mean(y)

    ws = {"w": jax.ShapeDtypeStruct((4 * WIDTH, 4 * WIDTH), jnp.bfloat16)}
    _compare_loops(step, ws, {"ws/w": PartitionSpec(None, "data")}, cluster, rel=0.1)


def _compare_loops(
    step: Any,
    ws: Any,
    pins: dict[str, PartitionSpec],
    cluster: Cluster,
    *turned: str,
    rel: float = 0.01,
) -> None:
    """Checks the memory of a step, and which dims of a loop's operands come first."""
    width, dtype = next((w.shape[-1], w.dtype) for w in ws.values())
    x = jax.ShapeDtypeStruct((8 * WIDTH, width), dtype)
    pins["x"] = PartitionSpec("data", None)
    planned = autopar.parallelize(step, cluster=cluster, mesh=8, pins=pins, cache=False)
    found = planned.planned(ws, x)
    (part,) = found.program.parts
    assert re.findall(r" along \d", str(part.listing)) == [*turned]
    told, compiled = told_and_compiled(found, cluster)
    assert told == pytest.approx(compiled, rel=rel)
