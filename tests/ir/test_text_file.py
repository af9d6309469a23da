"""Where files are written: links, pipes, full disks, other people's files, killed processes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.ir.text_file import PLAN, check_output, read_text, write_bytes, write_text

PLAN_TEXT = '{\n "checksum": "0",\n "format": 4\n}\n'
OTHER_PLAN = '{\n "checksum": "1",\n "format": 4\n}\n'
SPECS = '{\n "step": "f",\n "cluster": "8xcpu"\n}\n'


def _checked(_: str, path: str | Path) -> None:
    check_output(path, PLAN)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "plan.json").write_text(OTHER_PLAN)
    (tmp_path / "link").symlink_to("far/plan.json")
    write_text(PLAN_TEXT, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far" / "plan.json").read_text() == PLAN_TEXT
    assert names(tmp_path) == ["far", "link"]
    assert names(tmp_path / "far") == ["plan.json"]


def test_a_link_to_nothing_yet_makes_its_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("plan.json")
    write_text(PLAN_TEXT, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "plan.json").read_text() == PLAN_TEXT


def test_links_in_a_circle_are_told(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(InputError, match=r"cannot write .*links"):
        write_text(PLAN_TEXT, tmp_path / "a")


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_text(PLAN_TEXT, pipe)
    reader.join()
    assert found == [PLAN_TEXT]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert names(tmp_path) == ["pipe"]


@pytest.mark.parametrize("mode", ["w", "a"])
def test_dev_stdout_is_what_the_shell_opened(tmp_path: Path, mode: str) -> None:
    code = (
        "from autopar.ir.text_file import write_text\n"
        f"write_text({PLAN_TEXT!r}, '/dev/stdout'); write_text('', '/dev/fd/1')"
    )
    (tmp_path / "log").write_text("before\n")
    with (tmp_path / "log").open(mode) as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
    before = "before\n" if mode == "a" else ""
    assert (tmp_path / "log").read_text() == before + PLAN_TEXT
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert piped.stdout.decode() == PLAN_TEXT


def test_devices_stay_devices() -> None:
    write_text(PLAN_TEXT, "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(InputError, match="cannot write '/dev/full': No space left on device"):
        write_text(PLAN_TEXT, "/dev/full")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "no name of a file"),
        ("-", "no name of a file"),
        (".", "it is a folder"),
        ("a\0b", "cannot have a NUL"),
        ("n" * 300, "File name too long"),
        ("none/plan.json", "there is no folder"),
        ("train.py/plan.json", "Not a directory"),
    ],
)
def test_what_is_no_place_for_a_file_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("x = 1\n")
    for attempt in (write_text, _checked):
        with pytest.raises(InputError, match=why) as caught:
            attempt(PLAN_TEXT, name)
        assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["train.py"]


def test_a_name_may_be_as_long_as_names_may_be_and_have_a_newline(tmp_path: Path) -> None:
    for name in ("n" * 255, "a\nb"):
        write_text(PLAN_TEXT, tmp_path / name)
        assert (tmp_path / name).read_text() == PLAN_TEXT
    assert names(tmp_path) == ["a\nb", "n" * 255]


@pytest.mark.parametrize(
    "held", ["import jax\n", "\n", '"""The step by step guide."""\n', SPECS, "{}", "\xff\xfe"]
)
def test_what_autopar_did_not_write_is_left_alone(tmp_path: Path, held: str) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(held.encode("latin-1"))
    for attempt in (write_text, _checked):
        with pytest.raises(InputError, match=r"is left as it is: remove it first"):
            attempt(PLAN_TEXT, path)
    assert path.read_bytes() == held.encode("latin-1")
    assert names(tmp_path) == ["train.py"]


@pytest.mark.parametrize("held", ["", OTHER_PLAN])
def test_an_empty_file_or_one_of_the_kind_is_replaced(tmp_path: Path, held: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(held)
    check_output(path, PLAN)
    write_text(PLAN_TEXT, path)
    assert path.read_text() == PLAN_TEXT


def test_permissions_stay_and_new_files_have_the_users(tmp_path: Path) -> None:
    path, new = tmp_path / "plan.json", tmp_path / "new.json"
    path.write_text(OTHER_PLAN)
    path.chmod(0o640)
    before = os.umask(0o027)
    try:
        write_text(PLAN_TEXT, path)
        write_text(PLAN_TEXT, new)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_what_may_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(OTHER_PLAN)
    (tmp_path / "plan.json").chmod(0o400)
    with pytest.raises(InputError, match="Permission denied"):
        write_text(PLAN_TEXT, tmp_path / "plan.json")
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="Permission denied"):
        check_output(tmp_path / "other.json", PLAN)


def _killed(folder: Path, target: str) -> None:
    """A process that is killed while it writes."""
    code = (
        "import os\nfrom autopar.ir import text_file\n"
        "os.replace = lambda *_: os.kill(os.getpid(), 9)\n"
        f"text_file.write_text({OTHER_PLAN!r}, {target!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, check=False)
    assert done.returncode == -signal.SIGKILL


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path) -> None:
    _killed(tmp_path, "plan.json")
    _killed(tmp_path, "other.json")
    assert [n.endswith(".part") for n in names(tmp_path)] == [True, True]
    write_text(PLAN_TEXT, tmp_path / "plan.json")
    assert [n for n in names(tmp_path) if not n.endswith(".part")] == ["plan.json"]
    write_text(PLAN_TEXT, tmp_path / "other.json")
    assert names(tmp_path) == ["other.json", "plan.json"]


def test_a_file_that_another_still_writes_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, seen = os.replace, list[list[str]]()

    def slow(part: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        write_text(OTHER_PLAN, tmp_path / "plan.json")  # a whole write of another in between
        seen.append(names(tmp_path))
        replace(part, target)

    monkeypatch.setattr(os, "replace", slow)
    write_text(PLAN_TEXT, tmp_path / "plan.json")
    assert len(seen[0]) == 2
    assert names(tmp_path) == ["plan.json"]
    assert (tmp_path / "plan.json").read_text() == PLAN_TEXT


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="No space left"):
        write_bytes(b"\x89PNG\r\n", tmp_path / "a.png")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda p: p.mkdir(),
        lambda p: p.write_bytes(b"\xff\xff"),
        lambda p: None,
        lambda p: p.symlink_to(p),
    ],
)
def test_what_is_no_text_is_not_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a")
    with pytest.raises(InputError, match="cannot read pins"):
        read_text(tmp_path / "a", "pins")
    with pytest.raises(InputError, match="cannot read pins"):
        read_text(str(tmp_path / "a\0b"), "pins")
