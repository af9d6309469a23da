"""The frame of a random program: batches, state, loss, gradient, optimizer and results as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.fuzz.writing import Param


@dataclass(frozen=True)
class Part:
    """A piece of text; `mixes` says that rows of the batch meet in it other than by a sum."""

    text: str
    mixes: bool = False


# `f` are features (rows, n); gives `rows`, a loss for each row, and `loss`.
LOSSES = {
    "mse": Part(
        'rows = jnp.mean((f @ params["head"] - batch["y"]) ** 2, -1)\nloss = jnp.mean(rows)'
    ),
    "cross_entropy": Part(
        "rows = optax.softmax_cross_entropy_with_integer_labels("
        'f @ params["head"], batch["labels"] % 4)\nloss = jnp.mean(rows)'
    ),
    "masked": Part(
        'rows = jnp.sum(jnp.abs(f @ params["head"] - batch["y"]), -1)\n'
        'loss = jnp.sum(jnp.where(batch["mask"], rows, 0)) / jnp.maximum(jnp.sum(batch["mask"]), 1)'
    ),
    "weighted": Part(
        'rows = jnp.sum(optax.losses.huber_loss(f @ params["head"], batch["y"]), -1)\n'
        'loss = jnp.sum(rows * batch["weights"]) / jnp.sum(batch["weights"])'
    ),
    "log_mean_exp": Part(
        'rows = jnp.tanh(jnp.mean((f @ params["head"] - batch["y"]) ** 2, -1))\n'
        "loss = jnp.log(jnp.mean(jnp.exp(rows)))"
    ),
    "hinge": Part(
        'rows = jnp.max(jax.nn.relu(1 + f @ params["head"] - batch["y"]), -1)\nloss = '
        "jnp.mean(rows)"
    ),
    "root": Part(
        'rows = jnp.sum((f @ params["head"] - batch["y"]) ** 2, -1)\n'
        "loss = jnp.sqrt(jnp.mean(rows) + 0.1)"
    ),
    "contrastive": Part(
        'e = f @ params["head"]\ne = e / jnp.sqrt(jnp.sum(e * e, -1, keepdims=True) + 0.3)\n'
        "rows = -jnp.diagonal(jax.nn.log_softmax(2 * e @ jnp.roll(e, 1, 0).T))\n"
        "loss = jnp.mean(rows)",
        mixes=True,
    ),
    "balance": Part(
        'gate = jax.nn.softmax(f @ params["head"])\n'
        'rows = jnp.sum(gate * batch["y"], -1)\n'
        "loss = jnp.mean(rows) + 4 * jnp.sum(jnp.mean(gate, 0) * jnp.mean(gate > 0.2517, 0))",
        mixes=True,
    ),
    "spread": Part(
        'rows = jnp.sum(f @ params["head"] * batch["y"], -1)\n'
        "loss = jnp.mean(rows) + jnp.sqrt(jnp.var(rows) + 0.1)",
        mixes=True,
    ),
    "pairwise": Part(
        'score = jnp.tanh(f @ params["head"][:, 0])\nrows = score * batch["y"][:, 0]\n'
        "loss = jnp.mean(jax.nn.softplus(score[:, None] - score[None, :]) * "
        '(batch["labels"][:, None] > batch["labels"][None, :]))',
        mixes=True,
    ),
}
# Gives `loss`, `rows`, `told` and `grads`.
GRADIENTS = {
    "plain": Part(
        "(loss, (rows, told)), grads = jax.value_and_grad(model, has_aux=True)(params, batch, "
        "key, count)"
    ),
    "grad": Part(
        "grads, (rows, told) = jax.grad(model, has_aux=True)(params, batch, key, count)\n"
        "loss = jnp.mean(rows)"
    ),
    "vjp": Part(
        "loss, back, (rows, told) = jax.vjp(lambda p: model(p, batch, key, count), params, "
        "has_aux=True)\n"
        "(grads,) = back(jnp.ones_like(loss) * 2)"
    ),
    "decay": Part(
        "(loss, (rows, told)), grads = jax.value_and_grad(model, has_aux=True)(params, batch, "
        "key, count)\n"
        "grads = jax.tree.map(lambda g, p: g + 0.01 * p, grads, params)"
    ),
    "sam": Part(
        "first = jax.grad(lambda p: model(p, batch, key, count)[0])(params)\n"
        "size = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(first)) + 0.01)\n"
        "near = jax.tree.map(lambda p, g: p + 0.05 * g / size, params, first)\n"
        "(loss, (rows, told)), grads = jax.value_and_grad(model, has_aux=True)(near, batch, "
        "key, count)"
    ),
    "remat_all": Part(
        "(loss, (rows, told)), grads = jax.value_and_grad(jax.checkpoint(model), has_aux=True)("
        "params, batch, key, count)"
    ),
    "bfloat16": Part(
        "def low(p):\n"
        "    p = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), p)\n"
        "    return model(p, batch, key, count)\n"
        "(loss, (rows, told)), grads = jax.value_and_grad(low, has_aux=True)(params)"
    ),
    "accumulate": Part(
        "parts = jax.tree.map(lambda a: a.reshape(4, -1, *a.shape[1:]), batch)\n"
        "def one(total, part):\n"
        "    (loss, (rows, told)), grads = jax.value_and_grad(model, has_aux=True)("
        "params, part, key, count)\n"
        "    return jax.tree.map(jnp.add, total, grads), (loss, rows, told)\n"
        "grads, (losses, rows, told) = lax.scan(one, jax.tree.map(jnp.zeros_like, params), parts)\n"
        "grads, loss = jax.tree.map(lambda g: g / 4, grads), jnp.mean(losses)\n"
        "told = jnp.mean(told)",
        mixes=True,
    ),
    "per_example": Part(
        "def alone(p, row):\n"
        "    return model(p, jax.tree.map(lambda a: a[None], row), key, count)\n"
        "(rows, (_, told)), each = jax.vmap(jax.value_and_grad(alone, has_aux=True), (None, 0))("
        "params, batch)\n"
        "sizes = jnp.sqrt(sum(jnp.sum(g.reshape(g.shape[0], -1) ** 2, 1) "
        "for g in jax.tree.leaves(each)) + 0.01)\n"
        "scale = jnp.minimum(1, 0.5 / sizes)\n"
        'grads = jax.tree.map(lambda g: jnp.einsum("b...,b->...", g, scale) / g.shape[0], each)\n'
        "loss, told = jnp.mean(rows), jnp.mean(told)",
        mixes=True,
    ),
}


@dataclass(frozen=True)
class Optimizer:
    """How an optimizer's state is made of `params`, and `params, opt` of `params, grads, opt`."""

    create: str
    update: str
    setup: str = ""


