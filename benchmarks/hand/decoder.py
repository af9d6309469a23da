"""Hand-written layouts of transformers: data, ZeRO-1, FSDP, Megatron, both at once, experts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from benchmarks import models
from benchmarks.hand.layout import Flow, Layout, Pin, SpecOf, split_more, whole

P = PartitionSpec
D, M = "data", "model"
HOST = 8  # devices that share the fast links

# What Megatron cuts up over the model axis: columns into a block's inside, rows out of it.
_CUT = (
    (r"(query|key|value|up|gate)/kernel$", P(None, M)),
    (r"(query|key|value|up|gate)/bias$", P(M)),
    (r"(out|down)/kernel$", P(M, None)),
    (r"head/kernel$", P(None, M)),
    (r"Embed_0/embedding$", P(M, None)),
    (r"experts/up$", P(None, None, M)),
    (r"experts/down$", P(None, M, None)),
    (r"experts/gate/kernel$", P()),
)
_INSIDE = ("query", "key", "value", "up", "gate", "head")
_NORMS = ("norm", "norm_1", "norm_2")


def decoder_layouts(devices: int, experts: int = 0) -> Iterator[tuple[str, Layout]]:
    """What an expert would try on so many devices, by name; `experts` is how many a layer has."""
    yield from data_layouts(devices)
    yield f"tp {devices}", _tensor(1, devices)
    model = 2
    while model < devices:
        if model <= HOST:
            yield f"fsdp+tp {devices // model}x{model}", _tensor(devices // model, model)
        model *= 2
    if experts:
        model = min(experts, devices)
        yield f"fsdp+ep {devices // model}x{model}", _expert(devices // model, model)


def data_layouts(devices: int) -> Iterator[tuple[str, Layout]]:
    """Rows over all devices: nothing else sharded, the optimizer too, or everything (FSDP).

    On several hosts also FSDP within each of them, which hold the same.
    """
    axes = ((D, devices),)
    split = _split(devices)
    yield f"dp {devices}", _by_rows(axes)
    yield f"zero1 {devices}", _by_rows(axes, updated=split)
    yield f"fsdp {devices}", _by_rows(axes, stored=split, updated=split)
    if devices > HOST:
        inside = _split(HOST)
        hosts = ("replica", devices // HOST)
        name = f"hsdp {devices // HOST}x{HOST}"
        yield name, _by_rows((hosts, (D, HOST)), stored=inside, updated=inside)


def _by_rows(
    axes: tuple[tuple[str, int], ...], stored: SpecOf = whole, updated: SpecOf = whole
) -> Layout:
    rows = P(tuple(name for name, _ in axes))

    def leaves(module: nn.Module) -> Flow:
        del module
        return Flow.both(rows)

    return Layout(axes, rows, stored=stored, updated=updated, leaves=leaves)


def _split(devices: int) -> SpecOf:
    """Every array cut up over the data axis."""

    def spec_of(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        del path
        return split_more(P(), shape, D, devices)

    return spec_of


def _tensor(data: int, model: int) -> Layout:
    """Megatron with its sequences cut up between blocks; parameters are kept on every device."""

    def used(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        del shape
        return next((spec for pattern, spec in reversed(_CUT) if re.search(pattern, path)), P())

    inside, between, rows = P(D, None, M), P(D, M, None), P(D, None, None)

    def enters(module: nn.Module) -> Flow:
        return Flow.both(inside) if module.name in ("out", "down") else Flow()

    def leaves(module: nn.Module) -> Flow:
        name = module.name or ""
        if name in _NORMS:  # the norm itself works on its tokens alone
            return Flow((between, rows), (between,))
        if name in ("out", "down", "experts", "Embed_0"):
            return Flow((between,), (between, rows))
        if name in _INSIDE and "experts" not in module.path:
            return Flow.both(inside)
        return Flow.both(between) if name.startswith("layer") else Flow()

    axes = ((D, data), (M, model))
    stored = _kept(used, data)
    return Layout(axes, P(D), stored, used, stored, enters, leaves)


def _expert(data: int, model: int) -> Layout:
    """Tokens over all devices, experts over the model axis, everything kept on every device."""
    rows = P((D, M))

    def used(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        del shape
        return P(M) if re.search(r"experts/(up|down)$", path) else P()

    def stored(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        spec = used(path, shape)
        if spec == P():
            spec = split_more(spec, shape, M, model)
        return split_more(spec, shape, D, data)

    def leaves(module: nn.Module) -> Flow:
        del module
        return Flow.both(rows)

    def module(module: nn.Module, x: jax.Array, pin: Pin) -> Any:
        if not isinstance(module, models.Experts):
            return NotImplemented
        return _experts(module, x, pin)

    axes = ((D, data), (M, model))
    return Layout(axes, rows, stored, used, stored, leaves=leaves, module=module)


def _experts(layer: models.Experts, x: jax.Array, pin: Pin) -> jax.Array:
    """The layer with its two all-to-alls: each device's tokens to the experts, and back."""
    s, params = layer.sizes, layer.variables["params"]
    gates = jax.nn.softmax(x.astype(jnp.float32) @ params["gate"]["kernel"])
    combine, choice = layer.routes(gates)
    balance = jnp.mean(gates.mean(axis=1) * choice.mean(axis=1)) * s.experts**2
    layer.sow("losses", "balance", balance)
    mask = jnp.greater(combine, 0.0).astype(s.dtype)
    by_token, by_expert = P(None, (D, M)), P(M, D)
    inputs = pin(jnp.einsum("gtec,gtd->egcd", mask, x), by_token)
    hidden = nn.gelu(jnp.einsum("egcd,edh->egch", pin(inputs, by_expert), params["up"]))
    outputs = jnp.einsum("egch,ehd->egcd", hidden, params["down"])
    outputs = pin(pin(outputs, by_expert), by_token)
    return jnp.einsum("gtec,egcd->gtd", combine.astype(s.dtype), outputs)


def _kept(used: SpecOf, data: int) -> SpecOf:
    """The layout in use with one more dim cut up over the data axis."""

    def stored(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        return split_more(used(path, shape), shape, D, data)

    return stored
