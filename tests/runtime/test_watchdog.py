"""A step that hangs is reported: which program, on which submesh, and who waits for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.program import Program, Run, Send
from autopar.ir.sharding import MeshShape
from autopar.runtime.executor import Executor, Options
from autopar.runtime.watchdog import standstill
from tests.runtime.stages import Builder, Model
from tests.runtime.test_pipeline import bound, staged


def small_program() -> Program:
    model = Model(layers=2, batch=4)
    graph = model.trace(2).part.graph
    return Builder(graph, 2, 2, (MeshShape.of(1),) * 2, 2).program()


def number_of(program: Program, name: str, microbatch: int) -> int:
    return next(
        n
        for n, step in enumerate(program.instructions)
        if isinstance(step, Run)
        and program.parts[step.part].part.name == name
        and step.microbatch == microbatch
    )


def test_what_hangs_is_told_from_what_waits() -> None:
    program = small_program()
    hangs = number_of(program, "B1", 0)
    done = [number_of(program, name, 0) for name in ("F0", "F1")]
    text = standstill(program, done, 60.0)
    assert "mesh0  did F0.0; waits for B1.0 to run B0.0, then F0.1" in text
    assert "mesh1  did F1.0; HANGS in B1.0, then F1.1" in text
    marked = [line for line in text.splitlines() if line.startswith(">")]
    assert [line.split()[1] for line in marked] == [str(hangs)]


def test_a_submesh_may_have_done_all_or_nothing() -> None:
    program = small_program()
    own = {
        n
        for n, step in enumerate(program.instructions)
        if isinstance(step, Run) and program.submesh_of(step) == 1
    }
    text = standstill(program, own, 60.0)
    assert "mesh0  did nothing; HANGS in F0.0, then B0.0" in text
    assert "mesh1  has done all, update1.0 last" in text


def test_a_blocked_program_is_reported_and_goes_on(devices: list[jax.Device]) -> None:
    """The last forward waits on the host until it has been reported."""
    goes_on, reported, texts = threading.Event(), threading.Event(), list[str]()

    def held_up(h: Any) -> Any:
        goes_on.wait(60)
        return np.zeros_like(h)

    def report(text: str) -> None:
        texts.append(text)
        reported.set()

    model, meshes = Model(held_up=held_up), bound([(1,), (1,)], devices)
    trace, program = staged(model, meshes)
    run = Executor(trace, program, meshes, Options(patience=0.2, report=report))
    with ThreadPoolExecutor(1) as pool:  # the call itself may wait for what is held up
        called = pool.submit(run, model.flat(model.weights()))
        assert reported.wait(60)
        goes_on.set()
        state, loss, _ = called.result()
    jax.block_until_ready(state)
    assert np.isfinite(loss)
    assert "mesh1  did nothing; HANGS in F1.0, then B1.0" in texts[0]
    assert "mesh0  did F0.0; waits for B1.0 to run B0.0" in texts[0]
    assert len(texts) == 1


def test_a_process_runs_its_part_of_the_program_alone() -> None:
    """Of two processes the first has mesh0: what mesh1 sends it never comes."""
    program = small_program()
    own = [
        n
        for n, step in enumerate(program.instructions)
        if isinstance(step, Send) or program.submesh_of(step) == 0
    ]
    part = program.only(own)
    done = [number_of(part, "F0", 0), number_of(part, "F0", 1)]
    text = standstill(part, done, 600.0)
    assert "a step has made no progress for 600 s:" in text
    assert "mesh0  did F0.1; HANGS in B0.0, or waits for what mesh1 sends to it, then" in text
    assert "mesh1  is another process's" in text


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, 600.0),
        ({"patience": 5}, 5.0),
        ({"patience": None}, None),
        ({"stages": 1, "microbatches": 1}, None),
    ],
)
def test_pipelines_are_watched(options: dict[str, Any], wanted: float | None) -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    seen: list[float | None] = []
    given: dict[str, Any] = {"stages": 2, "microbatches": 2, **options}
    run = autopar.parallelize(step, cluster="2xcpu", **given)

    class Seen(Executor):
        def __init__(self, trace: Any, program: Any, meshes: Any, options: Options) -> None:
            seen.append(options.patience)
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.step.Executor", Seen)
        with pytest.raises(KeyboardInterrupt):
            run(jnp.ones((2, 4, 4)), jnp.ones((8, 4)))
    assert seen == [wanted]


def test_a_step_that_hangs_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for the host would end it, if the end were not held back here."""
    reported, texts = threading.Event(), list[str]()

    def end(text: str) -> None:
        texts.append(text)
        reported.set()

    def wait(x: Any) -> Any:
        assert reported.wait(60)
        return np.asarray(x)

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            held = jax.pure_callback(wait, x, x, vmap_method="sequential")
            return jnp.mean((jax.lax.stop_gradient(held) @ w) ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    monkeypatch.setattr("autopar.runtime.job.end_process", end)
    run = autopar.parallelize(step, cluster="1xcpu", patience=0.1, donate=False)
    with ThreadPoolExecutor(1) as pool:
        w = pool.submit(run, jnp.ones((4, 4)), jnp.ones((8, 4))).result()
    assert np.isfinite(np.asarray(w)).all()
    assert "a step has made no progress for" in texts[0]
    assert "HANGS in" in texts[0]
