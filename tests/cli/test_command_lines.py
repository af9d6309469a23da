"""Command lines that cannot be carried out: one short message, 1 or 2 to end with, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import STEP, run, written

_ARGS = "\ndef example_args():\n    return (1.0,)\n"
_NEEDS = {
    "step.py": STEP,
    "raises.py": "x = 1\nraise RuntimeError('a' * 10000)",
    "based.py": "class Odd(BaseException): pass\nraise Odd('odd')",
    "leaves.py": "import sys\nsys.exit(0)",
    "leaving.py": f"import sys\ndef train_step(w):\n    sys.exit(4)\n{_ARGS}",
    "leaving_args.py": "import sys\ndef train_step(w): return w\ndef example_args(): sys.exit(0)",
    "bare.py": "def train_step(w): return w",
    "data.py": f"train_step = {{'lr': 1}}\n{_ARGS}",
    "objects.py": "def train_step(w): return w\ndef example_args(): return (object(),)",
    "texts.py": "def train_step(w): return w\ndef example_args(): return ('w', {'a': 'b'})",
    "none.py": "def train_step(w): return w\ndef example_args(): return None",
    "few.py": f"def train_step(w, x, y): return w\n{_ARGS}",
    "odd.py": f"def train_step(w, k): return w\n{_ARGS}\ndef example_kwargs(): return {{1: 2}}",
    "returns.py": f"def train_step(w): return object()\n{_ARGS}",
    "later.py": f"async def train_step(w): return w\n{_ARGS}",
    "bytes.py": "x = '\\x00'\n",
    "cluster.toml": "name = 3",
    "pins.json": "[" * 100000,
}
_CLUSTER = ("--cluster", "8xcpu")

LINES: list[tuple[tuple[str, ...], str]] = [
    (("plan", "step.py"), "Missing option '--cluster'"),
    (("plan", "gone.py", *_CLUSTER), "there is no file"),
    (("plan", ".", *_CLUSTER), "is a folder"),
    (("plan", "x" * 300 + ".py", *_CLUSTER), "cannot be read: File name too long"),
    (("plan", "a\0b.py", *_CLUSTER), "'a\\x00b.py' has a NUL byte"),
    (("plan", "step.py", "--cluster", "8x\0cpu"), "'8x\\x00cpu' has a NUL byte"),
    (("plan", "step.py", *_CLUSTER, "--pin", "up\0=P()"), "'up\\x00=P()' has a NUL byte"),
    (("plan", "step.py", *_CLUSTER, "-o", "a\0b"), "'a\\x00b' has a NUL byte"),
    (("plan", "raises.py", *_CLUSTER), "raises.py fails: RuntimeError: aaaa"),
    (("plan", "based.py", *_CLUSTER), "based.py fails: Odd: odd"),
    (("plan", "leaves.py", *_CLUSTER), "sys.exit runs when it is imported"),
    (("plan", "leaving.py", *_CLUSTER), "train_step does not trace: SystemExit: 4"),
    (("lint", "leaving.py", *_CLUSTER), "train_step does not trace: SystemExit: 4"),
    (("plan", "leaving_args.py", *_CLUSTER), "sys.exit is what example_args() does"),
    (("plan", "bare.py", *_CLUSTER), "has no example_args()"),
    (("plan", "data.py", *_CLUSTER), "train_step is no function"),
    (("plan", "step.py:example", *_CLUSTER), "example does not exist"),
    (("plan", "step.py:jnp", *_CLUSTER), "jnp is no function"),
    (("plan", "objects.py", *_CLUSTER), "w of train_step is of type object, which is no array"),
    (("plan", "texts.py", *_CLUSTER), "w of train_step is of type str, which is no array"),
    (("plan", "none.py", *_CLUSTER), "example_args() returned NoneType"),
    (("plan", "few.py", *_CLUSTER), "missing"),
    (("plan", "odd.py", *_CLUSTER), "example_kwargs() returned dict; return a dict of the"),
    (("plan", "returns.py", *_CLUSTER), "returned a value of type <class 'object'>"),
    (("plan", "later.py", *_CLUSTER), "async function"),
    (("plan", "step.py", "--cluster", "cluster.toml"), "needs name = '...'"),
    (("plan", "step.py", "--cluster", "x" * 300 + ".toml"), "cannot be read: File name too long"),
    (("plan", "step.py", *_CLUSTER, "--mesh", "2.5,4"), "mesh '2.5,4' is not understood"),
    (("plan", "step.py", *_CLUSTER, "--mesh", ""), "is not understood"),
    (("plan", "step.py", *_CLUSTER, "--memory-gb", "nan"), "memory_gb is nan; it takes the GiB"),
    (("plan", "step.py", *_CLUSTER, "--memory-gb", "inf"), "memory_gb is inf; it takes the GiB"),
    (("plan", "step.py", *_CLUSTER, "--pin", "up=" + "P(" * 5000), "is not understood"),
    (("plan", "step.py", *_CLUSTER, "--pins", "pins.json"), "holds no pins"),
    (("plan", "step.py", *_CLUSTER, "--stages", "1.5"), "neither a whole number"),
    (("clusters", "8xnope"), "no chip is called"),
    (("show", "gone.json"), "gone.json"),
    (("explain", "step.py", "up"), "step.py"),
    (("verify", "gone.json", "step.py"), "gone.json"),
    (("schedule", "1f2b", "--stages", "4", "--microbatches", "8"), "1f2b"),
    (("schedule", "1f2b"), "no schedule is called '1f2b'"),
    (("nothing",), "No such command"),
]


@pytest.mark.parametrize(("words", "told"), LINES, ids=lambda v: str(v)[:40].replace("\0", "NUL"))
def test_one_short_message_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in _NEEDS.items():
        written(tmp_path, text, name)
    done = run(*words)
    assert done.code in (1, 2)
    assert done.out == ""
    assert told in " ".join(done.err.split())
    assert "Traceback" not in done.err
    assert len(done.err) < 1200


# -- stdout that does not take all -----------------------------------------------------------


def _autopar(words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A shell line, in which `autopar` is this one."""
    line = f'autopar() {{ "{sys.executable}" -m autopar "$@"; }}; set -o pipefail; {words}'
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )


def test_a_reader_that_has_seen_enough_ends_it_well() -> None:
    # Far more than a pipe holds: the writer is told that nobody reads.
    done = _autopar("autopar schedule 1f1b --stages 16 --microbatches 64 --json | head -c 10")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) == 10


def test_so_does_one_of_a_table() -> None:
    done = _autopar("autopar clusters | true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", ["clusters", "--help", "clusters 8xh100 --json"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_told(words: str) -> None:
    done = _autopar(f"autopar {words} > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "error: cannot read or write: No space left on device\n"


def test_a_terminal_of_ascii_alone() -> None:
    done = _autopar(
        "autopar clusters && autopar schedule 1f1b --stages 4 --microbatches 8 && autopar --help",
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
        LC_ALL="C",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
