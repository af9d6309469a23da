"""A generative adversarial network: a generator and a critic of residual blocks, in one step.

Both losses run both networks on the same latents, so that half of what is written is written
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState

from benchmarks.models import Metrics, Model, make_optimizer


class _Up(nn.Module):
    """Two 3x3 convolutions at twice the side, and a way round them."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, side, side, channel] to twice the side and so many features."""
        h = _conv(self.features, 3)(_doubled(nn.relu(_norm()(x))))
        h = _conv(self.features, 3)(nn.relu(_norm()(h)))
        return h + _conv(self.features, 1)(_doubled(x))


class _Down(nn.Module):
    """Two 3x3 convolutions and a mean of four pixels, and a way round them."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, side, side, channel] to half the side and so many features."""
        h = _conv(self.features, 3)(nn.leaky_relu(x, 0.2))
        h = _conv(self.features, 3)(nn.leaky_relu(h, 0.2))
        pooled: jax.Array = nn.avg_pool(h + _conv(self.features, 1)(x), (2, 2), (2, 2))
        return pooled


class Adversaries(nn.Module):
    """A generator from latents to images, and a critic of images; both of so many features."""

    widths: Sequence[int]

    @nn.compact
    def __call__(self, x: jax.Array, criticize: bool) -> jax.Array:
        """Map images to a score each, or latents, [batch, channel], to images."""
        if criticize:
            x = x.astype(jnp.bfloat16)
            for i, width in enumerate(reversed(self.widths)):
                x = _Down(width, name=f"critic_{i}")(x)
            x = nn.leaky_relu(x, 0.2).mean(axis=(1, 2))
            return nn.Dense(1, dtype="bfloat16", name="critic_score")(x)[:, 0].astype(jnp.float32)
        x = nn.Dense(16 * self.widths[0], dtype="bfloat16", name="generator_in")(x)
        x = x.reshape(-1, 4, 4, self.widths[0])
        for i, width in enumerate(self.widths):
            x = _Up(width, name=f"generator_{i}")(x)
        image: jax.Array = jnp.tanh(_conv(3, 3, name="generator_out")(nn.relu(_norm()(x))))
        return image


def gan(widths: Sequence[int] = (1024, 1024, 512, 256, 128), batch: int = 256) -> Model:
    """Images of 128 x 128, of which the critic tells real ones from those of the generator."""
    module, tx = Adversaries(tuple(widths)), make_optimizer("adamw")
    side = 4 * 2 ** len(widths)

    def create_state(key: jax.Array) -> TrainState:
        z, image = jnp.zeros((1, 128)), jnp.zeros((1, side, side, 3))
        params = {
            "generator": module.init(key, z, False)["params"],
            "critic": module.init(key, image, True)["params"],
        }
        new: TrainState = TrainState.create(apply_fn=module.apply, params=params, tx=tx)
        return new

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        def run(params: Any, x: jax.Array, criticize: bool) -> jax.Array:
            out: jax.Array = state.apply_fn({"params": params}, x, criticize)
            return out

        def critic_loss(critic: Any) -> jax.Array:
            forged = run(state.params["generator"], batch["latents"], False)
            scores = run(critic, batch["images"], True), run(critic, forged, True)
            return jnp.mean(jax.nn.softplus(-scores[0]) + jax.nn.softplus(scores[1]))

        def generator_loss(generator: Any) -> jax.Array:
            forged = run(generator, batch["latents"], False)
            return jnp.mean(jax.nn.softplus(-run(state.params["critic"], forged, True)))

        losses, grads = {}, {}
        for name, loss in (("critic", critic_loss), ("generator", generator_loss)):
            losses[name], grads[name] = jax.value_and_grad(loss)(state.params[name])
        new: TrainState = state.apply_gradients(grads=grads)
        return new, losses

    example = {
        "images": jax.ShapeDtypeStruct((batch, side, side, 3), jnp.float32),
        "latents": jax.ShapeDtypeStruct((batch, 128), jnp.float32),
    }
    return Model(create_state, step, example)


def _conv(features: int, side: int, name: str | None = None) -> nn.Conv:
    return nn.Conv(features, (side, side), dtype="bfloat16", name=name)


def _norm() -> nn.GroupNorm:
    return nn.GroupNorm(32, dtype="bfloat16")


def _doubled(x: jax.Array) -> jax.Array:
    """Each pixel four times."""
    return x.repeat(2, axis=1).repeat(2, axis=2)
