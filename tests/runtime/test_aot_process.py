"""The process that compiles is told little, says nothing and is gone in time, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from autopar.cluster import Cluster
from autopar.cluster.target import Target
from autopar.errors import VerifyError
from autopar.ir.sharding import MeshShape
from autopar.runtime.aot import extras, launch
from autopar.runtime.aot.child import options_of
from autopar.runtime.aot.launch import compile_ahead, run_child
from autopar.runtime.aot.program import AotProgram

_PROGRAM = AotProgram(
    b"", MeshShape(("data",), (8,)), tuple(range(8)), (), Target.of(Cluster.parse("8xh100"))
)


def test_the_compiler_gets_the_programs_own_options(tmp_path: Path) -> None:
    own = (("xla_a", 3), ("xla_b", "x"), ("xla_gpu_enable_pipelined_all_gather", True))
    replace(_PROGRAM, options=own).write(tmp_path)
    read = AotProgram.read(tmp_path)
    assert read.options == own
    given = options_of(read.target, read.options, tmp_path)
    assert dict(own).items() <= given.items()
    # All else is for having no device: nothing that the step runs without.
    assert {n for n in given if n not in dict(own) and "dump" not in n} == {
        "xla_gpu_enable_triton_gemm"
    }


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a shell script in the place of Python; it finds the program's folder in $FOLDER."""

    def put(script: str) -> Path:
        path, folder = tmp_path / "python", tmp_path / "folder"
        path.write_text(f"#!/bin/sh\nfor FOLDER; do :; done\n{script}\n")
        path.chmod(0o755)
        folder.mkdir()
        monkeypatch.setattr(sys, "executable", str(path))
        return folder

    return put


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody waits for stays behind as a zombie."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


_LINGERING = 'sleep 60 &\necho $! > "$FOLDER/pid.part" && mv "$FOLDER/pid.part" "$FOLDER/pid"\nwait'


def test_a_limit_ends_the_process_and_what_it_started(stand_in: Callable[[str], Path]) -> None:
    folder = stand_in(_LINGERING)
    with pytest.raises(VerifyError, match="stopped after 1 s without an answer"):
        run_child(folder, 1.0)
    assert _is_gone(int((folder / "pid").read_text()))


def test_what_is_enough_ends_it_without_complaint(stand_in: Callable[[str], Path]) -> None:
    folder = stand_in(_LINGERING)
    run_child(folder, 60.0, (folder / "pid").exists)
    assert _is_gone(int((folder / "pid").read_text()))


def test_an_interrupt_leaves_neither_process_nor_folder(
    stand_in: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(_LINGERING)
    home, started = tmp_path / "temporary", list[int]()
    home.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(home))

    def interrupted(folder: Path) -> bool:
        if (folder / "pid").exists():
            started.append(int((folder / "pid").read_text()))
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(launch, "is_scheduled", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_ahead(_PROGRAM)
    assert started
    assert _is_gone(started[0])
    assert not list(home.iterdir())


def test_its_words_stand_in_the_error_alone(
    stand_in: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = stand_in("echo out; echo no such pass >&2; exit 3")
    with pytest.raises(VerifyError, match=r"exit 3\)\. It said:\nout\nno such pass"):
        run_child(folder, 60.0)
    assert capfd.readouterr() == ("", "")


def test_settings_of_this_process_stay_here(
    stand_in: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stand_in('env > "$FOLDER/env.txt"')
    leaking = ("XLA_FLAGS", "JAX_ENABLE_COMPILATION_CACHE", "LIBTPU_INIT_ARGS", "https_proxy")
    for name in leaking:
        monkeypatch.setenv(name, "of the parent")
    monkeypatch.setattr(sys, "path", ["somewhere/else", *sys.path])
    run_child(folder, 60.0)
    text = (folder / "env.txt").read_text()
    told = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert not set(leaking) & set(told)
    assert told["JAX_PLATFORMS"] == "cpu"
    assert told["TMPDIR"] == str(folder)
    assert told["PYTHONPATH"].split(os.pathsep)[0] == os.path.abspath("somewhere/else")


def test_it_goes_with_the_process_that_started_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    script = (
        "import sys, time; from pathlib import Path; from autopar.runtime.aot import child; "
        f"child.leave_with_parent(Path({str(folder)!r})); print('up', flush=True); time.sleep(60)"
    )
    waiting = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert waiting.stdout is not None
    assert waiting.stdin is not None
    assert waiting.stdout.readline() == b"up\n"
    waiting.stdin.close()
    assert waiting.wait(30) == 1
    waiting.stdout.close()
    assert not folder.exists()


# -- extras -------------------------------------------------------------------------------------


def _installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Nothing but these packages (underscores for dashes) and JAX itself."""

    def found(name: str) -> str:
        if name in ("jax", "jaxlib"):
            return version(name)
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(extras, "version", found)


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_complete_extras_pass(monkeypatch: pytest.MonkeyPatch, cuda: str) -> None:
    own = version("jaxlib")
    packages = {f"jax_cuda{cuda}_plugin": own, f"jax_cuda{cuda}_pjrt": own}
    _installed(monkeypatch, flatbuffers="25", libtpu="0.0.42.1", **packages)
    monkeypatch.setattr(extras, "requires", lambda name: ['libtpu==0.0.42.*; extra == "tpu"'])
    extras.check_extras("gpu")
    extras.check_extras("tpu")


def test_a_missing_compiler_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, flatbuffers="25")
    with pytest.raises(VerifyError, match=r"libtpu, which is not.*\"autopar\[aot-tpu\]\""):
        extras.check_extras("tpu")
    with pytest.raises(VerifyError, match=r"plugin and jax-cuda12-pjrt.*\"autopar\[aot-gpu\]\""):
        extras.check_extras("gpu")


def test_without_flatbuffers_nothing_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, libtpu="0.0.42.1")
    with pytest.raises(VerifyError, match="needs flatbuffers, which is not installed"):
        extras.check_extras("tpu")


def test_a_compiler_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(
        monkeypatch, flatbuffers="25", jax_cuda12_plugin="0.1", jax_cuda12_pjrt="0.1", libtpu="0.1"
    )
    monkeypatch.setattr(extras, "requires", lambda name: ['libtpu==0.0.42.*; extra == "tpu"'])
    with pytest.raises(VerifyError, match=r"jax-cuda12-plugin is 0\.1 but JAX .* goes with"):
        extras.check_extras("gpu")
    with pytest.raises(VerifyError, match=r"libtpu is 0\.1 but JAX .* libtpu 0\.0\.42\.\*"):
        extras.check_extras("tpu")


def test_a_cpu_is_not_compiled_for_ahead_of_time() -> None:
    with pytest.raises(VerifyError, match="no compiler ahead of time for a CPU"):
        extras.check_extras("cpu")
