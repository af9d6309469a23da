"""`autopar report`: a saved plan as a page, beside other plans, a trace and a verification."""

import json
from pathlib import Path

import pytest

from autopar.runtime.timeline import MeasuredSpan, Timeline, chrome_trace
from tests.cli.running import run, written

LAYERS = """
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
VERIFIED = {
    "json_version": 1, "step": "s", "cluster": "8xcpu", "level": "memory", "target": None,
    "agrees": True, "numerics": None, "parts": [],
    "notes": ["compared with care"],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of one program, another by another recipe, and one of two stages."""
    folder = tmp_path_factory.mktemp("report")
    target = f"{written(folder, LAYERS)}:train_step"
    one = ("plan", target, "--cluster", "8xcpu", "--mesh", "8", "--method")
    cut = ("plan", target, "--cluster", "4xcpu", "--stages", "2", "--microbatches", "4")
    for name, words in (("one", (*one, "fsdp")), ("dp", (*one, "dp")), ("cut", cut)):
        done = run(*words, "-o", folder / f"{name}.json")
        assert done.code == 0, done.err
    return folder


def test_a_page_is_written_beside_the_plan_the_same_each_time(folder: Path) -> None:
    done = run("report", folder / "one.json")
    assert done.code == 0, done.err
    page = folder / "one.html"
    assert done.out.split() == ["wrote", str(page)]
    text = page.read_text(encoding="ascii")
    assert "train_step <span>on</span> 8xcpu" in text
    assert run("report", folder / "one.json", "-o", folder / "again.html").code == 0
    assert (folder / "again.html").read_text(encoding="ascii") == text


def test_other_plans_stand_beside_it(folder: Path) -> None:
    page = folder / "against.html"
    done = run("report", folder / "one.json", "-o", page, "--against", folder / "dp.json")
    assert done.code == 0, done.err
    text = page.read_text(encoding="ascii")
    assert "dp.json<br><small>8xcpu, dp</small>" in text


def test_measured_and_verified_figures_stand_beside_predicted_ones(folder: Path) -> None:
    spans = tuple(MeasuredSpan(k, f"F{k}", "F", k, 0, 0.0, 0.25 * (k + 1)) for k in range(2))
    trace, verified = folder / "trace.json", folder / "verified.json"
    trace.write_text(json.dumps(chrome_trace(Timeline(2, spans))), encoding="utf-8")
    verified.write_text(json.dumps(VERIFIED), encoding="utf-8")
    beside = ("--trace", trace, "--verification", verified)
    done = run("report", folder / "cut.json", "-o", folder / "both.html", *beside)
    assert done.code == 0, done.err
    text = (folder / "both.html").read_text(encoding="ascii")
    assert 'value="0.5" title="0.5 s' in text
    assert "compared with care" in text


def test_what_verify_prints_is_read(folder: Path) -> None:
    found = run("verify", folder / "one.json", f"{folder / 'mytrain.py'}:train_step",
                "--level", "numerics", "--json")  # fmt: skip
    assert found.code == 0, found.err
    (folder / "numbers.json").write_text(found.out, encoding="utf-8")
    page = folder / "numbers.html"
    done = run("report", folder / "one.json", "-o", page, "--verification", folder / "numbers.json")
    assert done.code == 0, done.err
    assert "beside the plain step on one" in page.read_text(encoding="ascii")


@pytest.mark.parametrize("version", [None, 0, 2, True])
def test_another_form_of_a_verification_is_refused(folder: Path, version: object) -> None:
    (folder / "other.json").write_text(json.dumps({**VERIFIED, "json_version": version}))
    done = run("report", folder / "one.json", "--verification", folder / "other.json")
    assert done.code == 2
    assert "json_version: expected" in done.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("gone.json",), "cannot read plan"),
        (("one.json", "--verification", "one.json"), "is no verification"),
        (("one.json", "--verification", "mytrain.py"), "is no verification"),
        (("cut.json", "--trace", "one.json"), "is no trace"),
        (("cut.json", "--trace", "gone.json"), "cannot read"),
        (("one.json", "--trace", "one.json"), "is one program"),
        (("one.json", "--against", "gone.json"), "cannot read plan"),
        (("one.json", "-o", "nowhere/page.html"), "there is no folder"),
    ],
)
def test_what_cannot_be_used_ends_with_2(folder: Path, words: tuple[str, ...], told: str) -> None:
    paths = [word if word.startswith("-") else folder / word for word in words]
    done = run("report", *paths)
    assert done.code == 2
    assert told in " ".join(done.err.split())
