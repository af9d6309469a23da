"""What the processes of a job run: each is a function of texts that gives plain data."""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from tests.processes.parts import Parts, parts_of

if TYPE_CHECKING:
    from tests.zoo import Case, Optimizer

# Models and checkpoints are imported where they are used: most processes need neither, and start
# in two thirds of the time.
WIDTH, LAYERS, ROWS = 16, 8, 16
PROGRAM = "program "


def create(key: jax.Array) -> dict[str, Any]:
    """A state with a stack of layers, a counter and a key."""
    weights = 0.3 * jax.random.normal(key, (LAYERS, WIDTH, WIDTH))
    return {"w": weights, "m": jnp.zeros_like(weights), "step": jnp.int32(0), "key": key}


def train(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A step of momentum, clipped by the global norm: a scalar that all stages exchange."""

    def loss_of(weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w), None

        made, _ = jax.lax.scan(layer, batch, weights)
        return jnp.mean((made - batch[:, ::-1]) ** 2)

    loss, slope = jax.value_and_grad(loss_of)(state["w"])
    norm = jnp.sqrt(jnp.sum(slope * slope))
    moment = 0.9 * state["m"] + slope / jnp.maximum(1.0, norm)
    after = {"w": state["w"] - 0.1 * moment, "m": moment, "step": state["step"] + 1}
    return {**after, "key": state["key"]}, {"loss": loss, "norm": norm}


def batches() -> list[np.ndarray[Any, Any]]:
    """The same three batches each time."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((ROWS, WIDTH), dtype=np.float32) for _ in range(3)]


def trained(step: Any, state: Any) -> tuple[list[str], Any]:
    """Every scalar of three steps, in all its bits, and the state after them."""
    told: list[str] = []
    for batch in batches():
        state, metrics = step(state, batch)
        scalars = metrics["loss"], metrics["norm"], state["step"]
        told += [np.float32(float(s)).tobytes().hex() for s in scalars]
    return told, state


def own_rows(array: Any) -> dict[str, str]:
    """The bytes of what this process has of an array, by the rows."""
    pieces = getattr(array, "pieces", (array,))
    first, found = 0, dict[str, str]()
    for piece in pieces:
        for shard in piece.addressable_shards:
            rows = shard.index[0].indices(piece.shape[0])
            place = f"{first + rows[0]}:{first + rows[1]} {shard.index[1:]}"
            found[place] = np.asarray(shard.data).tobytes().hex()
        first += piece.shape[0]
    return found


def plans(texts: str) -> list[Any]:
    """What each of some plan files gives; of one with "early" the state is made before the plan."""
    found: list[Any] = []
    for path, when, transport in json.loads(texts):
        step = autopar.parallelize(train, plan=Path(path), transport=transport)
        if when == "early":  # cut up evenly over all devices
            state = autopar.parallelize(train).init(create, jax.random.key(0))
        else:
            state = step.init(create, jax.random.key(0))
        told, state = trained(step, state)
        found.append([told, own_rows(state["w"])])
    return found


def model(name: str, optimizer: Optimizer) -> Case:
    """A model of the zoo, one of those that are hard to cut into stages, or "program SEED".

    Those are the fuzzer's, with two blocks at most: a job runs what is around the blocks.
    """
    from tests.fuzz.case import load
    from tests.fuzz.program import draw_program
    from tests.zoo import Case, cases
    from tests.zoo.staged import staged_cases

    if not name.startswith(PROGRAM):
        return (cases(optimizer) | staged_cases(optimizer))[name]
    drawn = draw_program(int(name.removeprefix(PROGRAM)))
    loaded = load(replace(drawn, blocks=drawn.blocks[:2]).text, f"<{name}>")
    return Case(name, lambda key: loaded.create_state(), loaded.step, loaded.make_batch)


def own_parts(
    name: str, optimizer: Optimizer, path: str, transport: Literal["pull", "put"], start: str
) -> Parts:
    """The type and the bytes of all that this process has after two steps of a plan.

    They are the metrics of both steps and the parts of the state, by path and place. Where the
    `start` is "host" every process passes the first state as it lies on its host.
    """
    case = model(name, optimizer)
    step = autopar.parallelize(case.step, plan=Path(path), transport=transport)
    made = partial(case.create_state, jax.random.key(0))
    state = made() if start == "host" else step.init(made)
    found: Parts = {}
    for number in range(2):
        state, metrics = step(state, case.batch(number))
        found |= parts_of(metrics, f" {number}")
    return found | parts_of(state)


def parts(folder: str, case: str, then: str = "forget") -> str:
    """The file with what a plan of a model leaves in this process: too much for a pipe."""
    path = Path(folder) / f"process-{jax.process_index()}.json"
    path.write_text(json.dumps(own_parts(*json.loads(case))))
    if then == "forget":
        jax.clear_caches()
    return str(path)


def own_rows_of(options: str) -> dict[str, Any]:
    """The same steps twice: every process is given all rows, and then its own alone."""
    step = autopar.parallelize(train, **json.loads(options))
    state = step.init(create, jax.random.key(0))
    step.plan_for(state, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
    mine = step.rows_of(jax.process_index())["batch"]

    def of_own(state: Any, batch: Any) -> Any:
        held = np.concatenate([batch[:0], *(batch[start:stop] for start, stop in mine)])
        return step(state, autopar.OwnRows(held, mine, ROWS))

    told, _ = trained(step, state)
    alone, _ = trained(of_own, step.init(create, jax.random.key(0)))
    cluster, plan = step.plan.origin.cluster_name, str(step.plan)
    found = {"of all rows": told, "of own rows": alone, "rows": mine}
    return found | {"cluster": cluster, "plan": plan}


def endless(stages: str, who_raises: str, who_waits: str = "nobody") -> None:
    """Steps without end, until a process raises, is killed, or waits for its data for ever."""
    count = int(stages)
    if count > 1:
        step = autopar.parallelize(
            train, stages=count, microbatches=2, schedule="gpipe", patience=2
        )
    else:
        step = autopar.parallelize(train, method="dp")
    state = step.init(create, jax.random.key(0))
    batch = batches()[0]
    for number in itertools.count():
        state, metrics = step(state, batch)
        float(metrics["loss"])
        if number == 0:
            sys.stdout.write("\nFIRST step\n")
            sys.stdout.flush()
        if number == 3 and str(jax.process_index()) == who_raises:
            raise ValueError("a bad row")
        if number == 3 and str(jax.process_index()) == who_waits:
            time.sleep(1000)


def unlike(what: str, first: str, second: str) -> None:
    """A step for which the last process has another JAX, plan, or batch than the others."""
    is_other = jax.process_index() == jax.process_count() - 1
    if what == "JAX" and is_other:
        jax.__version__ = "0.0.1"
    path = second if what == "plan" and is_other else first
    step = autopar.parallelize(train, plan=Path(path))
    batch = batches()[0]
    step(create(jax.random.key(0)), batch[: ROWS // 2] if what == "batch" and is_other else batch)


def checkpoints(folder: str, first: str, second: str) -> dict[str, Any]:
    """Saves after three steps of a plan, and restores under it and under another plan."""
    import orbax.checkpoint as ocp

    step, other = (autopar.parallelize(train, plan=Path(path)) for path in (first, second))
    told, state = trained(step, step.init(create, jax.random.key(0)))
    with ocp.CheckpointManager(folder) as manager:
        step.save(manager, 3, state, {"rows": 48})
        manager.wait_until_finished()
        found: dict[str, Any] = {"told": told, "saved": own_rows(state["w"])}
        for name, each in (("same", step), ("other", other)):
            restored = each.restore(manager, each.abstract_state(create, jax.random.key(0)))
            assert restored is not None
            found[name] = own_rows(restored.state["w"])
            found[f"{name} number"] = int(restored.state["step"])
            found[f"{name} extras"] = restored.extras
            found[f"{name} then"], _ = trained(each, restored.state)
    return found
