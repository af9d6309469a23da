"""`autopar profile`: what it writes is what `autopar partition` reads."""

import re
from pathlib import Path

import pytest

from tests.cli.running import STEP, run, written
from tests.house.source import ROOT

GPT = ROOT / "examples" / "gpt.py"


@pytest.mark.smoke
def test_a_profile_of_the_gpt_example_is_partitioned(tmp_path: Path) -> None:
    saved = tmp_path / "gpt.json"
    done = run("profile", f"{GPT}:train_step", "--cluster", "8xv100-16gb", "-o", saved)
    assert done.code == 0, done.err
    assert "saved to" in done.out
    assert "8xv100-16gb" in done.out
    cut = run("partition", saved, "--workers", "8", "--bandwidth", "1Gbit/s", "--json")
    assert cut.code == 0, cut.err
    assert cut.data["model"] == "train_step"
    assert cut.data["stages"][-1]["last"] == cut.data["layers"]
    assert cut.data["bottleneck_ms"] < cut.data["one_worker_ms"]


def test_json_is_the_profile_itself(tmp_path: Path) -> None:
    saved = tmp_path / "gpt.json"
    tiny = f"{GPT}:train_step:tiny_args"
    done = run("profile", tiny, "--cluster", "8xh100", "--json", "-o", saved)
    assert done.code == 0, done.err
    assert run("profile", tiny, "--cluster", "8xh100", "--json").out == done.out
    scans = [x for x in done.data["layers"] if re.match(r"gpt\.py:\d+\[", x["name"])]
    assert [x["name"][-3:] for x in scans] == ["[0]", "[1]", "[2]", "[3]"]
    assert {x["parameter_bytes"] for x in scans} == {4 * 12 * 64 * 64}
    assert {x["activation_bytes"] for x in scans} == {4 * 64 * 24 * 64}
    assert all(x["backward_ms"] > x["forward_ms"] > 0 for x in scans)
    assert done.data["units"]["forward_ms"] == "milliseconds per minibatch on one device"
    assert f'"{scans[0]["name"]}"' in saved.read_text(encoding="utf-8")


def test_a_slower_chip_takes_longer(tmp_path: Path) -> None:
    path = written(tmp_path)
    fast = run("profile", path, "--cluster", "8xh100", "--json").data["layers"]
    slow = run("profile", path, "--json").data["layers"]  # the local CPU
    assert [x["name"] for x in fast] == [x["name"] for x in slow]
    for name in ("forward_ms", "backward_ms"):
        assert sum(x[name] for x in fast) < sum(x[name] for x in slow)


def test_a_step_without_state_is_warned_of(tmp_path: Path) -> None:
    text = f"{STEP}\n\ndef loss(state, batch):\n    return (batch @ state['up']).sum()\n"
    done = run("profile", f"{written(tmp_path, text)}:loss", "--cluster", "8xcpu")
    assert done.code == 0, done.err
    assert "no argument of the step comes back as new state" in done.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--cluster", "8xnope"), "no chip is called 'nope'"),
        (("--depth", "0"), "0 is not in the range"),
        (("-o", "/no/such/profile.json"), "cannot write '/no/such/profile.json'"),
    ],
)
def test_wrong_options_end_with_2(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    done = run("profile", written(tmp_path), *options)
    assert done.code == 2
    assert told in done.err


def test_a_step_that_does_not_trace_names_the_line(tmp_path: Path) -> None:
    path = written(tmp_path, STEP.replace("batch @ w", "batch @ batch @ w"))
    done = run("profile", path)
    assert done.code == 2
    assert "does not trace" in done.err
    assert f"{path}, line " in done.err.replace("\n", "")
