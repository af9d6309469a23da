"""Moves keep the value: any route, run on eight devices, gives back the same whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from autopar.cluster import Cluster
from autopar.cost.prices import Prices
from autopar.cost.reshard import Resharder, Route
from autopar.ir.listing import COLLECTIVES, Move, MoveStep
from autopar.ir.sharding import MeshShape, Sharding
from autopar.ir.values import Value
from autopar.runtime.bind import bind_mesh
from autopar.runtime.moves import run_move

SHAPES = ((8,), (16, 8), (8, 24), (8, 1, 16), (0, 8), ())
MESHES = ("8", "4,2", "2,2,2")


@dataclass(frozen=True)
class Trip:
    """One move of one value."""

    whole: np.ndarray[Any, Any]
    move: Move

    def __str__(self) -> str:
        steps = ", ".join(map(str, self.move.steps))
        return f"{self.whole.shape} {self.move.before} -> {self.move.after} by {steps}"


def resharder(mesh: str) -> Resharder:
    shape = MeshShape.of(mesh)
    return Resharder(Prices(Cluster.parse(f"{shape.device_count}xh100"), shape))


def move_of(value: Value, before: Sharding, after: Sharding, route: Route, **more: Any) -> Move:
    return Move(
        value, "%0", "%1", before, after, route.steps, collectives=route.collectives, **more
    )


def random_trips(mesh: str, count: int, seed: int) -> list[Trip]:
    """Random pairs of shardings of random shapes, partial sums among them."""
    rng, prices = np.random.default_rng(seed), resharder(mesh)
    trips: list[Trip] = []
    for n in range(count):
        shape = SHAPES[n % len(SHAPES)]
        value = Value("%0", shape, "f32")
        states = list(prices.table(value, True).index)
        before, after = (states[int(rng.integers(len(states)))] for _ in range(2))
        route = prices.route(value, before, after)
        whole = rng.integers(-64, 64, size=shape).astype(np.float32)
        repeat = int(rng.integers(3))
        trips.append(Trip(whole, move_of(value, before, after, route, repeat=repeat)))
    return trips


def run_trips(trips: Sequence[Trip], mesh: MeshShape) -> list[np.ndarray[Any, Any]]:
    """The whole value after each trip: pieces that are partial sums are stacked and added up."""
    inputs, ins, outs = list[Any](), list[PartitionSpec](), list[PartitionSpec]()
    rng = np.random.default_rng(0)
    for trip in trips:
        before, after = trip.move.before, trip.move.after
        inputs.append(summands(trip.whole, mesh.size(before.partial), rng))
        ins.append(stacked_spec(before))
        outs.append(stacked_spec(after))

    def pieces(given: list[Any]) -> list[Any]:
        moved = [run_move(p[0], t.move, mesh) for p, t in zip(given, trips, strict=True)]
        return [m[None] for m in moved]

    region = jax.shard_map(
        pieces,
        mesh=bind_mesh(mesh, range(mesh.device_count)),
        in_specs=(ins,),
        out_specs=outs,
        check_vma=False,
    )
    return [np.asarray(o).sum(0) for o in jax.jit(region)(inputs)]


def stacked_spec(sharding: Sharding) -> PartitionSpec:
    """A leading dim holds the partial sums."""
    return PartitionSpec(sharding.partial or None, *(axes or None for axes in sharding.dims))


def summands(
    whole: np.ndarray[Any, Any], count: int, rng: np.random.Generator
) -> np.ndarray[Any, Any]:
    """`count` arrays that add up to the whole, in whole numbers."""
    noise = rng.integers(-64, 64, size=(count - 1, *whole.shape)).astype(whole.dtype)
    return np.concatenate([noise, (whole - noise.sum(0))[None]])


@pytest.mark.parametrize("mesh", [pytest.param("2,4", marks=pytest.mark.smoke), *MESHES])
def test_any_route_keeps_the_value(mesh: str, devices: list[jax.Device]) -> None:
    trips = random_trips(mesh, 36, seed=len(mesh))
    for trip, got in zip(trips, run_trips(trips, MeshShape.of(mesh)), strict=True):
        np.testing.assert_array_equal(got, trip.whole, err_msg=str(trip))


def every_step(mesh: MeshShape) -> list[tuple[Sharding, MoveStep, Sharding]]:
    """Each kind of step by hand, with what it must make of a sharding."""
    a, b = mesh.names
    whole, none = ((), ()), ()
    return [
        (Sharding(whole), MoveStep("slice", (b,), 1), Sharding(((), (b,)))),
        (Sharding(((a,), ())), MoveStep("slice", (b,), 0), Sharding(((a, b), ()))),
        (Sharding(((b,), ())), MoveStep("slice", (a,), 0), Sharding(((b, a), ()))),
        (Sharding(((a, b), ())), MoveStep("all-gather", (b,), 0), Sharding(((a,), ()))),
        (Sharding(((b, a), ())), MoveStep("all-gather", (b, a), 0), Sharding(whole)),
        (Sharding(((b, a), ())), MoveStep("all-to-all", (a,), 0, 1), Sharding(((b,), (a,)))),
        (Sharding(((b, a), ())), MoveStep("all-to-all", (b, a), 0, 1), Sharding(((), (b, a)))),
        (Sharding(((a,), (b,))), MoveStep("all-to-all", (b,), 1, 0), Sharding(((a, b), ()))),
        (
            Sharding(((a, b), ())),
            MoveStep("collective-permute", (a, b), 0, -1, (b, a)),
            Sharding(((b, a), ())),
        ),
        (Sharding(whole), MoveStep("mask", (a,)), Sharding(whole, (a,))),
        (Sharding(((b,), ()), (a,)), MoveStep("all-reduce", (a,)), Sharding(((b,), ()))),
        (Sharding(whole, (a, b)), MoveStep("all-reduce", (b,)), Sharding(whole, (a,))),
        (Sharding(whole, (a, b)), MoveStep("reduce-scatter", (a, b), 0), Sharding(((a, b), none))),
        (Sharding(((b,), ()), (a,)), MoveStep("reduce-scatter", (a,), 0), Sharding(((b, a), ()))),
    ]


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 2)])
def test_every_kind_of_step_does_what_it_says(
    sizes: tuple[int, int], devices: list[jax.Device]
) -> None:
    mesh = MeshShape(("data", "model"), sizes)
    value = Value("%0", (16, 8), "f32")
    whole = np.arange(128, dtype=np.float32).reshape(16, 8)
    trips = [
        Trip(whole, Move(value, "%0", "%1", before, after, (step,)))
        for before, step, after in every_step(mesh)
    ]
    for trip, got in zip(trips, run_trips(trips, mesh), strict=True):
        np.testing.assert_array_equal(got, trip.whole, err_msg=str(trip))


def test_an_axis_may_be_changed_for_another_of_its_size(devices: list[jax.Device]) -> None:
    mesh = MeshShape(("x", "y", "z"), (2, 2, 2))
    value, whole = Value("%0", (8,), "f32"), np.arange(8, dtype=np.float32)
    changes = [(("x",), ("y",)), (("x", "y"), ("z", "y")), (("z", "x"), ("z", "y"))]
    trips = [
        Trip(
            whole,
            Move(value, "%0", "%1", Sharding((old,)), Sharding((new,)),
                 (MoveStep("collective-permute", old, 0, -1, new),)),
        )
        for old, new in changes
    ]  # fmt: skip
    for trip, got in zip(trips, run_trips(trips, mesh), strict=True):
        np.testing.assert_array_equal(got, whole, err_msg=str(trip))


@pytest.mark.parametrize(
    ("combiner", "dtype"), [("max", "f32"), ("min", "f32"), ("and", "bool"), ("or", "bool")]
)
def test_other_combiners_than_sums(combiner: str, dtype: str, devices: list[jax.Device]) -> None:
    mesh = MeshShape.of("2,4")
    parts = np.random.default_rng(1).integers(2, size=(8, 4))
    given = parts.astype(bool) if dtype == "bool" else parts.astype(np.float32) - 0.5
    step = MoveStep("all-reduce", ("data", "model"))
    before, after = Sharding(((),), ("data", "model")), Sharding(((),))
    move = Move(Value("%0", (4,), dtype), "%0", "%1", before, after, (step,), combiner)
    region = jax.shard_map(
        lambda p: run_move(p[0], move, mesh),
        mesh=bind_mesh(mesh, range(8)),
        in_specs=stacked_spec(before),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    combines: dict[str, Any] = {"max": np.max, "min": np.min, "and": np.all, "or": np.any}
    np.testing.assert_array_equal(jax.jit(region)(given), combines[combiner](given, axis=0))


def test_other_combiners_scatter_too(devices: list[jax.Device]) -> None:
    mesh = MeshShape.of("2,4")
    given = np.random.default_rng(1).standard_normal((4, 2, 8)).astype(np.float32)
    step = MoveStep("reduce-scatter", ("model",), 1)
    before, after = Sharding((("data",), ()), ("model",)), Sharding((("data",), ("model",)))
    move = Move(Value("%0", (2, 8), "f32"), "%0", "%1", before, after, (step,), "max")
    region = jax.shard_map(
        lambda p: run_move(p[0], move, mesh),
        mesh=bind_mesh(mesh, range(8)),
        in_specs=PartitionSpec("model", "data"),
        out_specs=PartitionSpec("data", "model"),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(region)(given), given.max(axis=0))


def test_and_over_numbers_is_refused(devices: list[jax.Device]) -> None:
    mesh = MeshShape.of("2")
    step = MoveStep("all-reduce", ("data",))
    before = Sharding((), ("data",))
    move = Move(Value("%0", (), "f32"), "%0", "%1", before, Sharding(()), (step,), "and")
    region = jax.shard_map(
        lambda p: run_move(p[0], move, mesh),
        mesh=bind_mesh(mesh, range(2)),
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    with pytest.raises(TypeError, match="needs booleans, not float32"):
        jax.eval_shape(region, jnp.zeros(2))


def test_equal_gathers_of_two_regions_stay_two(devices: list[jax.Device]) -> None:
    """A weight that is gathered again in the backward pass must not be kept in between."""
    mesh, value = MeshShape.of("8"), Value("%0", (64,), "f32")
    before, after = Sharding((("data",),)), Sharding(((),))
    route = resharder("8").route(value, before, after)
    assert [c.kind for c in route.collectives] == ["all-gather"]

    def both(piece: Any, repeats: Sequence[int]) -> Any:
        return sum(
            run_move(piece, move_of(value, before, after, route, repeat=r), mesh) for r in repeats
        )

    def gathers(repeats: Sequence[int]) -> int:
        region = jax.shard_map(
            lambda p: both(p, repeats),
            mesh=bind_mesh(mesh, range(8)),
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        text = jax.jit(region).lower(jnp.zeros(64)).compile().as_text() or ""
        return sum(" all-gather(" in line for line in text.splitlines())

    assert (gathers([0, 0]), gathers([0, 1])) == (1, 2)


def test_collectives_are_the_steps_that_talk() -> None:
    for trip in random_trips("2,2,2", 60, seed=7):
        talking = [s.kind for s in trip.move.steps if s.kind in COLLECTIVES]
        assert talking == [c.kind for c in trip.move.collectives]
