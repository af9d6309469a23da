"""`autopar plan`: what it prints and saves, and how it tells what cannot be planned."""

from pathlib import Path

import pytest

from tests.cli.running import STEP, run, written

SECTIONS = {
    "json_version", "step", "cluster", "devices", "mesh", "method", "jax", "layers", "stages",
    "microbatches", "pins", "compiler_options", "outcome", "predicted", "memory", "collectives",
    "parameters", "planning_seconds", "output", "warnings", "pipeline", "passes",
}  # fmt: skip


@pytest.mark.smoke
def test_a_plan_is_printed_and_saved(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    done = run("plan", f"{written(tmp_path)}:train_step", "--cluster", "8xh100", "-o", saved)
    assert done.code == 0, done.err
    assert done.out.startswith("plan train_step on 8xh100\n")
    for word in ("mesh", "method", "outcome", "predicted", "memory", "Arguments", "state/up"):
        assert word in done.out
    assert saved.exists()
    assert run("show", saved).code == 0


def test_json_is_one_object_and_nothing_else(tmp_path: Path) -> None:
    talking = f"print('hello')\n{STEP}"
    done = run(
        "plan", f"{written(tmp_path, talking)}:train_step", "--cluster", "8xcpu", "--mesh", "2,4",
        "--method", "fsdp", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert set(done.data) == SECTIONS
    assert done.data["mesh"] == {"data": 2, "model": 4}
    assert done.data["method"] == "fsdp"
    assert done.data["passes"] == "shard{recipe=fsdp},lower"
    assert set(done.data["collectives"][0]) == {"kind", "axes", "count", "bytes", "seconds"}
    assert set(done.data["parameters"][0]) == {
        "path", "shape", "dtype", "role", "sharding", "bytes", "local_bytes", "submesh",
    }  # fmt: skip
    assert "hello" in done.err


def test_passes_are_read_as_they_are_printed(tmp_path: Path) -> None:
    command = ("plan", written(tmp_path), "--cluster", "8xcpu", "--mesh", "8")
    done = run(*command, "--passes", "shard{recipe=fsdp},lower")
    assert done.code == 0, done.err
    assert done.out.endswith("\npasses shard{recipe=fsdp},lower\n")
    done = run(*command, "--passes", "shard{recipe=dpp}")
    assert done.code == 2
    assert "option recipe of pass optimal: method 'dpp' is unknown" in done.err


def test_the_file_alone_means_its_train_step(tmp_path: Path) -> None:
    assert run("plan", written(tmp_path), "--cluster", "8xcpu", "--mesh", "8").code == 0


def test_a_parallel_step_is_planned_as_the_plain_one(tmp_path: Path) -> None:
    wrapped = (
        f"import autopar\n{STEP}\ntrain_step = autopar.parallelize(train_step, cluster='8xcpu')\n"
    )
    done = run("plan", written(tmp_path, wrapped), "--cluster", "v5e:2x4", "--json")
    assert done.code == 0, done.err
    assert done.data["cluster"] == "v5e:2x4"


def test_a_pin_is_kept(tmp_path: Path) -> None:
    done = run(
        "plan", written(tmp_path), "--cluster", "8xcpu", "--mesh", "data=2,model=4", "--json",
        "--pin", "up=P(None,'model')", "--pin", "down=P(model)",
    )  # fmt: skip
    assert done.code == 0, done.err
    lies = {p["path"]: p["sharding"] for p in done.data["parameters"]}
    assert lies["state/up"] == "P(None, 'model')"
    assert lies["state/down"] == "P('model')"


def test_options_of_the_compiler_are_read_as_flags_are(tmp_path: Path) -> None:
    words = ("xla_gpu_enable_latency_hiding_scheduler=false", "xla_a=3", "xla_b=dce,fusion")
    given = (word for text in words for word in ("--compiler-option", text))
    done = run("plan", written(tmp_path), "--cluster", "8xh100", "--json", *given)
    assert done.code == 0, done.err
    assert done.data["compiler_options"] == {
        "xla_a": 3, "xla_b": "dce,fusion", "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_gpu_enable_latency_hiding_scheduler": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("slot", "opening"),
    [
        ("graph", "graph train_step("),
        ("batch", "graph train_step("),
        ("layer", "layers train_step {"),
        ("stage", "stages train_step "),
        ("shard", "sharding on (data=8) {"),
        ("lower", "inputs "),
    ],
)
def test_the_ir_after_a_slot(tmp_path: Path, slot: str, opening: str) -> None:
    done = run("plan", written(tmp_path), "--cluster", "8xcpu", "--mesh", "8", "--after", slot)
    assert done.code == 0, done.err
    assert done.out.startswith(opening)


def test_keyword_arguments_come_from_example_kwargs(tmp_path: Path) -> None:
    text = """
    import jax

    def train_step(w, *, rate):
        return w * rate

    def example_args():
        return (jax.ShapeDtypeStruct((64,), "float32"),)

    def example_kwargs():
        return {"rate": 0.5}
    """
    assert run("plan", written(tmp_path, text), "--cluster", "8xcpu", "--mesh", "8").code == 0


def test_what_is_beside_the_file_can_be_imported(tmp_path: Path) -> None:
    written(tmp_path, STEP, "my_model_next_door.py")
    text = "from my_model_next_door import example_args, train_step"
    assert run("plan", written(tmp_path, text), "--cluster", "8xcpu", "--mesh", "8").code == 0


def test_a_memory_limit_that_nothing_fits_ends_with_1(tmp_path: Path) -> None:
    done = run("plan", written(tmp_path), "--cluster", "8xcpu", "--memory-gb", "0.000001")
    assert done.code == 1
    assert done.out == ""
    assert "no plan on" in done.err
    assert "too much" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--cluster", "8xnope"), "no chip is called 'nope'"),
        (("--cluster", "8xcpu", "--mesh", "2,2"), "has 4 devices, but cluster 8xcpu has 8"),
        (("--cluster", "8xcpu", "--mesh", "2,x"), "mesh '2,x' is not understood"),
        (("--cluster", "8xcpu", "--mesh", "8", "--pin", "zap=P('data')"), "'zap'"),
        (("--cluster", "8xcpu", "--pin", "up=Q(3)"), "pin 'up=Q(3)' is not understood"),
        (("--cluster", "8xcpu", "--memory-gb", "-1"), "memory_gb is -1"),
        (("--cluster", "8xcpu", "--method", "zero9"), "'zero9' is not one of"),
        (("--cluster", "8xcpu", "--mesh", "8", "-o", "/no/such/plan.json"), "there is no folder"),
        (("--cluster", "8xcpu", "--compiler-option", "xla_a"), "'xla_a' is no NAME=VALUE"),
        (("--cluster", "8xcpu", "--compiler-option", "a=1"), "'a' is no option of XLA"),
        ((), "Missing option '--cluster'"),
    ],
)
def test_wrong_options_end_with_2(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    done = run("plan", written(tmp_path), *options)
    assert done.code == 2
    assert told in done.err
    assert "Traceback" not in done.err


def test_methods_are_shown_side_by_side(tmp_path: Path) -> None:
    words = ("plan", written(tmp_path), "--cluster", "8xh100", "--mesh", "2,4")
    done = run(*words, "--compare", "fsdp, expert", "--json")
    ours, fsdp, expert = done.data["compared"]
    assert ours["method"] == "this plan (auto)"
    assert ours["seconds"] == done.data["predicted"]["seconds"]
    assert ours["peak_bytes"] == done.data["memory"]["peak_bytes"]
    assert (fsdp["method"], expert["seconds"]) == ("fsdp", None)
    assert "this step has none" in expert["note"]
    assert done.data["json_version"] == 1
    assert "Methods by predicted seconds and memory" in run(*words, "--compare", "fsdp").out
