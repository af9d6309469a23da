"""Programs of stages give what one program gives, whatever the order and the submeshes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.errors import GraphError, PlanMismatchError
from autopar.frontend.traced import Piece
from autopar.ir.plan import Argument
from autopar.ir.program import Program, Send
from autopar.ir.sharding import MeshShape
from autopar.runtime.bind import bind_mesh
from autopar.runtime.executor import Executor, Options
from autopar.runtime.pieces import StackedPieces
from autopar.runtime.state import init
from autopar.runtime.transport.abstract import AbstractTransport, Copier, Endpoint, Route
from autopar.runtime.transport.local import LocalTransport
from tests.runtime.stages import Builder, Model, Order, one_forward_one_backward, serial

MICROBATCHES = 4


def bound(sizes: Sequence[tuple[int, ...]], devices: Sequence[jax.Device]) -> list[Mesh]:
    """Meshes one after the other on the devices."""
    meshes: list[Mesh] = []
    start = 0
    for size in sizes:
        shape = MeshShape.of(size)
        rest = devices[start : start + shape.device_count]
        meshes.append(bind_mesh(shape, range(shape.device_count), rest))
        start += shape.device_count
    return meshes


def staged(
    model: Model, meshes: Sequence[Mesh], order: Order = serial, dtype: str = ""
) -> tuple[Any, Program]:
    """The model's trace and its program in stages."""
    trace = model.trace(MICROBATCHES)
    shapes = tuple(MeshShape(tuple(m.axis_names), tuple(m.devices.shape)) for m in meshes)
    rows = model.batch // MICROBATCHES
    graph = trace.part.graph
    return trace, Builder(graph, model.layers, rows, shapes, MICROBATCHES, order, dtype).program()


def executor(
    model: Model, meshes: Sequence[Mesh], order: Order = serial, **options: Any
) -> Executor:
    trace, program = staged(model, meshes, order)
    return Executor(trace, program, meshes, Options(**options))


def three_steps(run: Any, model: Model) -> list[Any]:
    """State, losses and predictions of three steps on different rows."""
    state, told = model.weights(), []
    for seed in range(3):
        state, loss, made = run(model.flat(state, seed))
        told += [np.asarray(loss), np.asarray(made)]
    return [*map(np.asarray, state), *told]


def plain(model: Model) -> Any:
    step = jax.jit(model.step)
    return lambda flat: step(flat[: model.layers], *flat[model.layers :])


SUBMESHES = [
    [(2,), (4,)],
    [(1,), (2,), (4,), (1,)],
    *(
        pytest.param(sizes, marks=pytest.mark.slow)
        for sizes in ([(2,)] * 2, [(1,)] * 2, [(2, 2)] * 2, [(4,), (2,)], [(2,)] * 4)
    ),
]


@pytest.mark.parametrize("sizes", SUBMESHES, ids=str)
def test_stages_equal_the_plain_step(
    sizes: list[tuple[int, ...]], devices: list[jax.Device]
) -> None:
    model, meshes = Model(skip=len(sizes) == 4), bound(sizes, devices)
    wanted = three_steps(plain(model), model)
    got = three_steps(executor(model, meshes, one_forward_one_backward), model)
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)
    in_turn = three_steps(executor(model, meshes, serial), model)
    for g, s in zip(got, in_turn, strict=True):
        np.testing.assert_array_equal(g, s)


@pytest.fixture(scope="module", name="two")
def _two(devices: list[jax.Device]) -> tuple[Model, list[Mesh], Executor]:
    model, meshes = Model(), bound([(2,), (2,)], devices)
    return model, meshes, executor(model, meshes)


