"""How much CPU work planning small steps takes, or refusing them; prints one JSON line a case.

`python -m benchmarks.bench_small_plans [CASE...]` runs the cases whose names begin so, or all. The
first line is what comes before any planning: imports, and numba's compilation of both searches,
that over shardings and that over stages, which a refusal looks for a remedy with. A limit is a
share of the peak that the same step has without one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

import autopar
from autopar.errors import AutoparError, MemoryLimitError
from benchmarks import models

_CLUSTERS = ("8xcpu", "2x8xh100", "8x8xh100", "v5p:4x4x4")


@dataclass(frozen=True)
class Case:
    """A step with its arguments, the options to plan it with, its limit as a share of its peak."""

    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    share: float | None = None


def mlp(layers: int, width: int = 1024, rows: int = 512, adam: bool = False) -> Any:
    """A step of so many matrices with tanh between them."""
    tx = optax.adam(1e-3) if adam else optax.sgd(1e-2)

    def create(key: jax.Array) -> Any:
        params = {f"w{i}": jnp.zeros((width, width)) for i in range(layers)}
        return params, tx.init(params)

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            x = batch["x"]
            for i in range(layers):
                x = jnp.tanh(x @ params[f"w{i}"])
            return jnp.mean((x - batch["y"]) ** 2)

        params, opt = state
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    rows_of = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return step, (jax.eval_shape(create, jax.random.key(0)), {"x": rows_of, "y": rows_of})


def pair() -> Any:
    """Six ops, no gradient: two products with what is between them."""

    def step(state: Any, x: jax.Array) -> Any:
        h = jnp.tanh(x @ state["a"]) * state["c"]
        y = jnp.exp(h @ state["b"])
        return {**state, "d": state["d"] + y.sum(0)}, y

    state = {
        "a": jax.ShapeDtypeStruct((2048, 8192), jnp.float32),
        "b": jax.ShapeDtypeStruct((8192, 2048), jnp.float32),
        "c": jax.ShapeDtypeStruct((8192,), jnp.float32),
        "d": jax.ShapeDtypeStruct((2048,), jnp.float32),
    }
    return step, (state, jax.ShapeDtypeStruct((4096, 2048), jnp.float32))


def of_model(build: Callable[[], models.Model]) -> Callable[[], Any]:
    """A model's step with its arguments."""

    def made() -> Any:
        create, step, batch = build()
        return step, (jax.eval_shape(create, jax.random.key(0)), batch)

    return made


def gpt() -> Any:
    """A GPT-2 of two layers, with AdamW."""
    return of_model(lambda: models.gpt(2, 256, 4, 1024, 128, 32))()


def gpt_sgd() -> Any:
    """A GPT-2 of two layers, with SGD."""
    return of_model(lambda: models.gpt(2, 256, 4, 1024, 128, 32, optimizer="sgd"))()


def llama() -> Any:
    """Llama 3 8B, its layers scanned and recomputed."""
    return of_model(lambda: models.llama(scan=True, remat=True))()


_ALL = {"w0": (None, "x"), "w1": ("x", None), "w2": (None, "x"), "w3": ("x", None)}
_SOME = {"a": (None, "x"), "b": ("x", None), "c": ("x",), "d": (None,)}
_CROSSED = {"a": ("x", "y"), "b": ("x", "y"), "c": ("y",), "d": ("x",), "x": ("y", "x")}


def _named(pins: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {path if path == "x" else f"**/{path}": spec for path, spec in pins.items()} | more


def _cases() -> Iterator[tuple[str, Case]]:
    for cluster in _CLUSTERS:
        for axes in (1, 2, 3) if cluster.startswith("v5p") else (2,):
            on: dict[str, Any] = {"cluster": cluster, "mesh_axes": axes}
            where = f"{cluster}/{axes}"
            yield f"pair {where}", Case(pair, on)
            yield f"mlp2 {where}", Case(lambda: mlp(2), on)
            for share in (0.9, 0.6, 0.3, 0.05):
                yield f"pair {where} at {share}", Case(pair, on, share)
                yield f"mlp2 {where} at {share}", Case(lambda: mlp(2), on, share)
                yield f"mlp4-adam {where} at {share}", Case(lambda: mlp(4, adam=True), on, share)
        on = {"cluster": cluster}
        shares: tuple[float | None, ...] = (None, 0.9, 0.45, 0.2, 0.03)
        for part in shares:
            at = f" at {part}" if part else ""
            yield f"gpt {cluster}{at}", Case(gpt, on, part)
            yield f"gpt-sgd {cluster}{at}", Case(gpt_sgd, on, part)
    for cluster, mesh in (("8xcpu", (2, 4)), ("2x8xh100", (2, 8)), ("v5p:4x4x4", (4, 16))):
        for part in (None, 0.8, 0.3):
            on = {"cluster": cluster, "mesh": dict(zip("xy", mesh, strict=True))}
            where = f"{cluster}" + (f" at {part}" if part else "")
            yield f"pinned pair {where}", Case(pair, {**on, "pins": _named(_SOME)}, part)
            yield f"crossed pair {where}", Case(pair, {**on, "pins": _named(_CROSSED)}, part)
            yield f"pinned mlp4 {where}", Case(lambda: mlp(4), {**on, "pins": _named(_ALL)}, part)
    for cluster in ("8xv100", "8xa100-80gb", "8xh100"):
        yield f"llama-8b {cluster}", Case(llama, {"cluster": cluster, "memory_gb": 16})


CASES = dict(_cases())


def measured(name: str, case: Case) -> dict[str, Any]:
    """CPU seconds of one planning call, and how it ended."""
    step, args = case.build()
    options = dict(case.options)
    if case.share is not None:
        roomy = autopar.plan(step, *args, **options)
        options["memory_gb"] = case.share * roomy.prediction.peak_bytes / 2**30
    parallel = autopar.parallelize(step, **options)
    began = time.process_time()
    refusal, predicted = "", None
    try:
        plan = parallel.plan_for(*args)
        predicted = plan.prediction.seconds
    except AutoparError as error:
        refusal = str(error)
    spent = time.process_time() - began
    return {
        "case": name,
        "cpu_seconds": round(spent, 2),
        "predicted_step_seconds": predicted,
        "refusal": refusal,
    }


def warmed() -> dict[str, Any]:
    """CPU seconds of all that a process does once."""
    step, args = mlp(2)
    autopar.plan(step, *args, cluster="8xcpu", memory_gb=0.02)
    with suppress(MemoryLimitError):
        autopar.plan(step, *args, cluster="8xcpu", memory_gb=0.004)
    return {
        "case": "first plan and refusal of the process",
        "cpu_seconds": round(time.process_time(), 2),
    }


def main(names: list[str]) -> None:
    """The cases whose names begin with one of these, or every one, in turn."""
    print(json.dumps(warmed()), flush=True)
    for name, case in CASES.items():
        if not names or any(name.startswith(n) for n in names):
            print(json.dumps(measured(name, case)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
