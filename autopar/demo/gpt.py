"""A byte-level GPT as its user would write it, for one device: no mesh, no sharding, no autopar.

It needs flax and optax, the extra named `demo`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState


@dataclass(frozen=True)
class GptConfig:
    """The sizes of the model, of a batch and of a whole run."""

    vocabulary: int = 256
    layers: int = 3
    width: int = 128
    heads: int = 8
    batch: int = 16
    sequence: int = 128
    steps: int = 200
    learning_rate: float = 3e-3


CONFIG = GptConfig()
QUICK = GptConfig(layers=1, width=64, sequence=64, steps=40, learning_rate=1e-2)


class Block(nn.Module):
    """Causal attention and an MLP, each on a normalized input and added to the stream."""

    config: GptConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, time, width] to the same shape."""
        b, t, d = x.shape
        heads = self.config.heads
        h = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        qkv = nn.Dense(3 * d, use_bias=False, dtype=jnp.bfloat16, name="qkv")(h)
        q, k, v = (part.reshape(b, t, heads, d // heads) for part in jnp.split(qkv, 3, axis=-1))
        scores = jnp.einsum("bqhc,bkhc->bhqk", q, k).astype(jnp.float32) * (d // heads) ** -0.5
        causal = jnp.tril(jnp.ones((t, t), dtype=bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(jnp.bfloat16)
        mixed = jnp.einsum("bhqk,bkhc->bqhc", weights, v).reshape(b, t, d)
        x = x + nn.Dense(d, dtype=jnp.bfloat16, name="out")(mixed)
        h = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        h = nn.gelu(nn.Dense(4 * d, dtype=jnp.bfloat16, name="up")(h))
        return x + nn.Dense(d, dtype=jnp.bfloat16, name="down")(h)


class Gpt(nn.Module):
    """Parameters in float32, matrix products in bfloat16, logits and loss in float32."""

    config: GptConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map int32 [batch, time] to logits, [batch, time, vocabulary]."""
        sizes = self.config
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(sizes.vocabulary, sizes.width, embedding_init=init, name="tokens")
        positions = self.param("positions", init, (sizes.sequence, sizes.width))
        x = embed(tokens) + positions[: tokens.shape[1]]
        for i in range(sizes.layers):
            x = Block(sizes, name=f"block{i}")(x)
        x = nn.LayerNorm(dtype=jnp.bfloat16, name="norm")(x)
        logits = nn.Dense(sizes.vocabulary, use_bias=False, dtype=jnp.bfloat16, name="head")(x)
        return logits.astype(jnp.float32)


def make_optimizer(config: GptConfig = CONFIG) -> optax.GradientTransformation:
    """AdamW behind clipping by the global norm, with a warm-up and a cosine decay."""
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=max(1, config.steps // 20),
        decay_steps=config.steps,
        end_value=config.learning_rate / 10,
    )
    adamw = optax.adamw(rate, b2=0.95, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def create_state(key: jax.Array, config: GptConfig = CONFIG) -> TrainState:
    """Fresh parameters and optimizer state."""
    model = Gpt(config)
    params = model.init(key, jnp.zeros((1, config.sequence), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=make_optimizer(config))


def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
    """Updates the model on `tokens` and `targets`; the metrics hold the loss, in nats a byte."""

    def loss_of(params: Any) -> jax.Array:
        return _loss(state, params, batch)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def eval_loss(state: TrainState, batch: Any) -> jax.Array:
    """The loss on a batch, with nothing learnt from it."""
    return _loss(state, state.params, batch)


def example_args(config: GptConfig = CONFIG) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """The arguments of `train_step` as shapes, so that it is planned with nothing allocated."""
    state = jax.eval_shape(lambda: create_state(jax.random.key(0), config))
    ids = jax.ShapeDtypeStruct((config.batch, config.sequence), jnp.int32)
    return state, {"tokens": ids, "targets": ids}


def _loss(state: TrainState, params: Any, batch: Any) -> jax.Array:
    logits = state.apply_fn({"params": params}, batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.mean(losses)
