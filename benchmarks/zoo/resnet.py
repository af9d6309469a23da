"""A ResNet-50 with batch norm over all rows, trained by SGD with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from benchmarks.models import Metrics, Model
from benchmarks.zoo.training import classified, images


class _Normed(TrainState):
    """A train state with the running means and variances of batch norms."""

    batch_stats: Any


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norms, and a way round them."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, side, side, channel] to side / stride and four times the features."""
        outside, strides = 4 * self.features, (self.stride, self.stride)
        h = nn.relu(_norm()(_conv(self.features, 1)(x)))
        h = nn.relu(_norm()(_conv(self.features, 3, strides)(h)))
        h = _norm(scale_init=nn.initializers.zeros)(_conv(outside, 1)(h))
        around = x if x.shape == h.shape else _norm()(_conv(outside, 1, strides)(x))
        return nn.relu(around + h)


class ResNet(nn.Module):
    """A stem, stages of blocks each at half the side and twice the features, and a head."""

    stages: Sequence[int]

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Map [batch, side, side, 3] to float32 logits, [batch, 1000]."""
        x = nn.relu(_norm()(_conv(64, 7, (2, 2))(pixels)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, count in enumerate(self.stages):
            for i in range(count):
                stride = 2 if stage and not i else 1
                x = _Bottleneck(64 * 2**stage, stride, name=f"stage{stage}_layer{i}")(x)
        x = x.mean(axis=(1, 2))
        return nn.Dense(1000, dtype="bfloat16", name="classes")(x).astype(jnp.float32)


def resnet(stages: Sequence[int] = (3, 4, 6, 3), batch: int = 256) -> Model:
    """ResNet-50 on images of 224 x 224."""
    module, example = ResNet(tuple(stages)), images(batch, 224)
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)

    def create_state(key: jax.Array) -> TrainState:
        held = module.init(key, jnp.zeros((1, 224, 224, 3)))
        new: TrainState = _Normed.create(  # type: ignore[no-untyped-call]
            apply_fn=module.apply, params=held["params"], tx=tx, batch_stats=held["batch_stats"]
        )
        return new

    def step(state: Any, batch: Any) -> tuple[TrainState, Metrics]:
        def loss_fn(params: Any) -> Any:
            held = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(held, batch["x"], mutable=["batch_stats"])
            decay = sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(params) if w.ndim > 1)
            return classified(logits, batch["y"]) + 5e-5 * decay, (new["batch_stats"], logits)

        (loss, (stats, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        new: Any = state.apply_gradients(grads=grads, batch_stats=stats)
        return new, {"loss": loss, "hits": jnp.mean(logits.argmax(-1) == batch["y"])}

    return Model(create_state, step, example)


_norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype="bfloat16")


def _conv(features: int, side: int, strides: tuple[int, int] = (1, 1)) -> nn.Conv:
    return nn.Conv(features, (side, side), strides, use_bias=False, dtype="bfloat16")
