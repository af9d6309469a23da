"""`autopar schedule`: the picture, the JSON object, and what is refused."""

from textwrap import dedent

import pytest
from click.testing import CliRunner

from autopar.cli.main import main
from tests.cli.running import run

SIZE = ("--stages", "4", "--microbatches", "8")


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.smoke
def test_the_picture_and_what_it_comes_to() -> None:
    done = run("schedule", "zb-h1", *SIZE)
    assert (done.code, done.err) == (0, "")
    assert lines(done.out) == lines(
        dedent("""\
        schedule zb-h1
        1f1b whose weight gradients fill the gaps: about a third of its bubble.

        time      0              5              10             15             20             25
        device 0  F0 F1 F2 F3 ········ I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
        device 1  ·· F0 F1 F2 ····· I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
        device 2  ····· F0 F1 ·· I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
        device 3  ········ F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7

        F forward  I input gradient  W weight gradient  · waiting  F3: microbatch 3

        pipeline     4 devices, 8 microbatches
        times        F 1, I 1, W 1 a device; 0 a transfer
        makespan     27
        bubble       3 (11.1% of the makespan) in which a device does not work
        span bubble  3 of it between the device's first and last task
        in flight    at most 4 4 4 4, by device: microbatches that wait for their backward
        """)
    )


def test_a_narrow_terminal_folds_the_picture() -> None:
    command = ["schedule", "1f1b", "--stages", "2", "--microbatches", "6"]
    done = CliRunner(env={"COLUMNS": "50"}).invoke(main, command)
    picture = lines(done.stdout)[lines(done.stdout).index("") + 1 :][:7]
    assert picture == lines(
        dedent("""\
        time      0              5              10
        device 0  F0 F1 ····· B0--- F2 B1--- F3 B2-
        device 1  ·· F0 B0--- F1 B1--- F2 B2--- F3

        time                  15             20
        device 0  -- F4 B3--- F5 B4--- ·· B5---
        device 1  B3--- F4 B4--- F5 B5--- ·····
        """)
    )


def test_of_a_long_picture_the_middle_is_left_out() -> None:
    done = run("schedule", "gpipe", "--stages", "3", "--microbatches", "900")
    assert "left out: --json has it all" in done.out
    assert len(lines(done.out)) < 80
    assert "B899" in done.out


def test_stages_are_listed_where_a_device_has_several() -> None:
    done = run("schedule", "zb-v", "--stages", "2", "--microbatches", "3")
    assert "stages       by device, 0: 0 3, 1: 1 2" in lines(done.out)
    assert "F5.3: stage 5, microbatch 3" in done.out


def test_too_few_microbatches_are_told() -> None:
    done = run("schedule", "zb-h2", "--stages", "4", "--microbatches", "4")
    assert done.code == 0
    assert done.err == "warning: zb-h2: 4 devices are kept busy only from 7 microbatches on\n"


@pytest.mark.smoke
def test_json() -> None:
    words = ("--stages", "2", "--microbatches", "2", "--latency", "0.25", "--times", "F=1,I=1.5")
    data = run("schedule", "zb-h1", *words, "--json").data
    devices = data.pop("devices")
    assert data == {
        "json_version": 1,
        "schedule": "zb-h1",
        "stages": 2,
        "microbatches": 2,
        "chunks": 1,
        "times": {"F": 1.0, "I": 1.5, "W": 1.0},
        "latency": 0.25,
        "makespan": 9.0,
        "makespan_bubble": 2.0,
        "span_bubble": 2.0,
        "peak_in_flight": [2, 2],
    }
    assert devices[1][1] == {
        "task": "I1.0", "kind": "I", "stage": 1, "microbatch": 0, "start": 2.25, "end": 3.75,
    }  # fmt: skip
    # Worked by hand: what crosses arrives 0.25 after its end.
    assert [[(t["task"], t["start"]) for t in row] for row in devices] == [
        [("F0.0", 0), ("F0.1", 1), ("I0.0", 4), ("W0.0", 5.5), ("I0.1", 6.5), ("W0.1", 8)],
        [("F1.0", 1.25), ("I1.0", 2.25), ("F1.1", 3.75), ("I1.1", 4.75), ("W1.0", 6.25),
         ("W1.1", 7.25)],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "chunks", "makespan", "span_bubble"),
    [("interleaved", 2, 28.5, 4.5), ("zb-v", 2, 25.5, 0.0), ("1f1b", 1, 33.0, 9.0)],
)
def test_usual_chunks(name: str, chunks: int, makespan: float, span_bubble: float) -> None:
    data = run("schedule", name, *SIZE, "--json").data
    assert data["chunks"] == chunks
    assert (data["makespan"], data["span_bubble"]) == (makespan, span_bubble)


def test_chunks_and_a_whole_backward() -> None:
    words = ("--chunks", "4", "--times", "F=1,B=2")
    data = run("schedule", "interleaved", *SIZE, *words, "--json").data
    assert data["times"] == {"F": 1.0, "B": 2.0}
    assert (data["makespan"], data["peak_in_flight"]) == (26.25, [19, 17, 15, 13])


def test_sums_are_rounded() -> None:
    data = run("schedule", "zb-h1", *SIZE, "--times", "F=1,I=1.2,W=0.8", "--json").data
    assert (data["makespan"], data["makespan_bubble"]) == (28.2, 4.2)


REFUSED = {
    "zbh": "no schedule is called 'zbh'. Close: zb-h2, zb-h1. Schedules: gpipe, 1f1b",
    "zb-h1 --times F=1,B=2": "times 'F=1,B=2': zb-h1 splits B; write --times F=1,I=1,W=1",
    "1f1b --times B=1,W=2": "times 'B=1,W=2': B is I and W together; write --times",
    "1f1b --times X=1": "times 'X=1': 'X' is no kind of task; write --times",
    "1f1b --times F=1,F=2": "times 'F=1,F=2': F is there twice; write --times",
    "1f1b --times F=a": "times 'F=a': 'a' is no time; write a number from 0 on",
    "1f1b --times F=-1": "times 'F=-1': '-1' is no time; write a number from 0 on",
    "1f1b --latency nan": "latency: 'nan' is no time; write a number from 0 on",
    "1f1b --chunks 2": "1f1b has 1 chunk a device (more chunks: interleaved",
    "zb-v --chunks 1": "zb-v needs 2 chunks a device, not 1",
    "1f1b --microbatches 0": "1f1b on 4 devices with 0 microbatches: take at least one of each",
    "interleaved --microbatches 9": "interleaved on 4 devices: 9 microbatches do not make 2 equal",
    "1f1b --microbatches 1000000": "4 stages x 1000000 microbatches x 1 chunks are too many tasks",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_ends_with_2_and_a_remedy(words: str) -> None:
    name, *options = words.split()
    done = run("schedule", name, *SIZE, *options)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {REFUSED[words]}")
    assert done.err.count("\n") == 1