def _optax(made: str) -> Optimizer:
    return Optimizer(
        "TX.init(params)",
        "updates, opt = TX.update(grads, opt, params)\nparams = optax.apply_updates(params, "
        "updates)",
        f"TX = {made}\n",
    )


_ZEROS = "jax.tree.map(np.zeros_like, params)"
OPTIMIZERS = {
    "sgd": Optimizer("()", "params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)"),
    "momentum": Optimizer(
        _ZEROS,
        "opt = jax.tree.map(lambda m, g: 0.9 * m + g, opt, grads)\n"
        "params = jax.tree.map(lambda p, m: p - 0.05 * m, params, opt)",
    ),
    "adam": Optimizer(
        f"({_ZEROS}, {_ZEROS})",
        "opt = (jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, opt[0], grads),\n"
        "       jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, opt[1], grads))\n"
        "t = count + 1.0\n"
        "params = jax.tree.map(\n"
        "    lambda p, m, v: p - 0.01 * m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.99**t)) + 1e-2),\n"
        "    params, *opt)",
    ),
    "clipped_sgd": Optimizer(
        "()",
        "size = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))\n"
        "params = jax.tree.map(lambda p, g: p - 0.1 * g * jnp.minimum(1, 0.3 / size), "
        "params, grads)",
    ),
    "skip_not_finite": Optimizer(
        "()",
        "fine = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))\n"
        "params = lax.cond(fine, lambda p: jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), "
        "lambda p: p, params)",
    ),
    "optax_sgd": _optax("optax.sgd(0.1)"),
    "optax_momentum": _optax("optax.sgd(0.05, momentum=0.9, nesterov=True)"),
    "optax_adam": _optax("optax.adam(1e-2, eps=1e-2)"),
    "optax_adamw": _optax("optax.adamw(1e-2, eps=1e-2, weight_decay=0.05)"),
    "optax_clip_adam": _optax(
        "optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-2, eps=1e-2))"
    ),
    "optax_schedule": _optax(
        "optax.chain(optax.clip(0.2), optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 0.1, "
        "2, 9)))"
    ),
    "optax_rmsprop": _optax("optax.rmsprop(1e-2, eps=1e-2, momentum=0.5)"),
    "optax_lamb": _optax("optax.lamb(1e-2, eps=1e-2)"),
    "optax_adagrad": _optax("optax.adagrad(1e-2, eps=1e-2)"),
    "optax_multi_steps": _optax("optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)"),
    "optax_ema": _optax("optax.chain(optax.ema(0.9), optax.scale(-0.1))"),
    "optax_adafactor": _optax(
        "optax.adafactor(1e-2, min_dim_size_to_factor=8, eps=1e-2, "
        "multiply_by_parameter_scale=False)"
    ),
}


@dataclass(frozen=True)
class State:
    """Something more that is carried from step to step, and may be told."""

    create: str
    update: str


