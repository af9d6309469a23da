"""Wide residual networks of bottleneck blocks, as Alpa's benchmark has them, with group norm."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.models import Model
from benchmarks.zoo.training import classified, images, trained


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, the second `widen` times as wide, and a way round them."""

    features: int
    widen: int
    stride: int
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, side, side, channel] to side / stride and four times the features."""
        inside, outside = self.features * self.widen, self.features * 4
        around, strides = x, (self.stride, self.stride)
        kind = self.dtype
        h = nn.relu(_norm(_conv(self.features, 1, kind)(x), kind))
        h = nn.relu(_norm(_conv(inside, 3, kind, strides)(h), kind))
        h = _norm(_conv(outside, 1, kind)(h), kind)
        if around.shape != h.shape:
            around = _norm(_conv(outside, 1, kind, strides)(around), kind)
        return nn.relu(around + h)


class WideResNet(nn.Module):
    """A stem, stages of blocks each at half the side and twice the features, and a head."""

    stages: Sequence[int]
    features: int
    widen: int
    classes: int
    remat: bool
    dtype: str

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Map [batch, side, side, 3] to float32 logits, [batch, classes]."""
        x = nn.relu(_norm(_conv(self.features, 7, self.dtype, (2, 2))(pixels), self.dtype))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        block = nn.remat(Bottleneck) if self.remat else Bottleneck
        for stage, count in enumerate(self.stages):
            for i in range(count):
                stride = 2 if stage and not i else 1
                name = f"stage{stage}_layer{i}"
                features = self.features * 2**stage
                x = block(features, self.widen, stride, self.dtype, name=name)(x)
        x = x.mean(axis=(1, 2))
        return nn.Dense(self.classes, dtype=self.dtype, name="classes")(x).astype(jnp.float32)


def wide_resnet(
    stages: Sequence[int] = (3, 4, 6, 3),
    features: int = 320,
    widen: int = 2,
    side: int = 224,
    classes: int = 1024,
    batch: int = 256,
    remat: bool = False,
    dtype: str = "bfloat16",
) -> Model:
    """WideResNet-50; by default about a thousand million parameters."""
    module = WideResNet(tuple(stages), features, widen, classes, remat, dtype)
    return trained(module, images(batch, side), classified)


def _conv(features: int, side: int, dtype: str, strides: tuple[int, int] = (1, 1)) -> nn.Conv:
    return nn.Conv(features, (side, side), strides, use_bias=False, dtype=dtype)


def _norm(x: jax.Array, dtype: str) -> jax.Array:
    """Group norm of 32 groups, in a module of its own."""
    normed: jax.Array = nn.GroupNorm(32, dtype=dtype)(x)
    return normed
