"""Programs that once failed, as small as they could be made, and the way in which they did."""

from __future__ import annotations

from tests.fuzz.configs import Config

_FFT_BESIDE_A_GATHER = """\
import jax
import jax.numpy as jnp
import numpy as np


def create_state():
    rng = np.random.default_rng(0)
    return {"params": {"x": rng.standard_normal((8, 16, 8)).astype(np.float32)}}


def make_batch(i):
    return np.float32(i + 1)


def step(state, batch):
    x = state["params"]["x"]
    told = jnp.abs(jnp.fft.fft2(jnp.fft.fft(x * batch))).mean()
    return {"params": {"x": x * 0.9}}, told
"""

_MAXIMUM_COMPARED = """\
import jax
import jax.numpy as jnp
import numpy as np


def create_state():
    return np.random.default_rng(0).standard_normal((24, 4)).astype(np.float32)


def make_batch(i):
    rng = np.random.default_rng(1)
    shapes = (24, 8, 6, 4), (24, 24)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def model(w, a, b):
    h = a + jax.nn.sigmoid((b @ w)[:, None, None, :]) * (jnp.sin(a) - a)
    return jnp.sum(jnp.max(h, 2) * jnp.cos(b[:, :1, None])) + jnp.sum(jnp.sin(h))


def step(w, batch):
    grad = jax.grad(model)(w, *batch)
    return w - 0.1 * grad, grad
"""

FOUND: dict[str, tuple[str, Config]] = {
    # XLA:CPU failed as the step ran: "RET_CHECK failure (fft_thunk.cc)".
    "fft_beside_a_gather": (_FFT_BESIDE_A_GATHER, Config(False, (8,), pins=0)),
    # NaN: XLA:CPU computed `h` again for `h == max(h)`, and rounded otherwise.
    "maximum_compared": (_MAXIMUM_COMPARED, Config(False, (2, 4), random_plan=8)),
}
