"""A small program for compilers of hardware that is not here, and whether they are installed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.cluster import Cluster, device_order
from autopar.cluster.chip import Platform
from autopar.cluster.target import Target
from autopar.errors import VerifyError
from autopar.ir.sharding import MeshShape
from autopar.runtime.aot.extras import check_extras
from autopar.runtime.aot.program import AotProgram, abstract_mesh, export_jitted


def lacks(platform: Platform) -> str:
    """The reason why a platform's compiler cannot be asked; empty where it can."""
    try:
        check_extras(platform)
    except VerifyError as error:
        return str(error)
    return ""


needs_gpu_compiler = pytest.mark.skipif(bool(lacks("gpu")), reason=lacks("gpu"))
needs_tpu_compiler = pytest.mark.skipif(bool(lacks("tpu")), reason=lacks("tpu"))


def matmuls(cluster: str, sizes: tuple[int, int], side: int = 1024, rows: int = 512) -> AotProgram:
    """Two bf16 matmuls between an all-gather over data, a sum over model, a scatter over data.

    The weight is (side * model) x side, split over all devices, and donated.
    """
    whole, mesh = Cluster.parse(cluster), MeshShape(("data", "model"), sizes)
    abstract = abstract_mesh(mesh)
    weights = NamedSharding(abstract, PartitionSpec(("model", "data")))
    inputs = NamedSharding(abstract, PartitionSpec("data", "model"))

    def matmuls(w: jax.Array, x: jax.Array) -> jax.Array:
        y = lax.psum(x @ lax.all_gather(w, "data", axis=0, tiled=True), "model")
        return lax.psum_scatter(x.T @ y, "data", scatter_dimension=0, tiled=True)

    mapped = jax.shard_map(
        matmuls, mesh=abstract, in_specs=(weights.spec, inputs.spec), out_specs=weights.spec,
        check_vma=False,
    )  # fmt: skip
    shapes = (
        jax.ShapeDtypeStruct((side * sizes[1], side), jnp.bfloat16, sharding=weights),
        jax.ShapeDtypeStruct((rows * sizes[0], side * sizes[1]), jnp.bfloat16, sharding=inputs),
    )
    order = device_order(whole, mesh)
    return export_jitted(jax.jit(mapped), shapes, mesh, order, (0,), Target.of(whole))