@pytest.mark.smoke
def test_state_is_consumed_and_comes_back_in_place(
    two: tuple[Model, list[Mesh], Executor],
) -> None:
    model, meshes, run = two
    first, _, _ = run(model.flat(model.weights()))
    second, _, _ = run(model.flat(first))
    assert all(w.is_deleted() for w in first)
    for n, w in enumerate(second):
        assert w.sharding.mesh == meshes[n // 2]
        assert w.sharding.is_equivalent_to(first[n].sharding, w.ndim)


def test_state_is_left_alone_where_it_is_not_donated(devices: list[jax.Device]) -> None:
    model, meshes = Model(), bound([(1,), (1,)], devices)
    run = executor(model, meshes, donate=False)
    first, _, _ = run(model.flat(model.weights()))
    once = run(model.flat(first))
    again = run(model.flat(first))
    for a, b in zip(once[0], again[0], strict=True):
        np.testing.assert_array_equal(a, b)


def test_host_arrays_are_not_written(two: tuple[Model, list[Mesh], Executor]) -> None:
    model, _, run = two
    given = model.weights()
    run(model.flat(given))
    for g, w in zip(given, model.weights(), strict=True):
        np.testing.assert_array_equal(g, w)


def test_arrays_from_anywhere_do(
    two: tuple[Model, list[Mesh], Executor], devices: list[jax.Device]
) -> None:
    model, meshes, run = two
    wanted = run(model.flat(model.weights()))
    elsewhere = [jax.device_put(w, devices[7]) for w in model.weights()]
    on_mesh = [jax.device_put(r, NamedSharding(meshes[0], P("data"))) for r in model.rows()]
    for rows in (on_mesh, [jax.device_put(r, devices[6]) for r in model.rows()]):
        got = run([*elsewhere, *rows])
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(g, w)


def test_equal_parts_are_compiled_once(devices: list[jax.Device]) -> None:
    """Of four stages those but the last have one forward, and all have one update."""
    report = executor(Model(), bound([(1,)] * 4, devices)).compile_report
    assert (report.parts, report.distinct) == (12, 6)
    assert report.compiled + report.loaded == report.parts
    assert report.compiled == report.distinct


def test_more_steps_than_fit_at_once(two: tuple[Model, list[Mesh], Executor]) -> None:
    """Nobody waits between forty steps: the window must."""
    model, _, run = two
    state = model.weights()
    for _ in range(40):
        state, _, _ = run(model.flat(state))
    assert all(np.isfinite(w).all() for w in state)


def test_accumulators_may_have_a_dtype_of_their_own(devices: list[jax.Device]) -> None:
    """Who reads such a sum rounds it to the dtype that the step has for it."""
    model, meshes = Model(), bound([(2,), (2,)], devices)
    trace, program = staged(model, meshes, dtype="bf16")
    got = Executor(trace, program, meshes)(model.flat(model.weights()))
    wanted = plain(model)(model.flat(model.weights()))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(g, w, rtol=1e-2, atol=1e-2)
    assert any(np.any(np.asarray(g) != w) for g, w in zip(got[0], wanted[0], strict=True))


def test_a_register_that_holds_nothing_is_named(devices: list[jax.Device]) -> None:
    model, meshes = Model(), bound([(1,), (1,)], devices)
    trace, program = staged(model, meshes)
    without = tuple(i for i in program.instructions if not isinstance(i, Send))
    with pytest.raises(GraphError, match=r"F1 reads r\d+ of mesh1, which holds nothing"):
        Executor(trace, replace(program, instructions=without), meshes)


def in_pieces(trace: Any) -> Any:
    """The same trace of a step whose first three weights are rows of one array."""
    pieces = (Piece(0, 0, 8), Piece(0, 8, 16), Piece(0, 16, 24), Piece(1))
    whole = replace(
        trace.whole,
        input_pieces=(*pieces, Piece(2), Piece(3)),
        output_pieces=(*pieces, Piece(2), Piece(3)),
        out_tree=jax.tree.structure(([0, 0], 0, 0)),
    )
    return replace(trace, whole=whole)


def test_a_leaf_may_lie_in_pieces_on_several_submeshes(devices: list[jax.Device]) -> None:
    model, meshes = Model(), bound([(2,), (2,)], devices)
    trace, program = staged(model, meshes)
    run = Executor(in_pieces(trace), program, meshes)
    *first, last = model.weights()
    state: list[Any] = [np.concatenate(first), last]
    for seed in range(2):
        state, _, _ = run([*state, *model.rows(seed)])
    assert isinstance(state[0], StackedPieces)
    homes = [p.devices() for p in state[0].pieces]
    assert homes == [set(meshes[s].devices.flat) for s in (0, 0, 1)]
    wanted = model.weights()
    for seed in range(2):
        wanted, _, _ = jax.jit(model.step)(wanted, *model.rows(seed))
    np.testing.assert_allclose(state[0], np.concatenate(wanted[:3]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state[1], wanted[3], rtol=1e-5, atol=1e-5)


def planned(trace: Any, program: Program) -> list[Argument]:
    """The weights as a plan lists them: the first three are rows of one array."""
    names = ["w[0:8]", "w[8:16]", "w[16:24]", "v"]
    feeds = {f.input: f for f in program.feeds}
    values = [i.value for i in trace.part.graph.inputs[: len(names)]]
    return [
        Argument(path, v.shape, v.dtype, "state", feeds[i].sharding, feeds[i].submesh)
        for i, (path, v) in enumerate(zip(names, values, strict=True))
    ]


def test_state_is_born_on_the_submeshes_that_keep_it(devices: list[jax.Device]) -> None:
    """Bits are those of a plain start, in one piece or several; a step takes it as it is."""
    model, meshes = Model(), bound([(2,), (2,)], devices)
    trace, program = staged(model, meshes)
    run = Executor(in_pieces(trace), program, meshes)
    arguments = planned(trace, program)

    def create(key: jax.Array) -> list[jax.Array]:
        ones, others = jax.random.split(key)
        return [jax.random.normal(ones, (24, 8)), jax.random.uniform(others, (8, 8))]

    key = jax.device_put(jax.random.key(5), devices[7])
    born = init(create, (key,), {}, arguments, meshes)
    assert isinstance(born[0], StackedPieces)
    for got, wanted in zip(born, create(key), strict=True):
        np.testing.assert_array_equal(got, wanted)
    before = [*born[0].pieces, born[1]]
    run([*born, *model.rows()])
    assert all(piece.is_deleted() for piece in before)
    with pytest.raises(PlanMismatchError, match=r"w is \[24, 8\] in the plan and \[24, 9\] here"):
        init(lambda: [np.ones((24, 9))], (), {}, arguments, meshes)


class Interrupted(AbstractTransport):
    """Carries arrays as they are carried within a process; Ctrl-C is pressed when `left` is 0."""

    name = "interrupted"
    left = -1

    def copier(
        self, routes: Sequence[Route], source: Endpoint, target: Endpoint, edge: int
    ) -> Copier:
        """A way that may be broken off."""
        carry = LocalTransport().copier(routes, source, target, edge)

        def carried(arrays: Sequence[Any]) -> Sequence[Any]:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return carry(arrays)

        return carried


@pytest.mark.parametrize("patience", [None, 60.0])
def test_a_call_that_is_broken_off_leaves_nothing_behind(
    devices: list[jax.Device], patience: float | None
) -> None:
    model, meshes, transport = Model(), bound([(2,), (2,)], devices), Interrupted()
    run = executor(model, meshes, transport=transport, patience=patience)
    wanted = three_steps(plain(model), model)
    for call in (run, run.run_traced):
        transport.left = 3
        with pytest.raises(KeyboardInterrupt):
            call(model.flat(model.weights()))
        for g, w in zip(three_steps(run, model), wanted, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)
