"""`autopar schedule --plan` and `-o`: pictures of a plan's schedule and of a named one."""

import json
from pathlib import Path

import pytest

from autopar import plans
from autopar.runtime.timeline import MeasuredSpan, Timeline, chrome_trace
from tests.cli.running import STEP, run, written
from tests.cli.test_stages import DEEP, TWO
from tests.report.svg.reading import said, titled

NAMED = ("schedule", "1f1b", "--stages", "2", "--microbatches", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan of two stages and one of a single program."""
    made = tmp_path_factory.mktemp("schedules")
    for text, name, options in ((DEEP, "two.json", TWO), (STEP, "one.json", ())):
        step = written(made, text)
        assert run("plan", step, "--cluster", "8xcpu", *options, "-o", made / name).code == 0
    return made


@pytest.mark.smoke
def test_a_named_schedule_is_saved(tmp_path: Path) -> None:
    done = run(*NAMED, "-o", tmp_path / "a.svg")
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith(f"saved to {tmp_path / 'a.svg'}\n")
    svg = (tmp_path / "a.svg").read_text()
    assert said(svg)[0] == "1f1b 2 devices, 2 microbatches, step 9, bubble 33.3%"
    assert run(*NAMED, "-o", tmp_path / "a.png", "--json").data["makespan"] == 9
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.smoke
def test_a_plans_schedule_is_drawn_in_its_own_times(folder: Path, tmp_path: Path) -> None:
    picture, plan = tmp_path / "a.svg", plans.load(folder / "two.json")
    done = run("schedule", "--plan", folder / "two.json", "-o", picture)
    assert "Stages under 1f1b: 4 microbatches of 8 rows" in done.out
    svg = picture.read_text()
    assert {"mesh0", "mesh1"} <= set(said(svg))
    share = plan.prediction.bubble_seconds / plan.outcome.seconds
    assert f"bubble {share:.1%}" in said(svg)[0]
    data = run("schedule", "--plan", folder / "two.json", "--json").data
    assert len(data["devices"]) == 2


def test_a_trace_is_drawn_under_the_plan(folder: Path, tmp_path: Path) -> None:
    spans = tuple(MeasuredSpan(k, f"F{k}", "F", k, 0, k + 1.0, k + 2.0) for k in range(3))
    two, three = (tmp_path / f"{n}.json" for n in (2, 3))
    two.write_text(json.dumps(chrome_trace(Timeline(2, spans[:2]))))
    three.write_text(json.dumps(chrome_trace(Timeline(3, spans))))
    command = ("schedule", "--plan", folder / "two.json", "-o", tmp_path / "a.svg", "--trace")
    assert run(*command, two).code == 0
    svg = (tmp_path / "a.svg").read_text()
    assert "measured 2.00 s, bubble 50.0%" in said(svg)[0]
    assert len(titled(svg, "measured waits")) == 2
    refused = run(*command, three)
    assert refused.code == 2
    assert "is of 3 submeshes and the plan has 2" in refused.err
    assert "cannot read" in run(*command, tmp_path / "none.json").err


REFUSED = {
    "--plan two.json 1f1b --stages 2": "--plan has a schedule of its own: leave out NAME, --stages",
    "--plan two.json --trace t.json": "--trace is drawn in the picture: add -o NAME.svg",
    "--plan one.json": "one.json is one program and has no schedule: autopar show",
    "1f1b --trace t.json": "--trace goes under the schedule of a plan: add --plan PLAN.json",
    "1f1b --stages 2": "Needs NAME, '--stages' and '--microbatches', or '--plan'.",
    "1f1b --stages 2 --microbatches 2 -o a.pdf": "'a.pdf' is no name for a picture",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_ends_with_2_and_a_remedy(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    done = run("schedule", *words.split())
    assert done.code == 2
    assert REFUSED[words] in done.err
