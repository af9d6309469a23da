"""GPT-2 in Flax linen: unrolled, scanned with remat, tied, with dropout, with clipping."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from tests.zoo.case import (
    BATCH,
    Case,
    Metrics,
    Optimizer,
    causal_mask,
    make_optimizer,
    token_cross_entropy,
    tokens_batch,
)

LENGTH, VOCABULARY, LAYERS, WIDTH, HEADS = 16, 64, 2, 32, 8

# The gradients of the layer norms' biases are sums that nearly cancel, so Adam's eps is larger.
EPS = 1e-2


class Block(nn.Module):
    """Pre-norm attention and a four times wider MLP, with optional dropout on both branches."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        """Return the block's output, in the form that `nn.scan` wants."""
        b, t, d = x.shape
        # No bias on the keys: softmax does not see it, so its gradient is rounding noise.
        qkv = nn.Dense(3 * d, use_bias=False, name="qkv")(nn.LayerNorm()(x))
        q, k, v = (h.reshape(b, t, HEADS, d // HEADS) for h in jnp.split(qkv, 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(d // HEADS)
        scores = jnp.where(causal_mask(t), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(b, t, d)
        x = x + self._drop(nn.Dense(d, name="out")(mixed))
        h = nn.gelu(nn.Dense(4 * d, name="up")(nn.LayerNorm()(x)))
        return x + self._drop(nn.Dense(d, name="down")(h)), None

    def _drop(self, x: jax.Array) -> jax.Array:
        return nn.Dropout(self.dropout, deterministic=False)(x) if self.dropout else x


class Gpt(nn.Module):
    """Token and learned position embeddings, blocks, a final norm and a head."""

    scan: bool = False
    tied: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits, [batch, time, vocabulary]."""
        # Not 0.02: the first layer norm would magnify rounding noise by its inverse.
        init = nn.initializers.normal(0.5)
        embed = nn.Embed(VOCABULARY, WIDTH, embedding_init=init, name="wte")
        positions = self.param("wpe", init, (LENGTH, WIDTH))
        x = embed(tokens) + positions[: tokens.shape[1]]
        if self.scan:
            body = nn.remat(Block, prevent_cse=False)
            layers = nn.scan(
                body, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
            )
            x, _ = layers(name="layers")(x, None)
        else:
            for i in range(LAYERS):
                x, _ = Block(self.dropout, name=f"h{i}")(x)
        x = nn.LayerNorm(name="ln_f")(x)
        head = nn.Dense(VOCABULARY, use_bias=False, name="head")
        return embed.attend(x) * WIDTH**-0.5 if self.tied else head(x)


def _train_state(model: Gpt, key: jax.Array, tx: optax.GradientTransformation) -> TrainState:
    names = {"params": key, "dropout": key}
    params = model.init(names, jnp.zeros((BATCH, LENGTH), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def _gpt_case(name: str, model: Gpt, tx: optax.GradientTransformation) -> Case:
    def create_state(key: jax.Array) -> TrainState:
        return _train_state(model, key, tx)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["tokens"])
            return token_cross_entropy(logits, batch["targets"])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Case(name, create_state, step, tokens_batch(LENGTH, VOCABULARY))


def gpt(optimizer: Optimizer) -> Case:
    """Two unrolled layers under a Flax `TrainState`."""
    return _gpt_case("gpt", Gpt(), make_optimizer(optimizer, EPS))


def gpt_scan(optimizer: Optimizer) -> Case:
    """`nn.scan` over stacked layers, each rematerialised in the backward pass."""
    return _gpt_case("gpt_scan", Gpt(scan=True), make_optimizer(optimizer, EPS))


def tied(optimizer: Optimizer) -> Case:
    """The output head is the input embedding."""
    return _gpt_case("tied", Gpt(tied=True), make_optimizer(optimizer, EPS))


def clip(optimizer: Optimizer) -> Case:
    """Clipping by the global norm before the optimizer, AdamW with a schedule for Adam."""
    if optimizer == "adam":
        rate = optax.linear_schedule(1e-2, 1e-3, 100)
        inner = optax.adamw(rate, eps=EPS, weight_decay=0.1)
    else:
        inner = optax.sgd(0.1, momentum=0.9)
    return _gpt_case("clip", Gpt(), optax.chain(optax.clip_by_global_norm(0.5), inner))


def dropout(optimizer: Optimizer) -> Case:
    """Dropout whose typed random key is part of the state, split at each step."""
    model, tx = Gpt(dropout=0.1), make_optimizer(optimizer, EPS)

    def create_state(key: jax.Array) -> dict[str, Any]:
        init, rng = jax.random.split(key)
        return {"train": _train_state(model, init, tx), "rng": rng}

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Metrics]:
        rng, sub = jax.random.split(state["rng"])
        train: TrainState = state["train"]

        def loss_fn(params: Any) -> jax.Array:
            logits = model.apply({"params": params}, batch["tokens"], rngs={"dropout": sub})
            return token_cross_entropy(jnp.asarray(logits), batch["targets"])

        loss, grads = jax.value_and_grad(loss_fn)(train.params)
        return {"train": train.apply_gradients(grads=grads), "rng": rng}, {"loss": loss}

    return Case("dropout", create_state, step, tokens_batch(LENGTH, VOCABULARY))
