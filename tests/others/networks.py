"""Networks of haiku, flax linen, flax nnx, equinox and transformers."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training import train_state

from autopar.errors import BatchStatisticError
from tests.others.case import Other, Refusal, rows, tokens

_WIDTH = 16
_value_and_grad: Any = eqx.filter_value_and_grad
_STATISTIC = Refusal(BatchStatisticError, "statistics of the whole batch")
_OF_THE_BATCH = {"microbatches": _STATISTIC, "stages": _STATISTIC}


def _adam(rate: float = 1e-2) -> optax.GradientTransformation:
    """Adam with an epsilon that does not blow up the rounding of tiny gradients."""
    return optax.adam(rate, eps=1e-3)


def _batch(seed: int) -> Any:
    return rows(_WIDTH, seed)


# -- haiku -----------------------------------------------------------------------------------


def _haiku_step(net: Any, tx: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((net.apply(p, x) - x) ** 2))(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    return step


def haiku_mlp() -> Other:
    hk: Any = pytest.importorskip("haiku")
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, _WIDTH])(x)))
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2, eps=1e-3)

    def create() -> Any:
        params = net.init(jax.random.key(0), _batch(0))
        return params, tx.init(params)

    return Other(_haiku_step(net, tx), create, _batch)


def haiku_batch_norm() -> Other:
    hk: Any = pytest.importorskip("haiku")

    def forward(x: Any) -> Any:
        h = hk.Linear(32, with_bias=False)(x)
        h = hk.BatchNorm(True, True, 0.9)(h, is_training=True)
        return hk.Linear(_WIDTH)(jax.nn.relu(h))

    net = hk.without_apply_rng(hk.transform_with_state(forward))

    def step(state: Any, x: Any) -> Any:
        params, kept = state

        def loss_of(p: Any) -> Any:
            y, new = net.apply(p, kept, x)
            return jnp.mean((y - x) ** 2), new

        (loss, kept), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), kept), {"loss": loss}

    return Other(
        step, lambda: net.init(jax.random.key(0), _batch(0)), _batch, refusals=_OF_THE_BATCH
    )


def haiku_lstm() -> Other:
    hk: Any = pytest.importorskip("haiku")

    def forward(x: Any) -> Any:
        core = hk.LSTM(_WIDTH)
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)
        return hk.BatchApply(hk.Linear(8))(out)

    net = hk.without_apply_rng(hk.transform(forward))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))

    def step(state: Any, x: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((net.apply(p, x) - x) ** 2))(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    def batch(seed: int) -> Any:
        return rows(6 * 8, seed).reshape(-1, 6, 8)

    def create() -> Any:
        params = net.init(jax.random.key(0), batch(0))
        return params, tx.init(params)

    return Other(step, create, batch)


def haiku_attention() -> Other:
    hk: Any = pytest.importorskip("haiku")

    def forward(x: Any) -> Any:
        h = hk.Embed(32, _WIDTH)(x)
        mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1])))
        init = hk.initializers.VarianceScaling(1.0)
        a = hk.MultiHeadAttention(4, 4, w_init=init, model_size=_WIDTH)(h, h, h, mask)
        h = hk.LayerNorm(-1, True, True)(h + hk.dropout(hk.next_rng_key(), 0.1, a))
        return hk.Linear(32)(h)

    net = hk.transform(forward)

    def step(state: Any, x: Any) -> Any:
        params, rng = state
        rng, own = jax.random.split(rng)

        def loss_of(p: Any) -> Any:
            logits = net.apply(p, own, x[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, x[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rng), {"loss": loss}

    def create() -> Any:
        return net.init(jax.random.key(0), tokens(7, 32)[:, :-1]), jax.random.key(1)

    return Other(step, create, lambda seed: tokens(7, 32, seed))


# -- flax linen ------------------------------------------------------------------------------


class _Conv(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(4)(x.reshape(x.shape[0], -1))


def linen_train_state() -> Other:
    net = _Conv()

    def create() -> Any:
        params = net.init(jax.random.key(0), jnp.ones((1, 8, 8, 3)))["params"]
        return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=_adam())

    def step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        right = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": right}

    def batch(seed: int) -> Any:
        image = rows(8 * 8 * 3, seed).reshape(-1, 8, 8, 3)
        return {"image": image, "label": tokens(1, 4, seed)[:, 0]}

    tx, apply = _adam(), net.apply  # a TrainState is told from another by these two

    def created() -> Any:
        return create().replace(tx=tx, apply_fn=apply)

    return Other(step, created, batch)


class _BatchState(train_state.TrainState):
    batch_stats: Any = None


def haiku_codebook() -> Other:
    """VQ-VAE: codes that are moving averages over the rows that chose them."""
    hk: Any = pytest.importorskip("haiku")

    def forward(x: Any) -> Any:
        codes = hk.nets.VectorQuantizerEMA(8, 16, commitment_cost=0.25, decay=0.9)
        chosen = codes(hk.nets.MLP([32, 8])(x), is_training=True)
        loss = jnp.mean((hk.Linear(_WIDTH)(chosen["quantize"]) - x) ** 2) + chosen["loss"]
        return loss, chosen["perplexity"]

    net, tx = hk.without_apply_rng(hk.transform_with_state(forward)), _adam()

    def step(state: Any, x: Any) -> Any:
        params, kept, opt = state

        def loss_of(p: Any) -> Any:
            (loss, perplexity), new = net.apply(p, kept, x)
            return loss, (perplexity, new)

        (loss, (told, kept)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt = tx.update(grads, opt)
        return (optax.apply_updates(params, updates), kept, opt), {"loss": loss, "told": told}

    def create() -> Any:
        params, kept = net.init(jax.random.key(0), _batch(0))
        return params, kept, tx.init(params)

    return Other(step, create, _batch)


class _Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(32, use_bias=False)(x))
        return nn.Dense(_WIDTH)(nn.gelu(x))


def linen_batch_norm() -> Other:
    net, tx = _Normed(), optax.sgd(0.1, momentum=0.9)

    def create() -> Any:
        held = net.init(jax.random.key(0), _batch(0), True)
        made: Any = _BatchState
        return made.create(
            apply_fn=net.apply, params=held["params"], tx=tx, batch_stats=held["batch_stats"]
        )

    apply = net.apply

    def step(state: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            held = {"params": params, "batch_stats": state.batch_stats}
            y, new = state.apply_fn(held, x, True, mutable=["batch_stats"])
            return jnp.mean((y - x) ** 2), new

        (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
        return state, {"loss": loss}

    return Other(step, lambda: create().replace(apply_fn=apply), _batch, refusals=_OF_THE_BATCH)


class _Critic(nn.Module):
    @nn.compact
    def __call__(self, x: Any, update: bool) -> Any:
        h = nn.SpectralNorm(nn.Dense(32))(x, update_stats=update)
        return nn.Dense(1)(nn.leaky_relu(h))[:, 0]


class _Forger(nn.Module):
    @nn.compact
    def __call__(self, z: Any) -> Any:
        return nn.Dense(_WIDTH)(nn.relu(nn.Dense(32)(z)))


def linen_adversaries() -> Other:
    """A GAN: two networks and optimizers in a step, and power iteration in the critic's state."""
    critic, forger, tx = _Critic(), _Forger(), _adam()

    def create() -> Any:
        held = critic.init(jax.random.key(0), _batch(0), True)
        params = {"critic": held["params"], "forger": forger.init(jax.random.key(1), rows(4))}
        return {
            "params": params, "norms": held["batch_stats"], "key": jax.random.key(2),
            "moments": jax.tree.map(tx.init, params, is_leaf=lambda tree: tree is not params),
        }  # fmt: skip

    def step(state: Any, x: Any) -> Any:
        key, own = jax.random.split(state["key"])
        z = jax.random.normal(own, (x.shape[0], 4))
        params, moments = dict(state["params"]), dict(state["moments"])

        def criticize(p: Any) -> Any:
            held = {"params": p, "batch_stats": state["norms"]}
            real, new = critic.apply(held, x, True, mutable=["batch_stats"])
            forged = critic.apply(held, forger.apply(params["forger"], z), False)
            loss = jnp.mean(jax.nn.softplus(-real) + jax.nn.softplus(jnp.asarray(forged)))
            return loss, new["batch_stats"]

        def moved(name: str, grads: Any) -> None:
            updates, moments[name] = tx.update(grads, moments[name])
            params[name] = optax.apply_updates(params[name], updates)

        (loss, norms), grads = jax.value_and_grad(criticize, has_aux=True)(params["critic"])
        moved("critic", grads)

        def forge(p: Any) -> Any:
            held = {"params": params["critic"], "batch_stats": norms}
            forged = critic.apply(held, forger.apply(p, z), False)
            return jnp.mean(jax.nn.softplus(-jnp.asarray(forged)))

        other, grads = jax.value_and_grad(forge)(params["forger"])
        moved("forger", grads)
        new = {"params": params, "norms": norms, "key": key, "moments": moments}
        return new, {"critic": loss, "forger": other}

    return Other(step, create, _batch)


