"""Ten steps so small that all their plans can be tried, and a price list of round figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.cluster.chip import Platform
from autopar.ir.sharding import MeshShape

Toy = tuple[Callable[..., Any], tuple[Any, ...]]

_START = 1e-6
_RATES = {"all-reduce": 2e-9, "collective-permute": 0.5e-9}  # seconds a byte; 1e-9 for the rest
_FAR = 4.0  # a mesh's first axis of several is the slow one


@dataclass(frozen=True)
class Tolls:
    """Collectives at a start for each device and so much a byte, dearer over the first axis."""

    mesh: MeshShape
    platform: Platform = "gpu"

    def joined(self, kind: str, nbytes: int, axes: tuple[str, ...]) -> float:
        """Seconds of one collective over some axes."""
        devices = self.mesh.size(axes)
        if devices == 1 or nbytes == 0:
            return 0.0
        far = _FAR if self.mesh.names[0] in axes and len(self.mesh.names) > 1 else 1.0
        rate = _RATES.get(kind, 1e-9) * far
        return _START * devices + rate * nbytes * (devices - 1) / devices

    @property
    def filling_blocks(self) -> float:
        """No number of blocks is too small."""
        return 0.0

    def in_blocks(self, loaded: float, blocks: int, stored: float) -> float:
        """Blocks are not counted."""
        del blocks
        return self.elementwise(loaded + stored)

    def elementwise(self, nbytes: float) -> float:
        """A copy costs a tenth of the cheapest collective."""
        return 1e-10 * nbytes


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """One matrix product."""
    return x @ w


def update(w: jax.Array, x: jax.Array) -> jax.Array:
    """A product summed over the batch goes into the state."""
    return w - 0.1 * (x.T @ x)


def layer(w: jax.Array, x: jax.Array) -> Any:
    """State, a product, an element-wise op and a sum."""
    return w, jnp.tanh(x @ w).sum()


def two_products(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """A bottleneck: wide, narrow, wide."""
    return (x @ a) @ b


def joined(x: jax.Array, a: jax.Array) -> jax.Array:
    """Two sums that may both stay partial until they are added."""
    return x @ a + x.T @ a


def normalized(x: jax.Array) -> jax.Array:
    """A maximum and a sum along a dim, read again element-wise."""
    return jax.nn.softmax(x, axis=1)


def looked_up(table: jax.Array, i: jax.Array) -> jax.Array:
    """Rows of a table by number."""
    return table[i] * 2.0


def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    """One matrix, several times over."""
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0]


def turned(x: jax.Array) -> jax.Array:
    """Dims are merged, turned and summed."""
    return x.reshape(8, 4, 4).transpose(2, 0, 1).sum(0)


def extremes(x: jax.Array) -> Any:
    """Reductions that are no sums."""
    return x.max(0), x.min(1), (x > 0).all(0)


def _floats(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape, np.float32))


TOYS: Mapping[str, Toy] = {
    "product": (product, (_floats(64, 16), _floats(16, 8))),
    "update": (update, (_floats(16, 16), _floats(64, 16))),
    "layer": (layer, (_floats(16, 8), _floats(64, 16))),
    "two_products": (two_products, (_floats(64, 16), _floats(16, 8), _floats(8, 16))),
    "joined": (joined, (_floats(16, 16), _floats(16, 8))),
    "normalized": (normalized, (_floats(16, 64),)),
    "looked_up": (looked_up, (_floats(64, 8), jnp.arange(16))),
    "scanned": (scanned, (_floats(16, 16), _floats(32, 16))),
    "turned": (turned, (_floats(8, 16),)),
    "extremes": (extremes, (_floats(16, 8),)),
}
