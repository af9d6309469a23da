"""A vision transformer in Flax linen with the library's own attention."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState

from tests.zoo.case import (
    Case,
    Metrics,
    Optimizer,
    classes_batch,
    make_optimizer,
    token_cross_entropy,
)

SIDE, PATCH, LAYERS, WIDTH, HEADS, CLASSES = 16, 4, 2, 32, 8, 10


class EncoderBlock(nn.Module):
    """Pre-norm `nn.MultiHeadDotProductAttention` and an MLP."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(h)
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)), approximate=False)
        return x + nn.Dense(WIDTH)(h)


class Vit(nn.Module):
    """Patches by a strided convolution, a class token in front, positions, encoder, head."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (PATCH, PATCH), (PATCH, PATCH), padding="VALID")(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        # Not 0.02: a layer norm of a tiny token would magnify rounding noise by its inverse.
        init = nn.initializers.normal(0.5)
        first = self.param("class_token", init, (1, 1, WIDTH))
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, WIDTH)), x], axis=1)
        x = x + self.param("positions", init, (1, x.shape[1], WIDTH))
        for _ in range(LAYERS):
            x = EncoderBlock()(x)
        return nn.Dense(CLASSES)(nn.LayerNorm()(x)[:, 0])


def vit(optimizer: Optimizer) -> Case:
    """Classification from the class token: 17 tokens, a length that nothing divides."""
    model, tx = Vit(), make_optimizer(optimizer, eps=1e-2)

    def create_state(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, SIDE, SIDE, 3)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["x"])
            return token_cross_entropy(logits, batch["y"])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Case("vit", create_state, step, classes_batch((SIDE, SIDE, 3), CLASSES))
