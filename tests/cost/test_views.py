"""Views that products have of what they read, as XLA for GPUs compiles them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cost.sizes import Sizes
from autopar.cost.views import View, product_views
from autopar.planner.planned import Planned
from tests.cost.test_merged_products import arrays, planned

ROWS = ((0, 1), (2,))  # of [batch, sequence, features], with the former two as one


def views(found: Planned) -> list[View]:
    """All views that a step has, dims that a product does not have left out, in its order."""
    (part,) = found.program.parts
    every = product_views(part.listing.block, Sizes(found.graph, found.plan.mesh, "gpu"))
    return [tuple(dims for dims in v if dims) for own in every.values() for v in own.values()]


def layers(between: Any, gives_hidden: bool = False) -> Planned:
    """Two products with something between them."""

    def step(weights: Any, x: jax.Array) -> Any:
        one, bias, two = weights
        made = between(x @ one + bias)
        return weights, (made @ two, made if gives_hidden else 0)

    return planned(step, arrays((512, 512), (512,), (512, 512)), *arrays((8, 256, 512)))


@pytest.mark.parametrize("between", [jax.nn.relu, jax.nn.gelu, lambda h: 2 * h])
def test_what_is_made_of_a_product_item_by_item_needs_no_view(between: Any) -> None:
    assert views(layers(between)) == [ROWS]  # of the step's own argument


def test_what_is_given_back_has_all_dims_but_is_made_without() -> None:
    assert views(layers(jax.nn.relu, gives_hidden=True)) == [ROWS]


@pytest.mark.parametrize(
    "between", [lambda h: jnp.cumsum(h, 1), lambda h: jax.nn.softmax(h), lambda h: h * h[:, :1]]
)
def test_what_has_all_dims_is_viewed(between: Any) -> None:
    assert views(layers(between)) == [ROWS, ROWS]


def test_a_gradient_has_views_of_its_own_of_what_a_checkpoint_saves() -> None:
    def step(weights: Any, x: jax.Array) -> Any:
        @jax.checkpoint
        def loss(weights: Any, x: jax.Array) -> jax.Array:
            one, two = weights
            return jnp.sum(jnp.sin(jax.nn.relu(x @ one) @ two))

        return jax.grad(loss)(weights, x), ()

    found = views(planned(step, arrays((512, 512), (512, 512)), *arrays((8, 256, 512))))
    assert ((2,), (0, 1)) in found


def test_matrices_are_read_as_they_lie() -> None:
    def step(weights: Any, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(x @ w))

        return jax.grad(loss)(weights), ()

    assert views(planned(step, *arrays((512, 512), (1024, 512)))) == []
