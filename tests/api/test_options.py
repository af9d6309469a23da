"""Options that cannot be used: each is refused at the door, by name, with what would do."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import (
    ArgumentError,
    ClusterError,
    InputError,
    MeshError,
    PinError,
    PlanFileError,
    ScheduleError,
)

S = jax.ShapeDtypeStruct
W, X = S((16, 16), jnp.float32), S((8, 16), jnp.float32)


def step(w: Any, x: Any, mode: Any = None) -> Any:
    return w - 0.1 * jax.grad(lambda v: jnp.mean((x @ v) ** 2))(w)


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


async def awaited(w: Any) -> Any:
    return w


def yielding(w: Any) -> Any:
    yield w


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("cluster", 5, ClusterError, "cluster is 5; it takes '8xh100'"),
    ("cluster", "", ClusterError, "is not understood"),
    ("cluster", b"8xcpu", ClusterError, "cluster is b'8xcpu'"),
    ("cluster", ["8xcpu"], ClusterError, "it takes"),
    ("cluster", "\0.toml", ClusterError, "cannot be read: it is no text file"),
    ("cluster", Path("/no/such.toml"), ClusterError, "cannot be read"),
    ("cluster", Path("/tmp"), ClusterError, "cannot be read"),
    ("cluster", "x" * 300 + ".toml", ClusterError, "cannot be read"),
    ("cluster", "v5p-65", ClusterError, "no v5p slice of 65 cores.*near it are.*v5p-64"),
    ("mesh", (2.5, 4), MeshError, r"mesh is \(2.5, 4\); it takes sizes"),
    ("mesh", 2.0, MeshError, "mesh is 2.0"),
    ("mesh", 0, MeshError, "sizes are whole numbers from 1 on"),
    ("mesh", -8, MeshError, "mesh is -8"),
    ("mesh", True, MeshError, "mesh is True"),
    ("mesh", (2, "4"), MeshError, "it takes"),
    ("mesh", ("data", "model"), MeshError, "it takes"),
    ("mesh", "data", MeshError, "is not understood"),
    ("mesh", "", MeshError, "is not understood"),
    ("mesh", "a=2,a=4", MeshError, "not distinct"),
    ("mesh", {"data": 2.5, "model": 4}, MeshError, "it takes"),
    ("mesh", {1: 8}, MeshError, "axis names are texts"),
    ("mesh", {"a b": 8}, MeshError, "identifier"),
    ("mesh", {2, 4}, MeshError, "it takes"),
    ("mesh", b"24", MeshError, "it takes"),
    ("mesh", np.float32(8), MeshError, "it takes"),
    ("mesh", object(), MeshError, "it takes"),
    ("method", None, ArgumentError, "method is None.*there are: auto, dp"),
    ("method", "", ArgumentError, "there are: auto"),
    ("method", 5, ArgumentError, "there are: auto"),
    ("method", ["dp"], ArgumentError, "there are: auto"),
    ("memory_gb", math.nan, ArgumentError, "memory_gb is nan; it takes the GiB of one device"),
    ("memory_gb", math.inf, ArgumentError, "memory_gb is inf"),
    ("memory_gb", -1, ArgumentError, "memory_gb is -1"),
    ("memory_gb", 0, ArgumentError, "memory_gb is 0"),
    ("memory_gb", 1e-12, ArgumentError, "memory_gb is 1e-12"),
    ("memory_gb", True, ArgumentError, "memory_gb is True"),
    ("memory_gb", "8", ArgumentError, "memory_gb is '8'"),
    ("memory_gb", 1j, ArgumentError, "memory_gb is 1j"),
    ("pins", 5, PinError, "pins is 5; it takes {path pattern"),
    ("pins", "w=P('data')", PinError, "it takes {path pattern"),
    ("pins", [("w", P("data"))], PinError, "it takes {path pattern"),
    ("pins", {"w": "data"}, PinError, "write a PartitionSpec"),
    ("pins", {"w": 3}, PinError, "write a PartitionSpec"),
    ("pins", {"w": {"data"}}, PinError, "write a PartitionSpec"),
    ("pins", {3: P("data")}, PinError, "a pattern of pins is 3"),
    ("pins", {"w": (1, None)}, PinError, "a dim of pin 'w' is 1"),
    ("pins", {"w": P(("data", 3))}, PinError, "a dim of pin 'w'"),
    ("pins", {"w": P(P.UNCONSTRAINED)}, PinError, "a dim of pin 'w'"),
    ("patience", "Auto", ArgumentError, "patience is 'Auto'"),
    ("patience", 0, ArgumentError, "patience is 0; it takes seconds above 0, as in patience=600"),
    ("patience", math.nan, ArgumentError, "patience is nan"),
    ("patience", "60", ArgumentError, "patience is '60'"),
    ("plan", 5, ArgumentError, "plan is 5; it takes a Plan or the path of one"),
    ("plan", "plan.json", PlanFileError, "plan.json"),
    ("plan", "\0", PlanFileError, "it is no text file"),
    ("plan", "x" * 300, PlanFileError, "x"),
    ("plan", {}, ArgumentError, "plan is {}"),
    ("donate", 1, ArgumentError, "donate is 1; it takes True or False"),
    ("donate", "no", ArgumentError, "donate is 'no'"),
    ("static_argnums", 3, ArgumentError, "the step has arguments w, x, mode"),
    ("static_argnums", (-4,), ArgumentError, "the step has arguments"),
    ("static_argnums", "mode", ArgumentError, "positions of the step's arguments"),
    ("static_argnums", 1.0, ArgumentError, "positions of the step's arguments"),
    ("static_argnums", (2, -1), ArgumentError, "each position once"),
    ("static_argnames", "mood", ArgumentError, "static_argnames is 'mood'.*arguments w, x, mode"),
    ("static_argnames", 2, ArgumentError, "names of the step's arguments"),
    ("static_argnames", ("mode", 2), ArgumentError, "names of the step's arguments"),
    ("state_argnums", 7, ArgumentError, "state_argnums is 7.*the step has arguments"),
    ("state_argnums", (0, 0), ArgumentError, "each position once"),
    ("state_argnums", "w", ArgumentError, "positions of the step's arguments"),
    ("state_argnums", True, ArgumentError, "positions of the step's arguments"),
    ("mesh_axes", 0, ArgumentError, "mesh_axes is 0; it takes 1 to 3"),
    ("mesh_axes", 4, ArgumentError, "1 to 3"),
    ("mesh_axes", "2", ArgumentError, "1 to 3"),
    ("rules", {"dot_general": "a -> a"}, ArgumentError, "it takes a RuleBook"),
    ("rules", None, ArgumentError, "it takes a RuleBook"),
    ("rules", autopar.RuleBook({"dot_general": 3}), ArgumentError, "it takes a RuleBook"),  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    ("remat", "yes", ArgumentError, "remat is 'yes'; it takes 'auto' or False"),
    ("remat", True, ArgumentError, "remat is True"),
    ("remat", 0, ArgumentError, "remat is 0"),
    ("stages", True, ArgumentError, "stages is True; it takes 'auto' or a whole number"),
    ("stages", 2.0, ArgumentError, "stages is 2.0"),
    ("stages", -1, ArgumentError, "stages is -1"),
    ("stages", "2", ArgumentError, "stages is '2'"),
    ("microbatches", 0, ArgumentError, "microbatches is 0"),
    ("microbatches", [2], ArgumentError, r"microbatches is \[2\]"),
    ("schedule", 5, ScheduleError, "schedule is 5; it takes 'auto' or a name; there are: gpipe"),
    ("schedule", "1f2b", ScheduleError, "there are: gpipe"),
    ("batch_axes", 1, ArgumentError, "batch_axes is 1; it takes {path pattern: axis"),
    ("batch_axes", {"x": 1.5}, ArgumentError, "batch_axes is {'x': 1.5}"),
    ("batch_axes", {0: 0}, ArgumentError, "batch_axes is {0: 0}"),
    ("batch_axes", {"x": True}, ArgumentError, "it takes"),
    ("compiler_options", "fast", ArgumentError, "compiler_options is 'fast'; it takes {name"),
    ("compiler_options", {"fast": True}, ArgumentError, "'fast' is no option of XLA"),
    ("compiler_options", {1: True}, ArgumentError, "1 is no option of XLA"),
    ("compiler_options", {"xla_a": 0.5}, ArgumentError, "xla_a is 0.5, and an option is a bool"),
    ("compiler_options", {"xla_dump_to": "a"}, ArgumentError, "xla_dump_to names a file"),
]  # fmt: skip


def _name(case: object) -> str:
    """The same in every process: no addresses."""
    is_plain = isinstance(case, str | bytes | int | float | tuple | dict)
    text = str(case) if is_plain else getattr(case, "__name__", type(case).__name__)
    return text[:24].replace("\0", "NUL")


@pytest.mark.parametrize(("option", "given", "kind", "told"), WRONG, ids=_name)
def test_a_wrong_option_is_refused_by_name(
    option: str, given: Any, kind: type[Exception], told: str
) -> None:
    options: dict[str, Any] = {"cluster": "8xcpu", option: given}
    with pytest.raises(kind, match=told) as error:
        autopar.parallelize(step, **options)
    assert type(error.value) is kind
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("fun", [5, "step", [step], awaited, yielding], ids=_name)
def test_what_is_no_step_is_refused(fun: Any) -> None:
    for ask in (autopar.parallelize, autopar.plan, autopar.lint):
        with pytest.raises(ArgumentError, match=r"the step is .*; it takes a"):
            ask(fun, cluster="8xcpu")


def test_nothing_is_no_step_either() -> None:
    for ask in (autopar.plan, autopar.lint):
        with pytest.raises(ArgumentError, match="the step is None; it takes a function"):
            ask(None, W, X, cluster="8xcpu")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "ask",
    [
        lambda p: autopar.inspect(p),
        lambda p: autopar.explain(p, "w"),
        lambda p: autopar.why_not(p, {}),
        lambda p: autopar.save(p, "/tmp/never.json"),
        lambda p: autopar.write_report(p, "/tmp/never.html"),
        lambda p: autopar.verify(p, step, W, X),
        lambda p: autopar.parallelize(step, cluster="8xcpu").under(p),
    ],
)
def test_what_is_no_plan_is_refused(ask: Any) -> None:
    nones: tuple[Any, ...] = (None, 5, "plan.json", {})
    for given in nones:
        with pytest.raises(ArgumentError, match=r"it takes a Plan, as autopar\.load"):
            ask(given)


@pytest.mark.parametrize(
    "options",
    [{"steps": 0}, {"steps": "3"}, {"devices": 0}, {"devices": 2.5}, {"limit_seconds": math.nan},
     {"limit_seconds": -1}, {"level": "all"}, {"level": []}, {"target": 5}],
    ids=_name,
)  # fmt: skip
def test_wrong_options_of_verify(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options)) + "|cluster"):
        autopar.parallelize(step, cluster="8xcpu").verify(W, X, **options)


def test_what_has_no_text_and_what_is_long_are_shown_short() -> None:
    for given in (Unshown(), "x" * 5000, list(range(5000)), np.zeros((3, 5000))):
        with pytest.raises(InputError, match="remat is") as error:
            autopar.parallelize(step, cluster="8xcpu", remat=given)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        assert len(str(error.value)) < 200


def test_state_that_is_static_is_refused() -> None:
    with pytest.raises(ArgumentError, match="argument 0 is in state_argnums and is static too"):
        autopar.parallelize(step, cluster="8xcpu", state_argnums=0, static_argnames="w")


@pytest.mark.parametrize(
    "leaf",
    ["hello", "float32", object(), len, {1, 2}, (i for i in [1]), b"x", 2**40,
     np.array(["a"]), np.array([object()]), np.array("2026", "M8[D]")],
    ids=_name,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
def test_leaves_that_are_no_arrays_are_named(leaf: Any) -> None:
    parallel = autopar.parallelize(step, cluster="8xcpu")
    for given in (leaf, {"rows": leaf}):
        with pytest.raises(
            ArgumentError, match=r"^x(/rows)? of step is [\s\S]*static_argnames='x'"
        ):
            parallel.plan_for(W, given)


def test_dicts_with_keys_of_two_types_and_static_lists_are_named() -> None:
    parallel = autopar.parallelize(step, cluster="8xcpu", static_argnames="mode")
    with pytest.raises(ArgumentError, match="x of step is no tree that JAX can take apart"):
        parallel.plan_for(W, {1: X, "a": X})
    told = "mode of step is static and of type list"
    with pytest.raises(ArgumentError, match=told):
        parallel.plan_for(W, X, [1])
    with pytest.raises(ArgumentError, match=told):
        parallel.plan_for(W, X, mode=[1])


def test_a_step_that_exits_does_not_end_the_process() -> None:
    def leaving(w: Any) -> Any:
        raise SystemExit(3)

    with pytest.raises(autopar.errors.TraceError, match="SystemExit: 3"):
        autopar.plan(leaving, W, cluster="8xcpu")


# -- what is accepted ------------------------------------------------------------------------


class Trainer:
    def step(self, w: Any, x: Any) -> Any:
        return step(w, x)


@pytest.mark.parametrize(
    "fun", [lambda w, x: step(w, x), partial(step, mode=3), Trainer().step, jax.jit(step)]
)
def test_steps_of_every_kind(fun: Any) -> None:
    assert autopar.plan(fun, W, X, cluster="8xcpu", mesh=(8,)).device_count == 8


@pytest.mark.parametrize(
    "mesh",
    [(2, 4), [2, 4], np.array([2, 4]), (np.int64(2), 4), "2,4", "2x4", {"data": 2, "model": 4},
     "data=2, model=4", autopar.MeshShape(("data", "model"), (2, 4)),
     AbstractMesh((2, 4), ("data", "model"))],
    ids=_name,
)  # fmt: skip
def test_meshes_of_every_kind(mesh: Any) -> None:
    parallel = autopar.parallelize(step, cluster="8xcpu", mesh=mesh, method="dp")
    assert str(parallel.plan_for(W, X).mesh) == "data=2, model=4"


def test_a_mesh_of_jax_keeps_its_order_of_devices(devices: list[jax.Device]) -> None:
    grid = np.array(devices[::-1]).reshape(2, 4)
    mesh = Mesh(grid, ("rows", "cols"))
    parallel = autopar.parallelize(step, mesh=mesh, pins={"w": P(None, "cols")})
    w, x = jnp.ones((16, 16)), jnp.ones((8, 16))
    found = parallel(w, x)
    assert found.sharding == NamedSharding(mesh, P(None, "cols"))
    assert [d.id for d in found.sharding.mesh.devices.flat] == [7, 6, 5, 4, 3, 2, 1, 0]
    np.testing.assert_allclose(found, step(jnp.ones((16, 16)), x), rtol=1e-6)
    made = autopar.parallelize(step, mesh=jax.make_mesh((2, 4), ("rows", "cols")))(found, x)
    assert np.isfinite(made).all()


def test_a_mesh_of_jax_that_cannot_be_kept_is_refused(devices: list[jax.Device]) -> None:
    backwards = Mesh(np.array(devices[::-1]), ("rows",))
    with pytest.raises(MeshError, match="stages and microbatches put devices in an order of"):
        autopar.parallelize(step, mesh=backwards, stages=2)
    autopar.parallelize(step, mesh=Mesh(np.array(devices), ("rows",)), microbatches=2)
    with pytest.raises(MeshError, match="has 4 devices, but cluster 8xcpu has 8"):
        autopar.plan(step, W, X, cluster="8xcpu", mesh=Mesh(np.array(devices[:4]), ("rows",)))
    with pytest.raises(MeshError, match="needs an identifier"):
        autopar.parallelize(step, cluster="8xcpu", mesh=AbstractMesh((8,), ("a b",)))


def test_pins_may_be_shardings(devices: list[jax.Device]) -> None:
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "model"))
    pins = {"w": NamedSharding(mesh, P(None, "model"))}
    plan = autopar.plan(step, W, X, mesh=mesh, pins=pins)
    assert plan.arguments[0].sharding.dims == ((), ("model",))


def test_a_plan_may_be_the_path_of_one(tmp_path: Path) -> None:
    made = autopar.plan(step, W, X, cluster="8xcpu", mesh=(8,))
    made.save(tmp_path / "plan.json")
    for given in (tmp_path / "plan.json", str(tmp_path / "plan.json")):
        assert autopar.parallelize(step, plan=given).plan == made
    with pytest.raises(PlanFileError):
        autopar.parallelize(step, plan=tmp_path / "gone.json")


def test_a_parallel_step_made_anew_keeps_or_changes_its_static_arguments() -> None:
    first = autopar.parallelize(step, cluster="8xcpu", static_argnames="mode")
    assert autopar.parallelize(first, cluster="8xcpu").spec == first.spec
    assert autopar.parallelize(first, cluster="8xcpu", state_argnums=0).spec.state_argnums == (0,)
    assert autopar.parallelize(first, cluster="8xcpu", static_argnums=2).spec.static_argnums == (2,)


def test_numbers_of_numpy_are_numbers() -> None:
    options: dict[str, Any] = {
        "memory_gb": np.float32(2), "mesh_axes": np.int64(2), "stages": np.int32(1),
        "state_argnums": np.array([0]), "microbatches": np.int64(1),
    }  # fmt: skip
    assert autopar.parallelize(step, cluster="8xcpu", **options).spec.state_argnums == (0,)
