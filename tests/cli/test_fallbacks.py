"""`autopar plan --fallbacks`: plans for fewer hosts, which a start takes without planning."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import PlanMismatchError
from tests.cli.running import STEP, run, written

NAMES = ["hosts", "devices", "mesh", "microbatches"]


def told(
    folder: Path, *words: str | Path, rows: int = 24, cluster: str = "4x2xcpu"
) -> list[tuple[object, ...]]:
    """What `autopar plan` tells of each number of hosts, for a batch of so many rows."""
    text = STEP.replace("(256, 64)", f"({rows}, 64)")
    done = run("plan", written(folder, text), "--cluster", cluster, "--json", *words)
    assert done.code == 0, done.err
    found = done.data["fallbacks"]
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in found if row["mesh"])
    return [(*(row[name] for name in NAMES), row["note"]) for row in found]


def test_each_number_of_hosts_has_a_plan_of_the_same_batch(tmp_path: Path) -> None:
    assert told(tmp_path, "--method", "dp", "--fallbacks", "3") == [
        (4, 8, "data=8", 1, ""),
        (3, 6, "data=6", 1, ""),
        (2, 4, "data=4", 1, ""),
        (1, 2, "data=2", 1, ""),
    ]


def test_microbatches_take_up_what_no_longer_fits(tmp_path: Path) -> None:
    limit = ("--method", "dp", "--memory-gb", "0.008", "--fallbacks", "1")
    assert told(tmp_path, *limit, rows=24576, cluster="2x2xcpu") == [
        (2, 4, "data=4", 1, ""),
        (1, 2, "data=2", 3, "microbatches left to the planner"),
    ]


def test_hosts_that_do_not_do_are_told_with_the_reason(tmp_path: Path) -> None:
    """16 rows over 6 devices, by data parallelism in one program."""
    passes = ("--passes", "shard{recipe=dp},lower", "--fallbacks", "2", "-o", tmp_path / "plans")
    whole, three, two = told(tmp_path, *passes, rows=16)
    assert whole == (4, 8, "data=8", 1, "")
    assert three[:3] == (3, None, None)
    assert "the batch has 16 rows (batch), which is not divisible by 6" in str(three[-1])
    assert "(4, 2 divide it)" in str(three[-1])
    assert two == (2, 4, "data=4", 1, "")
    assert sorted(p.name for p in (tmp_path / "plans").iterdir()) == [
        "2-hosts.json",
        "4-hosts.json",
    ]


def test_a_start_takes_the_plan_for_what_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "plans"
    monkeypatch.syspath_prepend(tmp_path)
    name = f"fallback_step_{tmp_path.name}"
    written(tmp_path, STEP.replace("(256, 64)", "(24, 64)"), f"{name}.py")
    words = ("--cluster", "4x2xcpu", "--method", "dp", "--fallbacks", "3", "-o", folder)
    assert run("plan", tmp_path / f"{name}.py", *words).code == 0
    train_step = __import__(name).train_step

    with caplog.at_level(logging.INFO, "autopar"):
        step = autopar.parallelize(train_step, plan=folder, cluster="2xcpu")
        rng = np.random.default_rng(0)
        up, down, batch = (
            rng.standard_normal(s, np.float32) for s in ((64, 128), (128, 64), (24, 64))
        )
        state = {"up": up / 8, "down": down / 11}
        wanted = jax.jit(train_step)(state, batch)
        found = step(state, batch)
    for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(f, w, rtol=1e-4, atol=1e-6)
    assert f"the plan is {folder}/1-hosts.json, for 2 cpu on 1 host" in caplog.text
    assert "planning" not in caplog.text

    with pytest.raises(PlanMismatchError) as raised:
        autopar.parallelize(train_step, plan=folder, cluster="5x2xcpu")
    assert "no plans for 10 cpu on 5 hosts" in str(raised.value)
    assert "3-hosts.json is for 6 cpu on 3 hosts" in str(raised.value)
    (tmp_path / "none").mkdir()
    with pytest.raises(PlanMismatchError, match="has no plans"):
        autopar.parallelize(train_step, plan=tmp_path / "none", cluster="2xcpu")
    assert jnp.isfinite(found["up"]).all()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--cluster", "8xcpu"), "8xcpu without 1 of its hosts"),
        (("--cluster", "v5p:2x2x2"), "is one slice, which loses all its chips at once"),
        (("--cluster", "2x2xcpu", "-o", "mytrain.py"), "cannot be a folder for the plans"),
    ],
)
def test_what_has_no_fallbacks_ends_with_2(
    tmp_path: Path, words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("plan", written(tmp_path), "--fallbacks", "1", *words)
    assert done.code == 2, done.out
    assert told in done.err
