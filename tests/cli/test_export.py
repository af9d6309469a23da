"""`autopar export` and `autopar import`, there and back."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from tests.cli.running import STEP, run, written

BOXED = """
import flax.linen as nn
import jax
import jax.numpy as jnp


def named(shape, *names):
    return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)


def train_step(state, batch):
    def loss(state):
        w = nn.unbox(state)
        return jnp.mean((jnp.tanh(batch @ w["up"]) @ w["down"] + w["scale"]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))


def example_args():
    state = {
        "up": named((64, 128), "embed", "mlp"),
        "down": named((128, 64), "mlp", "embed"),
        "scale": named((64,), "norm"),
    }
    return state, jax.ShapeDtypeStruct((256, 64), jnp.float32)
"""
MESH = ("--cluster", "8xh100", "--mesh", "data=2,model=4")


@pytest.fixture
def boxed(tmp_path: Path) -> tuple[Path, Path]:
    """A step with flax boxes, and a plan for it that shards both dims of its matrices."""
    step, plan = written(tmp_path, BOXED, "boxed.py"), tmp_path / "plan.json"
    assert run("plan", step, *MESH, "--method", "fsdp+tp", "-o", plan).code == 0
    return step, plan


def shardings(plan: Path) -> dict[str, str]:
    return {a.path: str(a.sharding) for a in autopar.load(plan).arguments if a.role == "state"}


@pytest.mark.parametrize("kind", ["flax-rules", "maxtext-rules"])
def test_rules_come_back_as_the_same_shardings(
    kind: str, boxed: tuple[Path, Path], tmp_path: Path
) -> None:
    step, plan = boxed
    rules = tmp_path / ("rules.py" if kind == "flax-rules" else "rules.yml")
    pins, again = tmp_path / "pins.json", tmp_path / "again.json"
    assert run("export", plan, "--as", kind, "--for", step, "-o", rules).code == 0
    assert run("import", rules, "--for", step, "--mesh", "data=2,model=4", "-o", pins).code == 0
    assert run("plan", step, *MESH, "--pins", pins, "-o", again).code == 0
    assert shardings(again) == shardings(plan)
    assert any("data" in text and "model" in text for text in shardings(plan).values())


def test_rules_for_paths_come_back_too(tmp_path: Path) -> None:
    step, plan, rules = written(tmp_path), tmp_path / "plan.json", tmp_path / "rules.py"
    pins, again = tmp_path / "pins.json", tmp_path / "again.json"
    run("plan", step, *MESH, "--method", "fsdp+tp", "-o", plan)
    done = run("export", plan, "--as", "flax-rules", "-o", rules)
    assert "no logical names given" in done.err
    assert "LOGICAL_AXIS_RULES" not in rules.read_text(encoding="utf-8")
    run("import", rules, "--for", step, "-o", pins)
    assert run("plan", step, *MESH, "--pins", pins, "-o", again).code == 0
    assert shardings(again) == shardings(plan)


def test_what_logical_rules_cannot_say_is_refused_but_by_force(tmp_path: Path) -> None:
    step, plan, names = written(tmp_path), tmp_path / "plan.json", tmp_path / "names.json"
    pins = ("--pin", 'state/up=P("data",None)', "--pin", "state/down=P(None,None)")
    run("plan", step, *MESH, *pins, "-o", plan)
    names.write_text(json.dumps({"state/*": ["rows", "columns"]}), encoding="utf-8")
    done = run("export", plan, "--as", "maxtext-rules", "--logical", names)
    assert (done.code, done.out) == (1, "")
    assert "state/" in done.err
    assert "--force" in done.err
    forced = run("export", plan, "--as", "maxtext-rules", "--logical", names, "--force")
    assert forced.code == 0
    assert "logical_axis_rules: [" in forced.out
    assert run("export", plan, "--as", "maxtext-rules").code == 2


def test_partition_specs_are_loaded_by_plain_jax(tmp_path: Path, devices: list[jax.Device]) -> None:
    step, plan, specs = written(tmp_path), tmp_path / "plan.json", tmp_path / "specs.json"
    run("plan", step, *MESH, "--method", "fsdp+tp", "-o", plan)
    assert run("export", plan, "--as", "partition-specs", "-o", specs).out == f"wrote {specs}\n"
    data = json.loads(specs.read_text(encoding="utf-8"))
    (held,) = data["meshes"]
    grid = np.array([devices[i] for i in held["devices"]], dtype=object)
    mesh = Mesh(grid.reshape(tuple(held["axes"].values())), tuple(held["axes"]))
    for entry, a in zip(data["arguments"], autopar.load(plan).arguments, strict=True):
        spec = P(*(tuple(x) if isinstance(x, list) else x for x in entry["spec"]))
        local = NamedSharding(mesh, spec).shard_shape(tuple(entry["shape"]))
        assert local == a.sharding.shard_shape(a.shape, autopar.load(plan).mesh)


def test_stages_have_a_mesh_each(tmp_path: Path) -> None:
    step, plan = written(tmp_path, STEP), tmp_path / "plan.json"
    run("plan", step, "--cluster", "8xh100", "--stages", "2", "--microbatches", "4", "-o", plan)
    data = json.loads(run("export", plan, "--as", "partition-specs").out)
    assert [len(m["devices"]) for m in data["meshes"]] == [4, 4]
    planned = autopar.load(plan).arguments
    assert [e["mesh"] for e in data["arguments"]] == [a.submesh for a in planned]
    done = run("export", plan, "--as", "python")
    assert done.code == 1
    assert "partition-specs" in done.err


def test_a_module_is_written(tmp_path: Path) -> None:
    step, plan, module = written(tmp_path), tmp_path / "plan.json", tmp_path / "laid_out.py"
    run("plan", step, *MESH, "-o", plan)
    assert run("export", plan, "--as", "python", "-o", module).code == 0
    text = module.read_text(encoding="ascii")
    assert "import autopar" not in text
    assert 'MESH: dict[str, int] = {"data": 2, "model": 4}' in text


def test_pins_that_are_none_are_refused(tmp_path: Path) -> None:
    step, pins = written(tmp_path), tmp_path / "pins.json"
    pins.write_text("[]", encoding="utf-8")
    done = run("plan", step, *MESH, "--pins", pins)
    assert done.code == 2
    assert "holds no pins" in done.err
