"""The GPT of gpt.py in two pipeline stages of four devices each: the same step, nothing marked.

Plan it for a cluster that is not here:
    autopar plan examples/gpt.py:train_step --cluster 2x4xa100-40gb --stages 2
Train it on 8 virtual CPU devices, and measure a step:
    python -m examples.pipeline
"""

import jax
import numpy as np

import autopar
from examples.gpt import create_state, eval_loss, make_batch, train_step


def main(steps: int = 100, trace: str = "trace.json") -> None:
    """Train in stages, compare with the plain step, and draw the last step as it was measured."""
    step = autopar.parallelize(train_step, stages=2, microbatches=4, schedule="1f1b")
    state = step.init(create_state, jax.random.key(0))
    plain_state, plain_step = jax.device_get(state), jax.jit(train_step)
    rng = np.random.default_rng(0)
    for i in range(steps):
        batch = make_batch(rng)
        if i == steps - 1:
            step.trace(trace)
        state, metrics = step(state, batch)
        if i < 3:
            plain_state, plain = plain_step(plain_state, batch)
            print(f"step {i}  loss {metrics['loss']:.6f}  without stages {plain['loss']:.6f}")
    print(step.plan)
    print(f"step {steps - 1}, measured and predicted; its spans are in {trace}")
    print(step.recording)
    whole = jax.device_get(state)  # from both submeshes
    print(f"a new batch: loss {float(eval_loss(whole, make_batch(rng))):.4f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