STATES = {
    "ema": State(
        "jax.tree.map(np.array, params)",
        "jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, old, params)",
    ),
    "history": State(
        "np.zeros((8,), np.float32)", "lax.dynamic_update_slice(old, loss[None], (count % 8,))"
    ),
    "best": State("np.float32(1e9)", "jnp.minimum(old, loss)"),
    "seen": State("np.zeros((4,), np.int32)", 'old.at[batch["labels"] % 4].add(1)'),
    "mean_rows": State("np.zeros((), np.float32)", "0.9 * old + 0.1 * jnp.mean(rows)"),
    "total": State("np.int32(0)", 'old + jnp.sum(batch["mask"])'),
    "raw_key": State("jax.random.PRNGKey(5)", "jax.random.split(old)[0]"),
    "frozen": State("np.ones((8, 4), np.float32)", "old"),
    "pair": State(
        "(np.float32(0), [np.zeros((3,), np.float32)])",
        "(old[0] + loss, [old[1][0] * 0.5 + told])",
    ),
    "grad_scale": State("np.float32(1)", "jnp.where(jnp.isfinite(loss), old * 2, old / 2)"),
}

_HEAD = '''\
"""A random train step, from seed {seed}."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax


{setup}def norm(x):
    return (x - jnp.mean(x, -1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 0.1)


def create_state():
    rng = np.random.default_rng({seed})

    def drawn(mean, scale, *shape):
        return (mean + scale * rng.standard_normal(shape)).astype(np.float32)

    params = {{
{params}
    }}
    return {{
        "params": params,
        "opt": {opt},
        "count": np.int32(0),
        "key": jax.random.key({seed}),
{states}    }}


def make_batch(i):
    rng = np.random.default_rng((i, {seed}))
    return {{
{batch}
        "y": rng.standard_normal(({rows}, 4)).astype(np.float32),
        "labels": rng.integers(0, 1000, {rows}).astype(np.int32),
        "lengths": rng.integers(0, 1000, {rows}).astype(np.int32),
        "mask": rng.random({rows}) < 0.7,
        "weights": (0.2 + rng.random({rows})).astype(np.float32),
    }}


def model(params, batch, key, count):
{model}
    return loss, (rows, told)


def step(state, batch):
    params, opt, count = state["params"], state["opt"], state["count"]
    state_key, key = jax.random.split(state["key"])
{gradient}
{update}
    new = {{"params": params, "opt": opt, "count": count + 1, "key": state_key}}
{news}    size = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return new, {{"loss": loss, "rows": rows, "told": told, "size": size, "count": count}}
'''


def whole_text(
    seed: int,
    rows: int,
    streams: Mapping[str, Sequence[int]],
    body: Sequence[str],
    params: Mapping[str, Mapping[str, Param]],
    loss: str,
    gradient: str,
    optimizer: str,
    states: Sequence[str],
) -> str:
    """The program as Python text."""
    chosen = OPTIMIZERS[optimizer]
    width = sum(shape[-1] for shape in streams.values())
    features = [
        f"jnp.mean({name}, {tuple(range(1, len(shape)))})" if len(shape) > 1 else name
        for name, shape in streams.items()
    ]
    model = [f'{name} = batch["{name}"]' for name in streams]
    model += [
        *body, f"f = jnp.concatenate([{', '.join(features)}], -1)", "told = jnp.mean(f)",
        *LOSSES[loss].text.splitlines(),
    ]  # fmt: skip
    lines = [f'"head": drawn(0.0, {width**-0.5:.4f}, {width}, 4),']
    for block, own in params.items():
        lines.append(f'"{block}": {{')
        lines += [
            f'    "{name}": drawn({p.mean}, {p.scale:.4f}, {", ".join(map(str, p.shape))}),'
            for name, p in own.items()
        ]
        lines.append("},")
    batch = [
        f'"{name}": rng.standard_normal(({rows}, {", ".join(map(str, shape))})).astype(np.float32),'
        for name, shape in streams.items()
    ]
    return _HEAD.format(
        seed=seed, rows=rows, setup=f"{chosen.setup}\n\n" if chosen.setup else "",
        params=_indented(lines, 8), opt=chosen.create,
        states="".join(f'        "{s}": {STATES[s].create},\n' for s in states),
        batch=_indented(batch, 8), model=_indented(model, 4),
        gradient=_indented(GRADIENTS[gradient].text.splitlines(), 4),
        update=_indented(chosen.update.splitlines(), 4),
        news="".join(
            f'    old = state["{s}"]\n    new["{s}"] = {STATES[s].update}\n' for s in states
        ),
    )  # fmt: skip


def _indented(lines: Sequence[str], by: int) -> str:
    return "\n".join(" " * by + line for line in lines)
