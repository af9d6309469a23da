"""`--stages`, `--microbatches` and `--schedule` of `autopar plan`, and such plans in `show`."""

from pathlib import Path

import pytest

from tests.cli.running import Ran, run, written

DEEP = """
import jax
import jax.numpy as jnp


def train_step(state, batch):
    def loss(ws):
        x = batch
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x * x)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


def example_args():
    shape = jax.ShapeDtypeStruct
    return [shape((64, 64), jnp.float32)] * 4, shape((32, 64), jnp.float32)
"""
NORMALIZED = """
import jax
import jax.numpy as jnp


def train_step(w, batch):
    def loss(w):
        x = batch @ w
        return jnp.mean(jnp.tanh((x - x.mean(0)) / (x.std(0) + 1e-3)))

    return w - 0.1 * jax.grad(loss)(w)


def example_args():
    shape = jax.ShapeDtypeStruct
    return shape((64, 64), jnp.float32), shape((32, 64), jnp.float32)
"""
TWO = ("--stages", "2", "--microbatches", "4", "--schedule", "1f1b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


def planned(folder: Path, *options: str | Path, text: str = DEEP) -> Ran:
    """`autopar plan` of a step for eight devices."""
    return run("plan", written(folder, text), "--cluster", "8xcpu", *options)


@pytest.fixture(scope="module")
def saved(folder: Path) -> tuple[Path, Ran]:
    """A plan of two stages, and what was printed when it was made."""
    path = folder / "plan.json"
    done = planned(folder, *TWO, "-o", path)
    assert done.code == 0, done.err
    return path, done


def test_the_stages_are_a_table_with_the_schedule_in_time(saved: tuple[Path, Ran]) -> None:
    text = saved[1].out
    assert "stages     2, 4 microbatches, 1f1b" in text
    assert "Stages under 1f1b: 4 microbatches of 8 rows, bubble " in text
    rows = [line.split() for line in text.splitlines()]
    assert {r[0] for r in rows if len(r) > 4 and r[0] in ("S0", "S1")} == {"S0", "S1"}
    drawn = [line for line in text.splitlines() if line.startswith("device ")]
    assert len(drawn) >= 2
    tasks = {kind + str(i) for kind in "FB" for i in range(4)}
    for number in range(2):
        row = " ".join(line for line in drawn if line.startswith(f"device {number}"))
        assert {t for t in tasks if t in row} == tasks
    assert "F forward  B backward" in text


def test_the_simple_plan_beside_it_is_told_by_predicted_seconds(saved: tuple[Path, Ran]) -> None:
    text = saved[1].out
    assert "Textbook recipes on the same mesh, by predicted seconds" in text
    assert "by cost" not in text
    page = saved[0].with_suffix(".html")
    assert run("report", saved[0], "-o", page).code == 0
    written_page = page.read_text(encoding="utf-8")
    assert "by the predicted step: this plan takes" in written_page
    assert "the cost that the solver minimizes" not in written_page


def test_a_saved_plan_shows_its_stages_and_where_arguments_lie(saved: tuple[Path, Ran]) -> None:
    path = saved[0]
    everything = run("show", path)
    assert everything.code == 0, everything.err
    assert "Stages under 1f1b: 4 microbatches of 8 rows" in everything.out
    params = run("show", path, "--params")
    assert "Stages under" not in params.out
    assert "0..1" in params.out
    memory = run("show", path, "--memory")
    assert memory.code == 0, memory.err
    assert "Memory of a device" in memory.out


def test_json_has_the_stages(saved: tuple[Path, Ran]) -> None:
    data = run("show", saved[0], "--json").data
    pipeline = data["pipeline"]
    assert (data["stages"], data["microbatches"]) == (2, 4)
    assert (pipeline["schedule"], pipeline["batch"]) == ("1f1b", 32)
    assert sum(stage["layers"] for stage in pipeline["stages"]) == data["layers"]
    devices = [d for submesh in pipeline["submeshes"] for d in submesh["devices"]]
    assert sorted(devices) == list(range(8))
    lies = {p["path"]: p["submesh"] for p in data["parameters"]}
    assert (lies["state/0"], lies["state/3"]) == (0, 1)


def test_what_a_device_holds_is_of_one_submesh(folder: Path) -> None:
    path = folder / "dp.json"
    assert planned(folder, *TWO, "--method", "dp", "-o", path).code == 0
    shown = run("show", path, "--params").out
    row = next(line for line in shown.splitlines() if "4 x f32[64,64]" in line)
    assert row.split()[-3:] == ["P()", "32.0", "KiB"]  # two of the four, each 16 KiB


def test_one_stage_accumulates_gradients(folder: Path) -> None:
    done = planned(folder, "--microbatches", "4")
    assert done.code == 0, done.err
    assert "one, 4 microbatches with gradient accumulation" in done.out
    assert "One stage: 4 microbatches of 8 rows, one after the other" in done.out
    assert "device 0" not in done.out  # one row would say nothing


def test_stages_that_are_searched_may_be_one_program(folder: Path) -> None:
    data = planned(folder, "--stages", "auto", "--json").data
    one = planned(folder, "--json").data
    assert data["predicted"]["seconds"] <= one["predicted"]["seconds"]


@pytest.mark.parametrize(
    ("slot", "opening"),
    [
        ("graph", "graph train_step("),
        ("batch", "batch train_step: 4 microbatches of 8 rows"),
        ("layer", "layers train_step {\n  L0:"),
        ("stage", "stages train_step  microbatches 4, 1f1b {"),
        ("shard", "mesh0: sharding on ("),
        ("lower", "0 mesh"),
    ],
)
def test_the_ir_after_a_slot(folder: Path, slot: str, opening: str) -> None:
    done = planned(folder, *TWO, "--after", slot)
    assert done.code == 0, done.err
    assert done.out.lstrip().startswith(opening)


def test_a_narrow_terminal_folds_the_schedule(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = planned(folder, *TWO).out
    monkeypatch.setattr("tests.cli.running.COLUMNS", "60")
    narrow = planned(folder, *TWO).out
    drawn = [[t for t in text.splitlines() if t.startswith("device 0")] for text in (wide, narrow)]
    assert len(drawn[1]) > len(drawn[0])
    assert all(len(line) <= 60 for line in drawn[1])


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (("--stages", "9", "--microbatches", "4"), 2, "9 stages need 9 devices or more"),
        (("--stages", "0"), 2, "neither a whole number from 1 on nor 'auto'"),
        (("--stages", "2", "--microbatches", "3"), 2, "32 rows cannot be cut into 3 microbatches"),
        (("--stages", "2", "--schedule", "zb-9"), 2, "'zb-9' is not one of"),
        (("--stages", "4", "--schedule", "zb-v"), 1, "ask for fewer stages or another schedule"),
        ((*TWO, "--memory-gb", "0.00001"), 1, "no stages fit the"),
    ],
)
def test_what_cannot_be_is_told(
    folder: Path, options: tuple[str, ...], code: int, told: str
) -> None:
    done = planned(folder, *options)
    assert done.code == code
    assert told in done.err
    assert "Traceback" not in done.err


def test_a_step_that_cannot_be_cut_names_the_line(folder: Path) -> None:
    done = planned(folder, "--microbatches", "4", text=NORMALIZED)
    assert done.code == 2
    assert "the mean over rows" in done.err
    assert "mytrain.py:9" in done.err
    assert "Traceback" not in done.err
    assert planned(folder, "--microbatches", "1", text=NORMALIZED).code == 0
