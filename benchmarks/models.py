"""Language models of any size, as shapes: every benchmark plans or compiles one of these.

Each function returns `(create_state, step, example_batch)`: the state is made from a random key,
the step maps `(state, batch)` to `(state, metrics)`, and the batch holds `jax.ShapeDtypeStruct`s.
Nothing is allocated until someone calls `create_state`, so a model may be far larger than the
machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

Batch: TypeAlias = dict[str, jax.ShapeDtypeStruct]
Metrics: TypeAlias = dict[str, jax.Array]


class Model(NamedTuple):
    """A train step, what it starts from and what it is fed."""

    create_state: Callable[[jax.Array], TrainState]
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    example_batch: Batch


class Options(TypedDict, total=False):
    """How a model is trained: `adamw` or `sgd`, scanned layers, rematerialised ones, compute."""

    optimizer: str
    scan: bool
    remat: bool
    dtype: str


class LongOptions(Options, total=False):
    """The same for the families whose shape needs all the positional arguments."""

    sequence: int
    batch: int


@dataclass(frozen=True)
class Sizes:
    """Everything that shapes a decoder; `kv_heads` and `experts` say which family it is of.

    `experts` of 0 means a dense MLP; else one layer in `experts_every` has them. `gated` means
    Llama: a gated MLP, no biases, RMS norms and rotary positions, where GPT-2 has gelu, biases,
    layer norms and learned positions.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    sequence: int
    gated: bool = False
    experts: int = 0
    top: int = 2
    capacity_factor: float = 1.25
    experts_every: int = 1
    dtype: str = "bfloat16"

    @property
    def head(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads


def rotate(x: jax.Array) -> jax.Array:
    """Turn the feature pairs of [batch, time, ..., head] by angles that grow with time."""
    length, half = x.shape[1], x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * rates
    angles = angles.reshape(length, *[1] * (x.ndim - 3), half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    one, two = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


class Attention(nn.Module):
    """Causal attention in which `heads / kv_heads` query heads share a key and value head."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, time, width] to the same shape."""
        s, (b, t, _) = self.sizes, x.shape
        bias = not s.gated
        q = nn.Dense(s.width, use_bias=bias, dtype=s.dtype, name="query")(x)
        k = nn.Dense(s.kv_heads * s.head, use_bias=bias, dtype=s.dtype, name="key")(x)
        v = nn.Dense(s.kv_heads * s.head, use_bias=bias, dtype=s.dtype, name="value")(x)
        q = q.reshape(b, t, s.kv_heads, s.heads // s.kv_heads, s.head)
        k, v = (part.reshape(b, t, s.kv_heads, s.head) for part in (k, v))
        q, k = (rotate(q), rotate(k)) if s.gated else (q, k)
        scores = jnp.einsum("btkgc,bskc->bkgts", q, k).astype(jnp.float32) * s.head**-0.5
        causal = jnp.tril(jnp.ones((t, t), dtype=bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(x.dtype)
        mixed = jnp.einsum("bkgts,bskc->btkgc", weights, v).reshape(b, t, s.width)
        return nn.Dense(s.width, use_bias=bias, dtype=s.dtype, name="out")(mixed)


class Mlp(nn.Module):
    """Two matrices around gelu, or three with a gate."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [..., width] to the same shape."""
        s = self.sizes
        bias = not s.gated
        h = nn.Dense(s.hidden, use_bias=bias, dtype=s.dtype, name="up")(x)
        if s.gated:
            h = h * nn.silu(nn.Dense(s.hidden, use_bias=False, dtype=s.dtype, name="gate")(x))
        else:
            h = nn.gelu(h)
        return nn.Dense(s.width, use_bias=bias, dtype=s.dtype, name="down")(h)


class Experts(nn.Module):
    """A GShard layer: dispatch and combine are einsums, and each sequence is one group."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [group, token, width] to the same shape; sow each group's balance loss."""
        s = self.sizes
        gates = jax.nn.softmax(nn.Dense(s.experts, use_bias=False, name="gate")(x))
        combine, choice = self.routes(gates)
        balance = jnp.mean(gates.mean(axis=1) * choice.mean(axis=1)) * s.experts**2
        self.sow("losses", "balance", balance)
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        up = self.param("up", init, (s.experts, s.width, s.hidden)).astype(s.dtype)
        down = self.param("down", init, (s.experts, s.hidden, s.width)).astype(s.dtype)
        mask = jnp.greater(combine, 0.0).astype(s.dtype)
        inputs = jnp.einsum("gtec,gtd->egcd", mask, x)
        hidden = nn.gelu(jnp.einsum("egcd,edh->egch", inputs, up))
        outputs = jnp.einsum("egch,ehd->egcd", hidden, down)
        return jnp.einsum("gtec,egcd->gtd", combine.astype(s.dtype), outputs)

    def routes(self, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights, [group, token, expert, slot], and the first choice, one-hot over experts."""
        s, (groups, tokens, experts) = self.sizes, gates.shape
        capacity = max(1, int(s.capacity_factor * s.top * tokens / experts))
        used, left = jnp.zeros((groups, 1, experts)), gates
        combine, choices = jnp.zeros((groups, tokens, experts, capacity)), list[jax.Array]()
        for _ in range(s.top):
            choice = jax.nn.one_hot(jnp.argmax(left, axis=-1), experts)
            place = (jnp.cumsum(choice, axis=1) - 1.0 + used) * choice
            slot = jax.nn.one_hot(place.sum(axis=-1).astype(jnp.int32), capacity)
            kept = gates * choice * (place < capacity)
            combine = combine + kept[..., None] * slot[:, :, None, :]
            used, left = used + choice.sum(axis=1, keepdims=True), left * (1.0 - choice)
            choices.append(choice)
        return combine / (combine.sum(axis=(2, 3), keepdims=True) + 1e-6), choices[0]


class Block(nn.Module):
    """One pre-norm decoder layer, in the form that `nn.scan` wants."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        """Map [batch, time, width] to the same shape, and nothing beside it."""
        s = self.sizes
        norm = nn.RMSNorm if s.gated else nn.LayerNorm
        x = x + Attention(s, name="attention")(norm(dtype=s.dtype, name="norm_1")(x))
        inner = Experts(s, name="experts") if s.experts else Mlp(s, name="mlp")
        return x + inner(norm(dtype=s.dtype, name="norm_2")(x)), None


class Decoder(nn.Module):
    """Embedding, layers (unrolled or scanned, kept or rematerialised), final norm and head."""

    sizes: Sizes
    scan: bool
    remat: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map int32 [batch, time] to float32 logits, [batch, time, vocabulary]."""
        s = self.sizes
        init = nn.initializers.normal(0.02)
        x = nn.Embed(s.vocabulary, s.width, embedding_init=init, dtype=s.dtype)(tokens)
        if not s.gated:
            positions = self.param("positions", init, (s.sequence, s.width))
            x = x + positions[: tokens.shape[1]].astype(s.dtype)
        block = nn.remat(Block, prevent_cse=not self.scan) if self.remat else Block
        if self.scan:
            axes: Any = {"params": 0, "losses": 0}
            layers = nn.scan(
                block, variable_axes=axes, split_rngs={"params": True}, length=s.layers
            )
            x, _ = layers(s, name="layers")(x, None)
        else:
            plain = replace(s, experts=0)
            for i in range(s.layers):
                own = plain if (i + 1) % s.experts_every else s
                x, _ = block(own, name=f"layer{i}")(x)
        norm = nn.RMSNorm if s.gated else nn.LayerNorm
        x = norm(dtype=s.dtype, name="norm")(x)
        logits = nn.Dense(s.vocabulary, use_bias=False, dtype=s.dtype, name="head")(x)
        return logits.astype(jnp.float32)


def make_optimizer(name: str) -> optax.GradientTransformation:
    """`adamw` behind clipping by the global norm, or plain `sgd`."""
    if name == "sgd":
        return optax.sgd(1e-2)
    if name != "adamw":
        raise ValueError(f"there is no optimizer {name!r} here: choose adamw or sgd")
    rate = optax.warmup_cosine_decay_schedule(0.0, 6e-4, 2_000, 600_000, 6e-5)
    adamw = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def _build(sizes: Sizes, batch: int, options: Options | LongOptions) -> Model:
    sizes = replace(sizes, dtype=options.get("dtype", "bfloat16"))
    decoder = Decoder(sizes, options.get("scan", False), options.get("remat", False))
    tx = make_optimizer(options.get("optimizer", "adamw"))

    def create_state(key: jax.Array) -> TrainState:
        params = decoder.init(key, jnp.zeros((1, sizes.sequence), jnp.int32))["params"]
        new: TrainState = TrainState.create(apply_fn=decoder.apply, params=params, tx=tx)
        return new

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        def loss_fn(params: Any) -> jax.Array:
            variables = {"params": params}
            logits, sown = state.apply_fn(variables, batch["tokens"], mutable=["losses"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            balances = [jnp.mean(leaf) for leaf in jax.tree.leaves(sown)]
            return jnp.mean(losses) + 0.01 * sum(balances, jnp.zeros(())) / max(1, len(balances))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        new: TrainState = state.apply_gradients(grads=grads)
        return new, {"loss": loss}

    ids = jax.ShapeDtypeStruct((batch, sizes.sequence), jnp.int32)
    return Model(create_state, step, {"tokens": ids, "targets": ids})


def gpt(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocab: int = 32768,
    sequence: int = 1024,
    batch: int = 64,
    **options: Unpack[Options],
) -> Model:
    """GPT-2: learned positions, layer norm, gelu, an MLP four times as wide; by default 136 M."""
    sizes = Sizes(layers, width, heads, heads, 4 * width, vocab, sequence)
    return _build(sizes, batch, options)


def llama(
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    hidden: int = 14336,
    vocab: int = 128256,
    **options: Unpack[LongOptions],
) -> Model:
    """Llama 3: RMS norm, rotary positions, grouped-query attention, SwiGLU; by default 8 B."""
    sequence, batch = options.get("sequence", 4096), options.get("batch", 64)
    sizes = Sizes(layers, width, heads, kv_heads, hidden, vocab, sequence, gated=True)
    return _build(sizes, batch, options)


def moe(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    experts: int = 8,
    hidden: int = 3072,
    vocab: int = 32768,
    every: int = 1,
    **options: Unpack[LongOptions],
) -> Model:
    """GPT-2 with top-2 experts and a balance loss in place of one MLP in `every` few."""
    sequence, batch = options.get("sequence", 1024), options.get("batch", 64)
    sizes = Sizes(
        layers, width, heads, heads, hidden, vocab, sequence, experts=experts, experts_every=every
    )
    return _build(sizes, batch, options)
