"""Vision transformers, whose submodules have the names of the decoders' in `benchmarks.models`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.models import Mlp, Model, Sizes
from benchmarks.zoo.training import classified, images, trained


class Attention(nn.Module):
    """Attention of all tokens to all."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, token, width] to the same shape."""
        s, (b, t, _) = self.sizes, x.shape
        q, k, v = (
            nn.Dense(s.width, dtype=s.dtype, name=name)(x).reshape(b, t, s.heads, s.head)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bthc,bshc->bhts", q, k).astype(jnp.float32) * s.head**-0.5
        weights = jax.nn.softmax(scores).astype(x.dtype)
        mixed = jnp.einsum("bhts,bshc->bthc", weights, v).reshape(b, t, s.width)
        return nn.Dense(s.width, dtype=s.dtype, name="out")(mixed)


class Block(nn.Module):
    """One pre-norm encoder layer."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, token, width] to the same shape."""
        s = self.sizes
        x = x + Attention(s, name="attention")(nn.LayerNorm(dtype=s.dtype, name="norm_1")(x))
        return x + Mlp(s, name="mlp")(nn.LayerNorm(dtype=s.dtype, name="norm_2")(x))


class VisionTransformer(nn.Module):
    """Patches, learned positions, encoder layers, the mean of the tokens and a head."""

    sizes: Sizes
    patch: int
    classes: int
    remat: bool

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Map [batch, side, side, 3] to float32 logits, [batch, classes]."""
        s, step = self.sizes, (self.patch, self.patch)
        patches = nn.Conv(s.width, step, step, "VALID", dtype=s.dtype, name="patches")(pixels)
        x = patches.reshape(pixels.shape[0], s.sequence, s.width)
        init = nn.initializers.normal(0.02)
        x = x + self.param("positions", init, (s.sequence, s.width)).astype(s.dtype)
        block = nn.remat(Block) if self.remat else Block
        for i in range(s.layers):
            x = block(s, name=f"layer{i}")(x)
        x = nn.LayerNorm(dtype=s.dtype, name="norm")(x).mean(axis=1)
        return nn.Dense(self.classes, dtype=s.dtype, name="classes")(x).astype(jnp.float32)


def vit(
    layers: int = 24,
    width: int = 1024,
    heads: int = 16,
    side: int = 224,
    patch: int = 14,
    classes: int = 1024,
    batch: int = 512,
    remat: bool = False,
) -> Model:
    """ViT-L/14 on images of `side` pixels; by default 304 M parameters and 256 tokens."""
    tokens = (side // patch) ** 2
    sizes = Sizes(layers, width, heads, heads, 4 * width, 0, tokens)
    module = VisionTransformer(sizes, patch, classes, remat)
    return trained(module, images(batch, side), classified)
