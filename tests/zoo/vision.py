"""Convolutional networks in Flax linen: wide residual networks and a small U-Net."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from tests.zoo.case import (
    BATCH,
    Batch,
    Case,
    Metrics,
    Optimizer,
    classes_batch,
    make_optimizer,
    token_cross_entropy,
)

SIDE, CLASSES = 8, 10


class Norm(nn.Module):
    """Group norm with an odd number of groups, or batch norm in training mode."""

    batch: bool
    groups: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.batch:
            return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        return nn.GroupNorm(self.groups)(x)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, and a 1x1 on the way round where the shape changes."""

    features: int
    stride: int
    batch_norm: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        strides = (self.stride, self.stride)
        h = nn.silu(Norm(self.batch_norm, 4)(x))
        around = x
        if x.shape[-1] != self.features or self.stride != 1:
            around = nn.Conv(self.features, (1, 1), strides, use_bias=False)(h)
        h = nn.Conv(self.features, (3, 3), strides, use_bias=False)(h)
        h = nn.silu(Norm(self.batch_norm, 3)(h))
        return around + nn.Conv(self.features, (3, 3), use_bias=False)(h)


class WideResNet(nn.Module):
    """A stem, three blocks (24, 48 and 48 features) and global mean pooling."""

    batch_norm: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        for features, stride in ((24, 1), (48, 2), (48, 1)):
            x = ResidualBlock(features, stride, self.batch_norm)(x)
        x = nn.silu(Norm(self.batch_norm, 3)(x))
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


def wide_resnet_gn(optimizer: Optimizer) -> Case:
    """A residual network with group norm."""
    model, tx = WideResNet(batch_norm=False), make_optimizer(optimizer)

    def create_state(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, SIDE, SIDE, 3)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = state.apply_fn({"params": params}, batch["x"])
            return token_cross_entropy(logits, batch["y"]), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        hits = jnp.sum(jnp.argmax(logits, axis=-1) == batch["y"])
        return state.apply_gradients(grads=grads), {"loss": loss, "hits": hits}

    return Case("wide_resnet_gn", create_state, step, classes_batch((SIDE, SIDE, 3), CLASSES))


class BatchNormState(TrainState):
    """A Flax train state with the running statistics of batch norm."""

    batch_stats: Any


def wide_resnet_bn(optimizer: Optimizer) -> Case:
    """A residual network with batch norm over the whole batch, and momentum with plain SGD."""
    model = WideResNet(batch_norm=True)
    momentum = optax.sgd(0.02, 0.9, nesterov=True)
    tx = make_optimizer("adam", eps=1e-2) if optimizer == "adam" else momentum

    def create_state(key: jax.Array) -> BatchNormState:
        variables = model.init(key, jnp.zeros((1, SIDE, SIDE, 3)))
        return BatchNormState.create(  # type: ignore[no-untyped-call]
            apply_fn=model.apply,
            params=variables["params"],
            tx=tx,
            batch_stats=variables["batch_stats"],
        )

    def step(state: BatchNormState, batch: Any) -> tuple[BatchNormState, Metrics]:
        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
            return token_cross_entropy(logits, batch["y"]), new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        new = state.apply_gradients(grads=grads, batch_stats=stats)  # type: ignore[no-untyped-call]
        return new, {"loss": loss}

    return Case("wide_resnet_bn", create_state, step, classes_batch((SIDE, SIDE, 3), CLASSES))


class GeluConv(nn.Module):
    """A 3x3 convolution with a bias, then gelu."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.he_normal()
        return nn.gelu(nn.Conv(self.features, (3, 3), kernel_init=init)(x))


class UNet(nn.Module):
    """Down by max pooling and by stride, up by transposed convolution and by resize."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return an image of one channel, [batch, side, side]."""
        one = GeluConv(8)(GeluConv(8)(x))
        two = GeluConv(16)(nn.max_pool(one, (2, 2), strides=(2, 2)))
        low = GeluConv(24)(nn.Conv(24, (3, 3), (2, 2))(two))
        up = nn.ConvTranspose(16, (2, 2), strides=(2, 2))(low)
        two = GeluConv(16)(jnp.concatenate([two, up], axis=-1))
        b, h, w, c = two.shape
        up = jax.image.resize(two, (b, 2 * h, 2 * w, c), "nearest")
        one = GeluConv(8)(jnp.concatenate([one, up], axis=-1))
        return nn.Conv(1, (1, 1))(one)[..., 0]


def unet(optimizer: Optimizer) -> Case:
    """Segmentation into two classes with a skip connection at each resolution."""
    model, tx, side = UNet(), make_optimizer(optimizer), 16

    def create_state(key: jax.Array) -> dict[str, Any]:
        params = model.init(key, jnp.zeros((1, side, side, 3)))["params"]
        return {"params": params, "opt_state": tx.init(params)}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = jnp.asarray(model.apply({"params": params}, batch["image"]))
        return optax.sigmoid_binary_cross_entropy(logits, batch["mask"]).mean()

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Metrics]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    def batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        image = rng.standard_normal((BATCH, side, side, 3), dtype=np.float32)
        return {"image": image, "mask": (image.sum(axis=-1) > 0.0).astype(np.float32)}

    return Case("unet", create_state, step, batch)
