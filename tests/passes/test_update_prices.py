"""What the update loads and stores is in the prices that shardings are chosen by."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cost.prices import Prices

CLUSTER, MESH = autopar.Cluster.parse("8xh100"), autopar.MeshShape.of("data=8")
MOMENT = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)


def decay(state: jax.Array) -> jax.Array:
    """The shortest of updates: an element-wise function of what is there."""
    return state * 0.9 + 1.0


@pytest.mark.parametrize(("spec", "share"), [(P(), 1), (P("data"), 8)])
def test_state_is_loaded_and_stored(spec: P, share: int) -> None:
    plan = autopar.plan(decay, MOMENT, cluster=CLUSTER, mesh="data=8", pins={"state": spec})
    stream = Prices(CLUSTER, MESH).elementwise
    piece = 4 * 4096 * 4096 / share
    assert plan.outcome.seconds == pytest.approx(stream(2 * piece))


def test_so_it_is_cut_up_where_that_costs_nothing() -> None:
    plan = autopar.plan(decay, MOMENT, cluster=CLUSTER, mesh="data=8")
    (state,) = plan.arguments
    assert MESH.size([axis for dim in state.sharding.dims for axis in dim]) == 8
