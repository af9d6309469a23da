"""Parts do the moves that sends would else need programs of their own for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.graph import Graph
from autopar.ir.program import (
    Fetch,
    Instruction,
    Part,
    PartKind,
    PartProgram,
    Program,
    Run,
    Send,
    Transfer,
)
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.stages import Submesh
from autopar.ir.values import Value
from autopar.runtime import executor
from autopar.runtime.executor import Executor, Options
from autopar.runtime.joined import join_moves
from autopar.runtime.parts import PartSource
from autopar.runtime.shardings import bind_plan

WHOLE, ROWS, COLUMNS = Sharding(((), ())), Sharding((("data",), ())), Sharding(((), ("data",)))
TWO, FOUR = MeshShape(("data",), (2,)), MeshShape(("data",), (4,))
MAKE = Run(0, 0, (), (), (0,))
READ = Run(1, 0, (0,), (), (1,))


def sent(before: Sharding, after: Sharding, target: int = 0) -> Send:
    value = Value("a", (8, 8), "f32")
    return Send(0, 1, (Transfer(value, 0, target, before, after),), 0)


def joined(
    steps: Sequence[Instruction],
    fetches: Sequence[Fetch] = (),
    meshes: tuple[MeshShape, MeshShape] = (TWO, TWO),
) -> tuple[list[tuple[str, str]], list[dict[int, Sharding]]]:
    """Both ends of all transfers then, and what the maker leaves and the reader takes otherwise."""
    graph = Graph("", (), (), ())
    parts = [Part(PartKind.FORWARD, n, min(n, 1), graph, ()) for n in range(3)]
    program = Program(
        cast("tuple[Submesh, ...]", (None, None)),
        tuple(PartProgram(part, cast("Any", None)) for part in parts),
        tuple(steps),
        (),
        tuple(fetches),
        (2, 4),
        1,
    )
    sources = [
        PartSource(cast("Any", None), part, meshes[part.part.submesh], "cpu")
        for part in program.parts
    ]
    made, (maker, reader, _) = join_moves(program, sources, meshes)
    sends = [t for s in made.instructions if isinstance(s, Send) for t in s.transfers]
    ends = [(str(t.before), str(t.after)) for t in sends]
    return ends, [dict(maker.leaving), dict(reader.arriving)]


def test_the_side_that_has_less_to_move_moves() -> None:
    rows, whole, columns = map(str, (ROWS, WHOLE, COLUMNS))
    assert joined([MAKE, sent(ROWS, WHOLE), READ]) == ([(rows, rows)], [{}, {0: ROWS}])
    assert joined([MAKE, sent(WHOLE, ROWS), READ]) == ([(rows, rows)], [{0: ROWS}, {}])
    assert joined([MAKE, sent(ROWS, COLUMNS), READ]) == ([(columns,) * 2], [{0: COLUMNS}, {}])
    assert joined([MAKE, sent(ROWS, ROWS), READ]) == ([(rows, rows)], [{}, {}])
    assert whole != rows


@pytest.mark.parametrize(
    ("steps", "fetches"),
    [
        pytest.param(
            [MAKE, sent(ROWS, WHOLE), READ, replace(READ, part=2, outputs=(2,))], [],
            id="two parts read it: each would move it",
        ),
        pytest.param(
            [MAKE, Run(0, 1, (0,), (), (1,)), sent(WHOLE, ROWS), READ], [],
            id="it is read where it is made, too",
        ),
        pytest.param(
            [MAKE, sent(WHOLE, ROWS), READ], [Fetch(0, 0, WHOLE, (0,))],
            id="the user is given it where it is made",
        ),
        pytest.param(
            [MAKE, sent(ROWS, WHOLE), READ], [Fetch(0, 1, WHOLE, (0,))],
            id="the user is given it where it arrives",
        ),
        pytest.param(
            [MAKE, sent(WHOLE, ROWS), sent(WHOLE, COLUMNS, 3), READ], [],
            id="it is sent twice, to lie in two ways",
        ),
    ],
)  # fmt: skip
def test_what_others_read_too_is_moved_apart(
    steps: list[Instruction], fetches: list[Fetch]
) -> None:
    before = [(str(t.before), str(t.after)) for s in steps if isinstance(s, Send)
              for t in s.transfers]  # fmt: skip
    assert joined(steps, fetches) == (before, [{}, {}])


def test_meshes_of_other_shapes_have_other_layouts() -> None:
    found = joined([MAKE, sent(ROWS, WHOLE), READ], meshes=(TWO, FOUR))
    assert found == ([(str(ROWS), str(WHOLE))], [{}, {}])


def train(weights: Any, batch: Any) -> Any:
    """A chain so small that its forward pass is best done whole on every device."""

    def loss(weights: Any) -> Any:
        h = batch["x"]
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - batch["y"]) ** 2)

    value, slopes = jax.value_and_grad(loss)(weights)
    return [w - 0.01 * g for w, g in zip(weights, slopes, strict=True)], value


def test_a_step_gives_every_bit_that_moves_apart_give(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [np.asarray(jax.random.normal(jax.random.key(n), (16, 16))) / 4 for n in range(4)]
    x, y = np.random.default_rng(0).normal(size=(2, 64, 16)).astype(np.float32)
    batch = {"x": x, "y": y}
    step = autopar.parallelize(
        train, cluster="4xcpu", stages=2, microbatches=2, schedule="1f1b", donate=False
    )
    planned = step.planned(weights, batch)
    meshes, leaves = bind_plan(planned.plan), jax.tree.leaves((weights, batch))
    apart = [t for s in planned.program.instructions if isinstance(s, Send) for t in s.transfers]
    assert any(t.before != t.after for t in apart)

    together = Executor(planned.trace, planned.program, meshes, Options(donate=False))
    sends = [s for s in together.program.instructions if isinstance(s, Send)]
    assert all(t.before == t.after for s in sends for t in s.transfers)
    monkeypatch.setattr(executor, "join_moves", lambda program, sources, _: (program, sources))
    alone = Executor(planned.trace, planned.program, meshes, Options(donate=False))
    for a, b in zip(*map(jax.tree.leaves, (together(leaves), alone(leaves))), strict=True):
        np.testing.assert_array_equal(a, b)
