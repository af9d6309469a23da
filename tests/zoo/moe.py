"""Mixtures of experts: gating, dispatch and combine as einsums with a capacity."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState

from tests.zoo.case import (
    BATCH,
    Case,
    Metrics,
    Optimizer,
    make_optimizer,
    token_cross_entropy,
    tokens_batch,
)

LENGTH, VOCABULARY, WIDTH, EXPERTS, HIDDEN = 16, 64, 32, 8, 64


def _place(choice: jax.Array, before: jax.Array) -> jax.Array:
    """The place of each token in the queue of its expert, after `before` earlier ones.

    `choice` is one-hot, [group, token, expert]; so is the result, zero where not chosen.
    """
    queue = jnp.cumsum(choice, axis=1) - 1.0 + before[:, None, :]
    return queue * choice


def _dispatch(choice: jax.Array, place: jax.Array, capacity: int) -> jax.Array:
    """One-hot slots, [group, token, expert, slot], without the tokens that overflow."""
    kept = choice * (place < capacity)
    slot = jax.nn.one_hot(place.sum(axis=-1).astype(jnp.int32), capacity)
    return kept[..., None] * slot[:, :, None, :]


class Experts(nn.Module):
    """A GShard layer: one group for each sequence, one or two experts for each token.

    The balance loss is a mean over groups (`local`), as in GShard, or one product of means over
    the whole batch, as in Switch: then it is no sum over examples.
    """

    top: int
    local: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the output, [group, token, width], and the balance loss."""
        capacity = self.top * x.shape[1] // EXPERTS + 2
        gates = jax.nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="gate")(x))
        combine, choices, left = jnp.zeros(()), list[jax.Array](), gates
        used = jnp.zeros((x.shape[0], EXPERTS))
        for _ in range(self.top):
            choice = jax.nn.one_hot(jnp.argmax(left, axis=-1), EXPERTS)
            slots = _dispatch(choice, _place(choice, used), capacity)
            combine = combine + (gates * choice).sum(axis=-1)[..., None, None] * slots
            used, left = used + choice.sum(axis=1), left * (1.0 - choice)
            choices.append(choice)
        if self.top > 1:
            combine /= jnp.sum(combine, axis=(2, 3), keepdims=True) + 1e-3
        mask = jnp.greater(combine, 0.0).astype(x.dtype)
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        up = self.param("up", init, (EXPERTS, WIDTH, HIDDEN))
        down = self.param("down", init, (EXPERTS, HIDDEN, WIDTH))
        inputs = jnp.einsum("gtec,gtd->egcd", mask, x)
        hidden = nn.gelu(jnp.einsum("egcd,edh->egch", inputs, up))
        outputs = jnp.einsum("egch,ehd->egcd", hidden, down)
        axes = 1 if self.local else (0, 1)
        balance = jnp.mean(jnp.mean(gates, axis=axes) * jnp.mean(choices[0], axis=axes))
        return jnp.einsum("gtec,egcd->gtd", combine, outputs), balance * EXPERTS**2


class Model(nn.Module):
    """An embedding, a causal running mean that mixes time, two expert layers, a head."""

    top: int
    local: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the logits, [batch, time, vocabulary], and the mean balance loss."""
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        x += jnp.cumsum(x, axis=1) / jnp.arange(1.0, LENGTH + 1)[:, None]
        balance = jnp.zeros(())
        for i in range(2):
            h, loss = Experts(self.top, self.local, name=f"experts{i}")(nn.LayerNorm()(x))
            x, balance = x + h, balance + loss / 2
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x)), balance


def _case(name: str, model: Model, optimizer: Optimizer) -> Case:
    def create_state(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((BATCH, LENGTH), jnp.int32))["params"]
        tx = make_optimizer(optimizer)
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        def loss_fn(params: Any) -> tuple[jax.Array, Metrics]:
            logits, balance = state.apply_fn({"params": params}, batch["tokens"])
            entropy = token_cross_entropy(logits, batch["targets"])
            return entropy + 0.01 * balance, {"entropy": entropy, "balance": balance}

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, **metrics}

    return Case(name, create_state, step, tokens_batch(LENGTH, VOCABULARY))


def moe(optimizer: Optimizer) -> Case:
    """Top-2 gating with a balance loss for each group (GShard)."""
    return _case("moe", Model(top=2, local=True), optimizer)


def moe_switch(optimizer: Optimizer) -> Case:
    """Top-1 gating with a balance loss over the whole batch (Switch)."""
    return _case("moe_switch", Model(top=1, local=False), optimizer)
