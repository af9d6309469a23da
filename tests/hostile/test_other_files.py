"""Files that commands read beside plans: what is wrong with them is told, and never a traceback."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

import autopar
from autopar.ir.verification import verification_data
from tests.cli.running import run, written
from tests.hostile.mutating import changed, changed_text
from tests.hostile.steps import mlp, shapes_of

_JUNK = (
    b"", b"\xff\xfe\x00", b"null", b"3", b'"x"', b"[]", b"{}", b"[1, 2", b"[" * 100_000,
    b'{"a": ' * 50_000, b"[" * 2000 + b"]" * 2000, b"9" * 5000, b"1e400", b"NaN",
    b'{"pins": 3, "pins": 4}', b'{"pins": {"x": [[]]}}', b'{"layers": [[]], "edges": 5}',
    b'{"traceEvents": [{"ph": "X", "tid": 1}]}', b'{"agrees": 1, "level": [], "parts": {}}',
    b"logical_axis_rules: [[", b"logical_axis_rules: [[1, 2]]", b'A = [("x", P(f()))]',
    b"A = [(3, 'x')]", b"A = " + b"(" * 5000, b"\0", b'name = "x"', b'like = "8xh100"\nchip = 3',
    b'like = "8xh100"\n[chip]\nmemory_bytes = 1e400', b"a = " + b"[" * 100_000,
    b'like = "8xh100"\n[chip]\nmemory_bytes = ' + b"9" * 5000,
    b'like = "8xh100"\n[chip.peak_flops]\nbf16 = nan', b'like = "8xh100"\nswitch.levels = [3]',
)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """A kind of file, a good one, and the command that reads it."""

    suffix: str
    good: str
    words: tuple[str, ...]

    def check(self, folder: Path, content: bytes, *, may_be_right: bool = False) -> None:
        """Fail unless the command ends with an error of its own, or with an answer if it may."""
        (folder / f"given{self.suffix}").write_bytes(content)
        done = run(*(word.format(given=folder / f"given{self.suffix}") for word in self.words))
        assert done.code in ((0, 1, 2) if may_be_right else (1, 2)), (content[:80], done.err)
        told = [line for line in done.err.splitlines() if line.strip()]
        assert "Traceback" not in done.err
        assert all(len(line) < 1000 for line in told), (content[:80], done.err[:2000])


@pytest.fixture(scope="module")
def readings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reading]:
    folder = tmp_path_factory.mktemp("hostile")
    step = str(written(folder))
    plan = autopar.plan(
        mlp, *shapes_of("mlp"), cluster="8xcpu", stages=2, microbatches=2, schedule="1f1b"
    )
    one = autopar.plan(mlp, *shapes_of("mlp"), cluster="8xcpu", mesh=(8,), method="fsdp")
    saved, page = str(folder / "plan.json"), str(folder / "page.html")
    plan.save(saved)
    one.save(folder / "one.json")
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "tid": m, "args": {"name": f"mesh{m}"}}
            for m in range(2)
        ]
        + [
            {"ph": "X", "name": "F0", "cat": "F", "tid": m, "ts": 1.0, "dur": 2.0,
             "args": {"stage": m, "microbatch": 0}}
            for m in range(2)
        ]
    }  # fmt: skip
    verified = verification_data(autopar.verify(one, mlp, *shapes_of("mlp"), level="memory"))
    profiled = run("profile", step, "--cluster", "8xh100", "--json").out
    exported = run("export", str(folder / "one.json"), "--as", "flax-rules").out
    maxtext = "logical_axis_rules: [\n  ['embed', ['data']],\n  ['mlp', ['model']],\n]\n"
    pins = '{"pins": {"up": [null, "data"], "down": [["data"]]}, "unplaced": []}'
    toml = autopar.Cluster.parse("8xh100").to_toml()
    plans = ("plan", step, "--mesh", "8", "--json")
    return {
        "trace in a report": Reading(
            ".json", json.dumps(trace), ("report", saved, "-o", page, "--trace", "{given}")
        ),
        "trace in a picture": Reading(
            ".json",
            json.dumps(trace),
            ("schedule", "--plan", saved, "--trace", "{given}", "-o", str(folder / "a.svg")),
        ),
        "verification": Reading(
            ".json",
            json.dumps({"json_version": 1, **verified}),
            ("report", str(folder / "one.json"), "-o", page, "--verification", "{given}"),
        ),
        "profile": Reading(
            ".json", profiled, ("partition", "{given}", "--workers", "2", "--bandwidth", "1GB/s")
        ),
        "pins": Reading(".json", pins, (*plans, "--cluster", "8xcpu", "--pins", "{given}")),
        "names": Reading(
            ".json",
            '{"**/k": ["embed", "mlp"]}',
            ("export", str(folder / "one.json"), "--as", "flax-rules", "--logical", "{given}"),
        ),
        "rules in JSON": Reading(
            ".json",
            '{"logical_axis_rules": [["a", "data"]], "partition_rules": [["up", [null, "data"]]]}',
            ("import", "{given}", "--for", step),
        ),
        "rules in Python": Reading(".py", exported, ("import", "{given}", "--for", step)),
        "rules in YAML": Reading(".yml", maxtext, ("import", "{given}", "--for", step)),
        "cluster": Reading(".toml", toml, ("clusters", "{given}")),
        "cluster of a plan": Reading(".toml", toml, (*plans, "--cluster", "{given}")),
    }


KINDS = (
    "trace in a report", "trace in a picture", "verification", "profile", "pins", "names",
    "rules in JSON", "rules in Python", "rules in YAML", "cluster", "cluster of a plan",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_junk_is_refused(readings: dict[str, Reading], kind: str, tmp_path: Path) -> None:
    for content in _JUNK:
        empty = kind in ("names", "pins") and content in (b"{}", b'{"pins": {"x": [[]]}}')
        readings[kind].check(tmp_path, content, may_be_right=empty)


def _changes(reading: Reading, count: int, start: int = 0) -> list[bytes]:
    """The good file with changes of its data, where that is JSON, and of its text."""
    texts: list[str] = []
    for seed in range(start, start + count):
        if reading.suffix == ".json" and seed % 2:
            texts.append(changed(json.loads(reading.good), seed))
        else:
            texts.append(changed_text(reading.good, random.Random(seed)))
    return [text.encode("utf-8", "surrogatepass") for text in texts]


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_read_or_refused(
    readings: dict[str, Reading], kind: str, tmp_path: Path
) -> None:
    slow = "plan" in readings[kind].words[0]
    for content in _changes(readings[kind], 4 if slow else 10):
        readings[kind].check(tmp_path, content, may_be_right=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_changed_files_are_read_or_refused(
    readings: dict[str, Reading], kind: str, tmp_path: Path
) -> None:
    for content in _changes(readings[kind], 200, start=1000):
        readings[kind].check(tmp_path, content, may_be_right=True)


def test_the_good_files_are_read(readings: dict[str, Reading], tmp_path: Path) -> None:
    for kind, reading in readings.items():
        path = tmp_path / f"given{reading.suffix}"
        path.write_text(reading.good)
        done = run(*(word.format(given=path) for word in reading.words))
        unnamed = kind == "rules in YAML" and "places nothing" in done.err
        assert done.code == 0 or unnamed, (kind, done.err)


def test_a_cluster_that_is_like_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f'like = "{tmp_path}/b.toml"')
    (tmp_path / "b.toml").write_text(f'like = "{tmp_path}/a.toml"')
    done = run("clusters", tmp_path / "a.toml")
    assert done.code == 2
    assert "is like itself" in done.err
