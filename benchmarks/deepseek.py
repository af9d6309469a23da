"""A DeepSeek-V3-like decoder, as shapes: latent attention, and many experts beside a shared one.

After the technical report (DeepSeek-AI, 2024), section 2.1: 61 layers of which 3 are dense, 256
routed experts of which a token takes 8. Experts are dispatched as in GShard, in small groups of
tokens. Left out: the multi-token head, the limit on nodes a token may go to, and the routing bias,
which is kept up outside of the gradient.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from benchmarks.models import Metrics, Model, make_optimizer, rotate


@dataclass(frozen=True)
class Sizes:
    """Everything that shapes the decoder; the figures are the full model's."""

    layers: int = 61
    dense_layers: int = 3
    width: int = 7168
    heads: int = 128
    query_rank: int = 1536
    key_rank: int = 512
    plain: int = 128  # features of a head that carry no position, and of a value
    rotary: int = 64
    dense_hidden: int = 18432
    experts: int = 256
    top: int = 8
    hidden: int = 2048
    group: int = 128  # tokens that are dispatched together
    capacity_factor: float = 1.25
    vocabulary: int = 129280
    sequence: int = 4096

    @property
    def capacity(self) -> int:
        """Tokens of a group that an expert takes."""
        return max(1, int(self.capacity_factor * self.top * self.group / self.experts))


def dense(features: int, name: str) -> nn.Dense:
    """A product with a weight and no bias, in bfloat16."""
    return nn.Dense(features, use_bias=False, dtype=jnp.bfloat16, name=name)


def norm(name: str) -> nn.RMSNorm:
    """A root-mean-square norm in bfloat16."""
    return nn.RMSNorm(dtype=jnp.bfloat16, name=name)


class LatentAttention(nn.Module):
    """Queries, keys and values out of low-rank latents; one rotary key serves all heads."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, time, width] to the same shape."""
        s, (b, t, _) = self.sizes, x.shape
        q = norm("query_norm")(dense(s.query_rank, "query_down")(x))
        q = dense(s.heads * (s.plain + s.rotary), "query_up")(q)
        q = q.reshape(b, t, s.heads, s.plain + s.rotary)
        latent = norm("key_norm")(dense(s.key_rank, "key_down")(x))
        shared = rotate(dense(s.rotary, "key_rotary")(x).reshape(b, t, 1, s.rotary))[:, :, 0]
        k = dense(s.heads * s.plain, "key_up")(latent).reshape(b, t, s.heads, s.plain)
        v = dense(s.heads * s.plain, "value_up")(latent).reshape(b, t, s.heads, s.plain)
        scores = jnp.einsum("bthc,bshc->bhts", q[..., : s.plain], k)
        scores += jnp.einsum("bthc,bsc->bhts", rotate(q[..., s.plain :]), shared)
        scaled = scores.astype(jnp.float32) * (s.plain + s.rotary) ** -0.5
        causal = jnp.tril(jnp.ones((t, t), dtype=bool))
        weights = jax.nn.softmax(jnp.where(causal, scaled, -1e30)).astype(x.dtype)
        mixed = jnp.einsum("bhts,bshc->bthc", weights, v).reshape(b, t, s.heads * s.plain)
        return dense(s.width, "out")(mixed)


class Gated(nn.Module):
    """Three matrices around silu."""

    width: int
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [..., width] to the same shape."""
        h = nn.silu(dense(self.hidden, "gate")(x)) * dense(self.hidden, "up")(x)
        return dense(self.width, "down")(h)


class Experts(nn.Module):
    """Routed experts beside a shared one; a token goes to the `top` of them."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, time, width] to the same shape."""
        s, shape = self.sizes, x.shape
        tokens = x.reshape(-1, s.group, s.width)
        scores = jax.nn.sigmoid(nn.Dense(s.experts, use_bias=False, name="router")(tokens))
        combine = self._combine(scores)
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        gate, up = (
            self.param(n, init, (s.experts, s.width, s.hidden)).astype(x.dtype)
            for n in ("gate", "up")
        )
        down = self.param("down", init, (s.experts, s.hidden, s.width)).astype(x.dtype)
        given = jnp.einsum("gtec,gtd->egcd", (combine > 0).astype(x.dtype), tokens)
        hidden = nn.silu(jnp.einsum("egcd,edh->egch", given, gate))
        hidden *= jnp.einsum("egcd,edh->egch", given, up)
        outputs = jnp.einsum("egch,ehd->egcd", hidden, down)
        routed = jnp.einsum("gtec,egcd->gtd", combine.astype(x.dtype), outputs).reshape(shape)
        return routed + Gated(s.width, s.hidden, name="shared")(x)

    def _combine(self, scores: jax.Array) -> jax.Array:
        """Weights of tokens at the places of experts: [group, token, expert, slot]."""
        s = self.sizes
        best, chosen = jax.lax.top_k(scores, s.top)
        best = best / best.sum(axis=-1, keepdims=True)
        picks = jax.nn.one_hot(chosen, s.experts)
        taken = picks.sum(axis=2)
        slot = (jnp.cumsum(taken, axis=1) - 1.0) * taken
        weight = jnp.einsum("gtk,gtke->gte", best, picks) * taken * (slot < s.capacity)
        return weight[..., None] * jax.nn.one_hot(slot.astype(jnp.int32), s.capacity)


class Block(nn.Module):
    """One pre-norm layer, in the form that `nn.scan` wants."""

    sizes: Sizes
    routed: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        """Map [batch, time, width] to the same shape, and nothing beside it."""
        s = self.sizes
        x = x + LatentAttention(s, name="attention")(norm("norm_1")(x))
        inner = Experts(s, name="experts") if self.routed else Gated(s.width, s.dense_hidden)
        return x + inner(norm("norm_2")(x)), None


class Decoder(nn.Module):
    """Embedding, dense layers, routed layers (both scanned and rematerialized), head."""

    sizes: Sizes

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map int32 [batch, time] to float32 logits, [batch, time, vocabulary]."""
        s = self.sizes
        x = nn.Embed(s.vocabulary, s.width, dtype=jnp.bfloat16)(tokens)
        for name, routed, length in (
            ("dense", False, s.dense_layers),
            ("routed", True, s.layers - s.dense_layers),
        ):
            layers = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=length,
            )
            x, _ = layers(s, routed, name=name)(x, None)
        return dense(s.vocabulary, "head")(norm("norm")(x)).astype(jnp.float32)


def deepseek(sizes: Sizes = Sizes(), batch: int = 256, optimizer: str = "adamw") -> Model:
    """By default the full 671 B."""
    decoder, tx = Decoder(sizes), make_optimizer(optimizer)

    def create_state(key: jax.Array) -> TrainState:
        params = decoder.init(key, jnp.zeros((1, sizes.sequence), jnp.int32))["params"]
        new: TrainState = TrainState.create(apply_fn=decoder.apply, params=params, tx=tx)
        return new

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["tokens"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return jnp.mean(losses)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        new: TrainState = state.apply_gradients(grads=grads)
        return new, {"loss": loss}

    ids = jax.ShapeDtypeStruct((batch, sizes.sequence), jnp.int32)
    return Model(create_state, step, {"tokens": ids, "targets": ids})
