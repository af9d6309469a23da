"""A diffusion U-Net on latent images: residual blocks, and attention where the side is small."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.models import Model
from benchmarks.zoo.training import denoised, trained


class Residual(nn.Module):
    """Two 3x3 convolutions behind group norms, and a way round them."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, side, side, channel] to so many features."""
        h = _conv(self.features, 3)(nn.silu(_norm()(x)))
        h = _conv(self.features, 3)(nn.silu(_norm()(h)))
        return h + (x if x.shape[-1] == self.features else _conv(self.features, 1)(x))


class Attention(nn.Module):
    """Attention of all pixels to all, in heads of 64."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, side, side, channel] to the same shape."""
        b, rows, columns, width = x.shape
        flat = _norm()(x).reshape(b, rows * columns, width)
        q, k, v = (
            nn.Dense(width, use_bias=False, dtype="bfloat16", name=name)(flat).reshape(
                b, rows * columns, width // 64, 64
            )
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bthc,bshc->bhts", q, k).astype(jnp.float32) / 8
        mixed = jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores).astype(x.dtype), v)
        out = nn.Dense(width, dtype="bfloat16", name="out")(mixed.reshape(flat.shape))
        return x + out.reshape(x.shape)


class UNet(nn.Module):
    """Levels of blocks going down, and going up again with what was kept on the way down."""

    widths: Sequence[int]
    blocks: int
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, side, side, channel] to the same shape."""
        residual = nn.remat(Residual) if self.remat else Residual
        attention = nn.remat(Attention) if self.remat else Attention
        channels, deepest = x.shape[-1], len(self.widths) - 1
        x = _conv(self.widths[0], 3)(x)
        kept: list[jax.Array] = []
        for level, width in enumerate(self.widths):
            for _ in range(self.blocks):
                x = residual(width)(x)
                x = attention()(x) if level else x
                kept.append(x)
            x = _conv(width, 3, 2)(x) if level < deepest else x
        x = residual(self.widths[-1])(attention()(residual(self.widths[-1])(x)))
        for level, width in reversed(list(enumerate(self.widths))):
            x = _conv(width, 3)(_doubled(x)) if level < deepest else x
            for _ in range(self.blocks):
                x = residual(width)(jnp.concatenate([x, kept.pop()], axis=-1))
                x = attention()(x) if level else x
        return _conv(channels, 3)(nn.silu(_norm()(x)))


def unet(
    blocks: int = 2,
    widths: Sequence[int] = (320, 640, 1280, 1280),
    side: int = 64,
    channels: int = 4,
    batch: int = 64,
    remat: bool = False,
) -> Model:
    """A U-Net of Stable Diffusion's widths, without the text; so many blocks a level."""
    module = UNet(tuple(widths), blocks, remat)
    latents = jax.ShapeDtypeStruct((batch, side, side, channels), jnp.float32)
    return trained(module, {"x": latents, "y": latents}, denoised)


def _conv(features: int, side: int, stride: int = 1) -> nn.Conv:
    return nn.Conv(features, (side, side), (stride, stride), dtype="bfloat16")


def _norm() -> nn.GroupNorm:
    return nn.GroupNorm(32, dtype="bfloat16")


def _doubled(x: jax.Array) -> jax.Array:
    """Each pixel four times, as a square."""
    b, rows, columns, width = x.shape
    wide = jnp.broadcast_to(x[:, :, None, :, None, :], (b, rows, 2, columns, 2, width))
    return wide.reshape(b, 2 * rows, 2 * columns, width)
