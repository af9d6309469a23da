"""A state that was saved under one plan is restored under any other, bit for bit."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ArgumentError, CheckpointError
from autopar.runtime import checkpoint
from autopar.runtime.pieces import StackedPieces
from benchmarks.restores import bytes_read

WIDTH, LAYERS, ROWS = 8, 4, 16
OPTIMIZER = optax.adam(1e-2)


def create(key: jax.Array) -> dict[str, Any]:
    """A stack of layers, a list, optax's named tuples, keys, and a Python number."""
    params = {
        "layers": 0.3 * jax.random.normal(key, (LAYERS, WIDTH, WIDTH)),
        "bias": [jnp.zeros(WIDTH, jnp.bfloat16)],
    }
    keys = jax.random.split(key, 3)
    return {"params": params, "opt": OPTIMIZER.init(params), "keys": keys, "count": 0}


def train(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], jax.Array]:
    def loss_of(params: dict[str, Any]) -> jax.Array:
        y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch, params["layers"])
        return jnp.mean((y + params["bias"][0] - batch[:, ::-1]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "opt": opt, "count": state["count"] + 1}, loss


def batch_of(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((ROWS, WIDTH), dtype=np.float32)


def bits(state: Any) -> list[bytes]:
    def host(leaf: Any) -> np.ndarray[Any, Any]:
        is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", jnp.int32), jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [host(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(state))]


class Saved(NamedTuple):
    """A folder with the checkpoint of two stages after one step, and what the next one gives."""

    folder: Path
    step: autopar.ParallelStep[..., Any]
    state: Any
    bits: list[bytes]
    next_loss: float


@pytest.fixture(scope="module")
def one_mesh() -> autopar.ParallelStep[..., Any]:
    step = autopar.parallelize(train, cluster="4xcpu", mesh=(2, 2), method="fsdp+tp")
    step.plan_for(jax.eval_shape(create, jax.random.key(0)), batch_of(0))
    return step


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("checkpoints")
    step = autopar.parallelize(train, cluster="8xcpu", stages=2, microbatches=2)
    step.plan_for(jax.eval_shape(create, jax.random.key(0)), batch_of(0))
    state, _ = step(step.init(create, jax.random.key(0)), batch_of(0))
    before = bits(state)
    with ocp.CheckpointManager(folder) as manager:
        extras = {"position": {"file": 3, "row": 70}, "key": jax.random.key(5)}
        assert step.save(manager, 1, state, extras)
        state, loss = step(state, batch_of(1))  # consumes what is being written
        manager.wait_until_finished()
    return Saved(folder, step, state, before, float(loss))


def test_stages_go_on_where_they_were(saved: Saved) -> None:
    with ocp.CheckpointManager(saved.folder) as manager:
        wanted = saved.step.abstract_state(create, jax.random.key(0))
        found = saved.step.restore(manager, wanted)
    assert found is not None
    assert found.step == 1
    assert isinstance(found.state["params"]["layers"], StackedPieces)
    assert bits(found.state) == saved.bits
    _, loss = saved.step(found.state, batch_of(1))
    assert float(loss) == saved.next_loss


def test_what_was_saved_beside_the_state_comes_back(saved: Saved) -> None:
    with ocp.CheckpointManager(saved.folder) as manager:
        wanted = saved.step.abstract_state(create, jax.random.key(0))
        found = saved.step.restore(manager, wanted, step=1)
    assert found is not None
    assert found.extras["position"] == {"file": 3, "row": 70}
    assert bits(found.extras["key"]) == bits(jax.random.key(5))
    assert len(found.plan_hash) == 64


def test_one_mesh_reads_what_stages_wrote(saved: Saved, one_mesh: Any) -> None:
    with ocp.CheckpointManager(saved.folder) as manager:
        wanted = one_mesh.abstract_state(create, jax.random.key(0))
        found = one_mesh.restore(manager, wanted)
    assert bits(found.state) == saved.bits
    pairs = list(zip(jax.tree.leaves(found.state), jax.tree.leaves(wanted), strict=True))
    assert all(leaf.sharding.is_equivalent_to(w.sharding, w.ndim) for leaf, w in pairs)
    assert any(not leaf.sharding.is_fully_replicated for leaf, _ in pairs)
    _, loss = one_mesh(found.state, batch_of(1))
    np.testing.assert_allclose(loss, saved.next_loss, rtol=1e-5)


def test_orbax_alone_reads_it(saved: Saved) -> None:
    shapes = jax.eval_shape(create, jax.random.key(0))
    words = jax.eval_shape(jax.random.key_data, shapes["keys"])
    with ocp.CheckpointManager(saved.folder) as manager:
        asked = ocp.args.StandardRestore({**shapes, "keys": words})
        found = manager.restore(1, args=ocp.args.Composite(state=asked))
    assert bits(found["state"]) == saved.bits


def test_what_orbax_alone_wrote_is_read(tmp_path: Path, one_mesh: Any) -> None:
    plain = jax.device_get({**create(jax.random.key(1)), "keys": np.zeros((3, 2), np.uint32)})
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(4, args=ocp.args.Composite(state=ocp.args.StandardSave(plain)))
        manager.wait_until_finished()
    with ocp.CheckpointManager(tmp_path) as manager:
        wanted = autopar.parallelize(train, cluster="2xcpu").abstract_state(lambda: plain)
        found = one_mesh.restore(manager, wanted)
    assert found.step == 4
    assert not found.extras
    assert bits(found.state) == bits({**plain, "count": np.int32(0)})  # JAX has no 64 bits


@pytest.mark.parametrize("before", [P("d"), P(None, "d"), P()])
@pytest.mark.parametrize("after", [P("d"), P(None, "d"), P(None, None, "d")])
def test_each_byte_is_read_once_however_it_was_cut(
    tmp_path: Path, devices: list[jax.Device], before: P, after: P
) -> None:
    mesh = Mesh(np.array(devices[:4]), ("d",))
    bits = np.random.default_rng(0).integers(2**32, size=(16, 128, 512), dtype=np.uint32)
    kind = jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=NamedSharding(mesh, after))
    with ocp.CheckpointManager(tmp_path) as manager:
        placed = jax.device_put(bits, NamedSharding(mesh, before))
        checkpoint.save(manager, 1, {"x": placed}, {}, str, force=True)
        manager.wait_until_finished()
        already = bytes_read()
        found = checkpoint.restore(manager, {"x": kind})
    assert found is not None
    assert bytes_read() - already < 1.25 * bits.nbytes  # with what says where they are
    np.testing.assert_array_equal(found.state["x"], bits)


def test_no_checkpoint_is_none(tmp_path: Path, one_mesh: Any) -> None:
    wanted = one_mesh.abstract_state(create, jax.random.key(0))
    with ocp.CheckpointManager(tmp_path) as manager:
        assert one_mesh.restore(manager, wanted) is None
        with pytest.raises(CheckpointError, match=r"has no checkpoint of step 3 \(there: none\)"):
            one_mesh.restore(manager, wanted, step=3)


def test_another_model_is_named_leaf_by_leaf(saved: Saved, one_mesh: Any) -> None:
    def other(key: jax.Array) -> dict[str, Any]:
        state = create(key)
        state["params"]["bias"] = [jnp.zeros(2 * WIDTH)]
        return {**state, "ema": jnp.zeros(3)}

    with ocp.CheckpointManager(saved.folder) as manager:
        plain = autopar.parallelize(train, cluster="2xcpu")
        wanted = plain.abstract_state(other, jax.random.key(0))
        with pytest.raises(CheckpointError) as raised:
            one_mesh.restore(manager, wanted)
    assert "params/bias/0 is bfloat16[8], and float32[16] in this step" in str(raised.value)
    assert "ema is not in the checkpoint, and float32[3] in this step" in str(raised.value)
    assert "with the model and the optimizer that it was saved with" in str(raised.value)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_a_damaged_file_is_named_and_older_steps_are_whole(
    saved: Saved, tmp_path: Path, one_mesh: Any, damage: Callable[[Path], None]
) -> None:
    state = saved.step.init(create, jax.random.key(0))
    wanted = one_mesh.abstract_state(create, jax.random.key(0))
    with ocp.CheckpointManager(tmp_path) as manager:
        for number in (1, 2):
            saved.step.save(manager, number, state)
        manager.wait_until_finished()
        files = [*(tmp_path / "2" / "state").rglob("d/*")]
        assert files
        for file in files:
            damage(file)
        with pytest.raises(CheckpointError, match=r"files are damaged.*\(there: 1\)") as raised:
            one_mesh.restore(manager, wanted)
        assert f"{tmp_path}/2" in str(raised.value)
        assert bits(one_mesh.restore(manager, wanted, step=1).state) == bits(state)


def test_what_cannot_be_written_is_named_and_the_last_checkpoint_stays(
    saved: Saved, tmp_path: Path, one_mesh: Any
) -> None:
    state = saved.step.init(create, jax.random.key(0))
    wanted = one_mesh.abstract_state(create, jax.random.key(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ocp.CheckpointManager(tmp_path) as manager:
        saved.step.save(manager, 1, state)
        manager.wait_until_finished()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a full disk
        try:
            saved.step.save(manager, 2, state)
            with pytest.raises(CheckpointError) as raised:
                manager.wait_until_finished()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"{tmp_path}/2" in str(raised.value)
    assert "cannot be written" in str(raised.value)
    assert "Free some space" in str(raised.value)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [1]
        assert bits(one_mesh.restore(manager, wanted).state) == bits(state)


def test_a_disk_that_is_too_full_is_named_before_anything_is_written(
    saved: Saved, tmp_path: Path, one_mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = saved.step.init(create, jax.random.key(0))
    wanted = one_mesh.abstract_state(create, jax.random.key(0))
    with ocp.CheckpointManager(tmp_path) as manager:
        saved.step.save(manager, 1, state)
        manager.wait_until_finished()
        full = shutil.disk_usage(tmp_path)._replace(free=50 * 1024)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
        with pytest.raises(CheckpointError) as raised:
            saved.step.save(manager, 2, state)
        assert not [*tmp_path.glob("2*")]
        assert bits(one_mesh.restore(manager, wanted).state) == bits(state)
    assert f"step 2 in {tmp_path} cannot be written: it takes up to" in str(raised.value)
    assert "of which 50.0 KiB are free" in str(raised.value)
    assert "Free some space" in str(raised.value)


def test_a_folder_that_may_only_be_read_is_named_and_keeps_its_checkpoints(
    saved: Saved, tmp_path: Path, one_mesh: Any
) -> None:
    state = saved.step.init(create, jax.random.key(0))
    wanted = one_mesh.abstract_state(create, jax.random.key(0))
    with ocp.CheckpointManager(tmp_path) as manager:
        saved.step.save(manager, 1, state)
        manager.wait_until_finished()
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o555)
        own = os.geteuid()
        os.seteuid(own or 65534)  # who may do all is somebody else for a while
        try:
            with pytest.raises(CheckpointError) as raised:
                saved.step.save(manager, 2, state)
        finally:
            os.seteuid(own)
            for folder in (tmp_path, *tmp_path.parents[:2]):
                folder.chmod(0o755)
        assert manager.all_steps() == [1]
    assert f"step 2 in {tmp_path} cannot be written" in str(raised.value)
    assert "a folder that can be written" in str(raised.value)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert bits(one_mesh.restore(manager, wanted).state) == bits(state)


def test_a_consumed_state_and_arrays_among_extras_are_refused(saved: Saved, tmp_path: Path) -> None:
    state = saved.step.init(create, jax.random.key(0))
    with ocp.CheckpointManager(tmp_path) as manager:
        with pytest.raises(ArgumentError, match="rows among the extras is ndarray"):
            saved.step.save(manager, 1, state, {"rows": np.zeros(3)})
        saved.step(state, batch_of(0))
        with pytest.raises(ArgumentError, match="count of the state to save is deleted"):
            saved.step.save(manager, 1, state)
        assert manager.all_steps() == []


def test_a_manager_that_skips_a_step_says_so(saved: Saved, tmp_path: Path) -> None:
    state = saved.step.init(create, jax.random.key(0))
    options = ocp.CheckpointManagerOptions(should_save_fn=lambda step, latest: step % 10 == 0)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert not saved.step.save(manager, 3, state)


def test_arguments_that_are_one_array_each_are_there_by_any_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def step(w: Any, average: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        w = w - 0.1 * gradient
        return w, 0.9 * average + 0.1 * w, loss

    parallel = autopar.parallelize(step, cluster="8xcpu")
    w, average, _ = parallel(jnp.eye(8), jnp.eye(8), np.ones((16, 8), np.float32))
    states = (w, average), {"weights": w, "mean": average}, [w, average], w, {"w": w, "rate": 0.1}
    told = list[int]()
    with ocp.CheckpointManager(tmp_path) as manager:
        for number, state in enumerate(states):
            caplog.clear()
            assert parallel.save(manager, number, state)
            told.append(caplog.text.count("holds 1 of the 2 arrays"))
        manager.wait_until_finished()
    # What is more than the state may be anything: here it passes for the average.
    assert told == [0, 0, 0, 1, 0]


def test_a_part_of_the_state_is_told_of_and_missed_by_its_argument(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def descend(net: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda n: jnp.mean(n(x) ** 2))(net)
        optimizer.update(net, grads)
        return loss

    def make() -> Any:
        net = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        return net, nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)

    step: Any = autopar.parallelize(descend, cluster="8xcpu", mesh=8, method="dp")
    step.plan_for(*jax.eval_shape(make), jnp.ones((8, 4)))
    net, optimizer = step.init(make)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert step.save(manager, 1, (net, optimizer))
        assert not caplog.records
        assert step.save(manager, 2, net)
        manager.wait_until_finished()
        (told,) = caplog.records
        assert "the checkpoint of step 2 holds 2 of the 8 arrays of its state" in told.getMessage()
        assert "optimizer/" in told.getMessage()
        assert step.restore(manager, step.abstract_state(make), step=1) is not None
        with pytest.raises(CheckpointError) as raised:
            step.restore(manager, step.abstract_state(make), step=2)
    assert "* net/bias" in str(raised.value)
    assert len(str(raised.value).splitlines()) < 12
