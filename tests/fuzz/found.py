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

FOUND: dict[str, tuple[str, Config]] = {
    # XLA:CPU failed as the step ran: "RET_CHECK failure (fft_thunk.cc)".
    "fft_beside_a_gather": (_FFT_BESIDE_A_GATHER, Config(False, (8,), pins=0)),
}
