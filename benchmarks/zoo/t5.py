"""A T5-like encoder-decoder: two scans over layers, relative positions, and cross-attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models import Model
from benchmarks.zoo.functional import (
    Marks,
    Params,
    Shapes,
    attention,
    attention_shapes,
    dense_shapes,
    embedded,
    functional,
    mlp,
    next_token_loss,
    norm_shapes,
    normed,
    stacked,
    through_layers,
)

BUCKETS, FARTHEST = 32, 128


def t5(
    layers: int = 24,
    width: int = 1024,
    heads: int = 16,
    hidden: int = 2816,
    vocabulary: int = 32128,
    sequence: int = 512,
    batch: int = 64,
    remat: bool = False,
) -> Model:
    """T5 1.1 large: so many layers in the encoder and as many in the decoder, gated gelu."""
    ids = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    table: Shapes = {"embedding": (BUCKETS, heads)}
    shapes: Shapes = {
        "tokens": {"embedding": (vocabulary, width)},
        "encoder": {
            "layers": stacked(layers, _layer_shapes(width, hidden, crosses=False)),
            "distances": table, "norm": norm_shapes(width, bias=False),
        },
        "decoder": {
            "layers": stacked(layers, _layer_shapes(width, hidden, crosses=True)),
            "distances": table,
        },
        "norm": norm_shapes(width, bias=False),
        "head": dense_shapes(width, vocabulary, bias=False),
    }  # fmt: skip

    def loss_of(params: Params, batch: Any, marks: Marks) -> jax.Array:
        source, target = (
            embedded(params["tokens"], "tokens", batch[n], marks) for n in ("source", "tokens")
        )
        own = params["encoder"]
        encode = partial(_layer, "encoder/layers", heads, marks, None, _near(own, sequence, False))
        memory = through_layers(encode, source, own["layers"], remat)
        memory = marks.value("normed", normed(own["norm"], memory))
        own = params["decoder"]
        decode = partial(_layer, "decoder/layers", heads, marks, memory, _near(own, sequence, True))
        x = through_layers(decode, target, own["layers"], remat)
        return next_token_loss(params, x, batch["targets"], marks)

    return functional(shapes, loss_of, {"source": ids, "tokens": ids, "targets": ids})


def _layer_shapes(width: int, hidden: int, crosses: bool) -> Shapes:
    gated = {
        "up": dense_shapes(width, hidden, bias=False),
        "gate": dense_shapes(width, hidden, bias=False),
        "down": dense_shapes(hidden, width, bias=False),
    }
    norm, attends = norm_shapes(width, bias=False), attention_shapes(width, bias=False)
    cross: Shapes = {"norm_cross": norm, "cross": attends} if crosses else {}
    return {"norm_1": norm, "attention": attends, **cross, "norm_2": norm, "mlp": gated}


def _layer(
    path: str,
    heads: int,
    marks: Marks,
    memory: jax.Array | None,
    bias: jax.Array,
    x: jax.Array,
    own: Params,
) -> jax.Array:
    """One layer of the encoder or, where there is a memory, of the decoder."""
    y = marks.value("normed", normed(own["norm_1"], x))
    causal = memory is not None
    x = x + attention(own["attention"], f"{path}/attention", y, heads, marks, None, causal, bias)
    if memory is not None:
        y = marks.value("normed", normed(own["norm_cross"], x))
        x = x + attention(own["cross"], f"{path}/cross", y, heads, marks, memory)
    y = marks.value("normed", normed(own["norm_2"], x))
    return marks.value("residual", x + mlp(own["mlp"], f"{path}/mlp", y, marks))


def _near(params: Params, length: int, causal: bool) -> jax.Array:
    """A learned number for each head and each bucket of distances, [head, time, time]."""
    steps = np.arange(length)
    bias: jax.Array = params["distances"]["embedding"][_buckets(steps - steps[:, None], causal)]
    return bias.transpose(2, 0, 1)


def _buckets(distance: np.ndarray, causal: bool) -> np.ndarray:
    """T5's buckets: one a step nearby, then ever wider ones; both sides apart unless causal."""
    count = BUCKETS if causal else BUCKETS // 2
    sided = 0 if causal else count * (distance > 0)
    far = np.maximum(-distance, 0) if causal else np.abs(distance)
    near = count // 2
    share = np.log(np.maximum(far, 1) / near) / np.log(FARTHEST / near)
    wide = np.minimum(near + (share * (count - near)).astype(int), count - 1)
    found: np.ndarray = sided + np.where(far < near, far, wide)
    return found
