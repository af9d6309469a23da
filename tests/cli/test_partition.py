"""`autopar partition`: stages of a profile as a table and as JSON, and what it cannot use."""

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import InputError
from autopar.inspecting.partition import bytes_per_ms
from tests.cli.running import run


def toy(folder: Path, **changed: Any) -> Path:
    """A profile of three layers of 4, 2 and 2 ms behind an Input, the last two with weights."""
    figures = [("x", "Input", 9, 0), ("a", "Conv", 4, 0), ("b", "Linear", 2, 9), ("c", "Add", 2, 9)]
    layers = [
        {
            "name": name, "op": op, "forward_ms": ms / 2, "backward_ms": ms / 2,
            "activation_bytes": 250_000, "parameter_bytes": weight * 10**7,
        }
        for name, op, ms, weight in figures
    ]  # fmt: skip
    edges = [["x", "a"], ["a", "b"], ["b", "c"]]
    path = folder / "toy.json"
    data = {"model": "toy", "layers": layers, "edges": edges, **changed}
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@pytest.mark.smoke
def test_the_table_shows_what_the_bottleneck_is(tmp_path: Path) -> None:
    done = run("partition", toy(tmp_path), "--workers", "4", "--bandwidth", "10Gbit/s")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    told = "bottleneck 2.000 ms between minibatches, compute of stage 0, 4.00 times as fast"
    assert told.split() in lines
    assert ["0", "1..1", "a", "2", "2.000", "0.000", "0.400", "2"] in lines
    assert ["1", "2..2", "b", "1", "2.000", "0.000", "0.400", "2"] in lines
    assert ["2", "3..3", "c", "1", "2.000", "0.000", "0.000", "1"] in lines


def test_what_everything_waits_for_is_named(tmp_path: Path) -> None:
    options = ("--workers", "4", "--bandwidth")
    assert "transfer behind stage" in run("partition", toy(tmp_path), *options, "1.5Gbit/s").out
    only = {
        "name": "a", "op": "Linear", "forward_ms": 1, "backward_ms": 2, "activation_bytes": 0,
        "parameter_bytes": 10**8,
    }  # fmt: skip
    path = toy(tmp_path, layers=[only], edges=[])
    done = run("partition", path, *options, "10Gbit/s")
    assert "60.000 ms between minibatches, sync of stage 0, 0.05 times as fast" in done.out


def test_json_counts_layers_from_1(tmp_path: Path) -> None:
    done = run(
        "partition", toy(tmp_path), "--workers", "4", "--bandwidth", "1.25GB/s", "--sync", "ring",
        "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.data["bottleneck_ms"] == 2.0
    assert done.data["one_worker_ms"] == 8.0
    assert done.data["first_layer"] == 1
    assert done.data["layers"] == 3
    assert [(s["first"], s["last"], s["replicas"]) for s in done.data["stages"]] == [
        (1, 1, 2), (2, 2, 1), (3, 3, 1),
    ]  # fmt: skip


def test_servers_hold_stages_of_their_own(tmp_path: Path) -> None:
    done = run("partition", toy(tmp_path), "--levels", "2x100Gbit/s,2x10Gbit/s", "--json")
    assert done.code == 0, done.err
    assert done.data["workers"] == 4
    first, second = done.data["stages"]
    assert [(s["first"], s["last"], s["replicas"]) for s in first["stages"]] == [(1, 1, 2)]
    assert [(s["first"], s["last"], s["replicas"]) for s in second["stages"]] == [
        (2, 2, 1), (3, 3, 1),
    ]  # fmt: skip
    assert "stages" not in first["stages"][0]
    shown = run("partition", toy(tmp_path), "--levels", "2x100Gbit/s,2x10Gbit/s").out
    assert "2 at 12.5 GB/s, in each of 2 at 1.25 GB/s" in shown
    assert [line.split()[:2] for line in shown.splitlines()[-5:]] == [
        ["0", "1..1"], ["0.0", "1..1"], ["1", "2..3"], ["1.0", "2..2"], ["1.1", "3..3"],
    ]  # fmt: skip


def test_a_profile_with_odd_names_and_no_times(tmp_path: Path) -> None:
    layer = {
        "name": "[red]a[/]", "forward_ms": 0, "backward_ms": 0, "activation_bytes": 0,
        "parameter_bytes": 0,
    }  # fmt: skip
    path = toy(tmp_path, model="[b]", layers=[layer], edges=[])
    done = run("partition", path, "--workers", "3", "--bandwidth", "1GB/s")
    assert done.code == 0, done.err
    assert "[red]a[/]" in done.out
    assert "[b], 1 layers" in done.out
    assert "0.000 ms between minibatches, compute of stage 0" in done.out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10Gbit/s", 1.25e6),
        ("10 Gbit/s", 1.25e6),
        ("25Gbits/s", 3.125e6),
        ("100Mbit/s", 12_500),
        ("1GB/s", 1e6),
        ("1.25e1 MB/s", 12_500),
        ("1GiB/s", 2**30 / 1e3),
        ("2kB/s", 2),
        ("1e9bytes/s", 1e6),
        ("1TB/s", 1e9),
    ],
)
def test_bandwidths(text: str, expected: float) -> None:
    assert bytes_per_ms(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("10", "'10' is not understood; write a number and a unit, as 10Gbit/s"),
        ("10Gb/s", "is not understood"),
        ("10gbit/s", "is not understood"),
        ("Gbit/s", "is not understood"),
        ("tenGbit/s", "is not understood"),
        ("1iB/s", "an i with no K, M, G or T"),
        ("0Gbit/s", "give a positive one"),
        ("-1GB/s", "give a positive one"),
        ("infGB/s", "give a positive one"),
        ("nanGB/s", "give a positive one"),
    ],
)
def test_bandwidths_that_are_none(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        bytes_per_ms(text)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--bandwidth", "1GB/s"), "--workers is missing"),
        (("--workers", "2"), "--bandwidth is missing"),
        (("--workers", "0", "--bandwidth", "1GB/s"), "0 workers cannot run anything"),
        (("--workers", "9999", "--bandwidth", "1GB/s"), "group them in servers"),
        (("--workers", "two", "--bandwidth", "1GB/s"), "'two' is not a valid integer"),
        (("--workers", "2", "--bandwidth", "1GB"), "bandwidth '1GB' is not understood"),
        (("--workers", "2", "--bandwidth", "1GB/s", "--sync", "tree"), "'tree' is not one of"),
        (("--levels", "2x1GB/s", "--workers", "2"), "leave out --workers and --bandwidth"),
        (("--levels", "2"), "level '2' is not understood"),
        (("--levels", "ax1GB/s"), "level 'ax1GB/s' is not understood"),
        (("--levels", "2x1GB/s,"), "level '' is not understood"),
        (("--levels", "0x1GB/s"), "0 workers cannot run anything"),
    ],
)
def test_wrong_options_end_with_2(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    done = run("partition", toy(tmp_path), *options)
    assert done.code == 2
    assert told in done.err
    assert done.out == ""


def test_a_profile_that_cannot_be_used_ends_with_2(tmp_path: Path) -> None:
    wanted = ("--workers", "2", "--bandwidth", "1GB/s")
    done = run("partition", toy(tmp_path, edges=[["b", "a"]]), *wanted)
    assert done.code == 2
    assert "edge 'b' -> 'a' goes backwards, from layer 3 to layer 2" in done.err
    assert "Traceback" not in done.err
    assert "cannot read profile" in run("partition", tmp_path / "none.json", *wanted).err