class _Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        h = nn.SelfAttention(num_heads=4, dropout_rate=0.1, deterministic=False)(nn.LayerNorm()(x))
        x = x + h
        return x + nn.Dense(_WIDTH)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))), None


class _Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        layers = nn.scan(
            nn.remat(_Block), variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True}, length=2,
        )  # fmt: skip
        return layers()(x, None)[0]


def linen_scanned_transformer() -> Other:
    net, tx = _Scanned(), _adam()

    def batch(seed: int) -> Any:
        return rows(4 * _WIDTH, seed).reshape(-1, 4, _WIDTH)

    def create() -> Any:
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        params = net.init(keys, batch(0))["params"]
        return params, tx.init(params), jax.random.key(2)

    def step(state: Any, x: Any) -> Any:
        params, opt, key = state
        own = jax.random.fold_in(key, 1)

        def loss_of(p: Any) -> Any:
            return jnp.mean((net.apply({"params": p}, x, rngs={"dropout": own}) - x) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt, own), {"loss": loss}

    return Other(step, create, batch)


# -- flax nnx --------------------------------------------------------------------------------


class _Dense(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(_WIDTH, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(32, _WIDTH, rngs=rngs)
        self.act = jax.nn.gelu

    def __call__(self, x: Any) -> Any:
        return self.down(self.drop(self.norm(self.act(self.up(x)))))


def _nnx_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return {"loss": loss}


def _nnx_created(make: Any) -> Any:
    model = make(nnx.Rngs(0))
    return model, nnx.Optimizer(model, _adam(), wrt=nnx.Param)


def nnx_jitted() -> Other:
    return Other(
        nnx.jit(_nnx_step), lambda: _nnx_created(_Dense), _batch, plain=lambda f: f, in_place=True
    )


class _Attending(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(32, _WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(4, _WIDTH, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(_WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = self.embed(x)
        h = h + self.attend(self.norm(h), mask=nnx.make_causal_mask(x))
        return self.embed.attend(h)  # the table is tied to the logits


def nnx_transformer() -> Other:
    def step(model: Any, optimizer: Any, metric: Any, x: Any) -> Any:
        def loss_of(m: Any) -> Any:
            logits = m(x[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, x[:, 1:]).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        metric.update(values=loss)
        return loss

    return Other(
        step, lambda: (*_nnx_created(_Attending), nnx.metrics.Average()),
        lambda seed: tokens(7, 32, seed), plain=nnx.jit, in_place=True,
    )  # fmt: skip


class _Shared(nnx.Module):
    """One layer used twice, by two names, and a variable that is born in the step."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(_WIDTH, _WIDTH, rngs=rngs)
        self.last = self.first
        self.seen = nnx.BatchStat(jnp.zeros((_WIDTH,)))

    def __call__(self, x: Any) -> Any:
        self.seen[...] = self.seen[...] + x.sum(0)
        return self.last(jax.nn.tanh(self.first(x)))


def nnx_shared() -> Other:
    return Other(_nnx_step, lambda: _nnx_created(_Shared), _batch, plain=nnx.jit, in_place=True)


def nnx_functional() -> Other:
    graph, _ = nnx.split(_nnx_created(_Dense))

    def step(state: Any, x: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        found = _nnx_step(model, optimizer, x)
        return nnx.state((model, optimizer)), found

    return Other(step, lambda: nnx.split(_nnx_created(_Dense))[1], _batch)


def nnx_returned() -> Other:
    """A step that returns its objects as well as changing them."""

    def step(state: Any, x: Any) -> Any:
        model, optimizer = state
        return (model, optimizer), _nnx_step(model, optimizer, x)

    return Other(step, lambda: _nnx_created(_Dense), _batch, plain=nnx.jit)


# -- equinox ---------------------------------------------------------------------------------


def _eqx_step(tx: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        model, opt = state
        loss, grads = _value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - x) ** 2))(model)
        updates, opt = tx.update(grads, opt, eqx.filter(model, eqx.is_inexact_array))
        return (eqx.apply_updates(model, updates), opt), {"loss": loss}

    return step


def _eqx_created(make: Any, tx: Any) -> Any:
    model = make(jax.random.key(0))
    return model, tx.init(eqx.filter(model, eqx.is_inexact_array))


def equinox_mlp() -> Other:
    tx = _adam()
    step = eqx.filter_jit(_eqx_step(tx))

    def make(key: Any) -> Any:
        return eqx.nn.MLP(_WIDTH, _WIDTH, 32, 1, key=key)

    return Other(step, lambda: _eqx_created(make, tx), _batch, plain=lambda f: f)


class _Layers(eqx.Module):
    """Leaves of every kind: arrays, functions, texts, numbers, flags and nothing."""

    layers: list[Any]
    name: str
    scale: float
    missing: None
    inference: bool

    def __init__(self, key: Any) -> None:
        one, two = jax.random.split(key)
        self.layers = [
            eqx.nn.Linear(_WIDTH, 32, key=one), jax.nn.tanh, eqx.nn.LayerNorm(32),
            eqx.nn.Dropout(0.0), eqx.nn.Linear(32, _WIDTH, key=two),
        ]  # fmt: skip
        self.name, self.scale, self.missing, self.inference = "net", 0.5, None, False

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale if not self.inference else x


def equinox_plain() -> Other:
    tx = optax.sgd(0.1, momentum=0.9)
    return Other(_eqx_step(tx), lambda: _eqx_created(_Layers, tx), _batch, plain=eqx.filter_jit)


def equinox_ensemble() -> Other:
    """Networks made and called by filter_vmap, beside what each makes of the same rows."""
    tx = _adam()

    def step(state: Any, x: Any) -> Any:
        models, opt = state
        called = eqx.filter_vmap(lambda m, x: jax.vmap(m)(x), in_axes=(eqx.if_array(0), None))

        def loss_of(models: Any) -> Any:
            made = called(models, x)
            return jnp.mean((made - x) ** 2) + 0.1 * jnp.mean(jnp.var(made, 0))

        loss, grads = _value_and_grad(loss_of)(models)
        updates, opt = tx.update(grads, opt, eqx.filter(models, eqx.is_inexact_array))
        return (eqx.apply_updates(models, updates), opt), {"loss": loss}

    @eqx.filter_vmap
    def make(key: Any) -> Any:
        return eqx.nn.MLP(_WIDTH, _WIDTH, 32, 1, key=key)

    def create() -> Any:
        return _eqx_created(lambda key: make(jax.random.split(key, 4)), tx)

    return Other(step, create, _batch, plain=eqx.filter_jit)


class _Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    drop: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        one, two = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(8, _WIDTH, key=one)
        self.drop = eqx.nn.Dropout(0.2)
        self.out = eqx.nn.Linear(_WIDTH, 8, key=two)

    def __call__(self, x: Any, key: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, row: (self.cell(row, h), None), jnp.zeros(_WIDTH), x)
        return self.out(self.drop(h, key=key))


def equinox_gru() -> Other:
    tx = _adam()

    def step(state: Any, x: Any) -> Any:
        model, opt, key = state
        key, own = jax.random.split(key)

        def loss_of(m: Any) -> Any:
            y = jax.vmap(m)(x, jax.random.split(own, x.shape[0]))
            return jnp.mean((y - x[:, 0]) ** 2)

        loss, grads = _value_and_grad(loss_of)(model)
        updates, opt = tx.update(grads, opt)
        return (eqx.apply_updates(model, updates), opt, key), {"loss": loss}

    return Other(
        step, lambda: (*_eqx_created(_Recurrent, tx), jax.random.key(3)),
        lambda seed: rows(5 * 8, seed).reshape(-1, 5, 8), plain=eqx.filter_jit,
    )  # fmt: skip


class _Norming(eqx.Module):
    up: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    down: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        one, two = jax.random.split(key)
        self.up = eqx.nn.Linear(_WIDTH, 32, use_bias=False, key=one)
        self.norm = eqx.nn.BatchNorm(32, "batch", mode="batch")
        self.down = eqx.nn.Linear(32, _WIDTH, key=two)

    def __call__(self, x: Any, state: Any) -> Any:
        h, state = self.norm(self.up(x), state)
        return self.down(jax.nn.relu(h)), state


def equinox_batch_norm() -> Other:
    def step(state: Any, x: Any) -> Any:
        model, kept = state

        def loss_of(m: Any) -> Any:
            y, new = jax.vmap(m, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, kept)
            return jnp.mean((y - x) ** 2), new

        (loss, kept), grads = _value_and_grad(loss_of, has_aux=True)(model)
        return (eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), kept), loss

    return Other(
        step, lambda: eqx.nn.make_with_state(_Norming)(jax.random.key(0)), _batch,
        plain=eqx.filter_jit, refusals=_OF_THE_BATCH,
    )  # fmt: skip


def equinox_attention() -> Other:
    tx = _adam()

    class Net(eqx.Module):
        attend: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm

        def __call__(self, x: Any) -> Any:
            return x + self.attend(*[jax.vmap(self.norm)(x)] * 3)

    def make(key: Any) -> Any:
        return Net(eqx.nn.MultiheadAttention(4, _WIDTH, key=key), eqx.nn.LayerNorm(_WIDTH))

    return Other(
        eqx.filter_jit(_eqx_step(tx)), lambda: _eqx_created(make, tx),
        lambda seed: rows(4 * _WIDTH, seed).reshape(-1, 4, _WIDTH), plain=lambda f: f,
    )  # fmt: skip


# -- transformers ----------------------------------------------------------------------------


def _language_model(name: str, settings: dict[str, Any]) -> Other:
    held: Any = pytest.importorskip("transformers")
    make = getattr(held, f"Flax{name}", None)
    if make is None:
        pytest.skip("transformers 5 has no Flax models")
    model = make(settings["config"](held), seed=0)
    tx = _adam()

    def step(state: Any, batch: Any) -> Any:
        params, opt = state

        def loss_of(p: Any) -> Any:
            logits = model(batch, params=p, train=False).logits
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:])
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    def create() -> Any:
        params = jax.tree.map(jnp.array, model.params)
        return params, tx.init(params)

    return Other(step, create, lambda seed: tokens(8, 32, seed))


def transformers_gpt2() -> Other:
    return _language_model(
        "GPT2LMHeadModel",
        {"config": lambda t: t.GPT2Config(
            vocab_size=32, n_positions=16, n_embd=_WIDTH, n_layer=1, n_head=4, n_inner=32)},
    )  # fmt: skip


def transformers_bert() -> Other:
    return _language_model(
        "BertForMaskedLM",
        {"config": lambda t: t.BertConfig(
            vocab_size=32, hidden_size=_WIDTH, num_hidden_layers=1, num_attention_heads=4,
            intermediate_size=32, max_position_embeddings=16)},
    )  # fmt: skip


def transformers_llama() -> Other:
    return _language_model(
        "LlamaForCausalLM",
        {"config": lambda t: t.LlamaConfig(
            vocab_size=32, hidden_size=_WIDTH, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=4, intermediate_size=32, max_position_embeddings=16)},
    )  # fmt: skip
