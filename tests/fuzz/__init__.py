"""Random train steps over many kinds of op, run in parallel and compared with plain `jax.jit`."""
