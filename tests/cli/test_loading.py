"""The user's file: what is wrong with it is told in their terms."""

import os
import sys
from pathlib import Path

import pytest

from autopar.cli.loading import load_target
from autopar.errors import InputError
from tests.cli.running import STEP, run, written


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    written(tmp_path, STEP, "near.py")
    with pytest.raises(InputError, match=r"no file .*gone\.py.*Python files there: near\.py"):
        load_target(f"{tmp_path}/gone.py:train_step")


def test_a_function_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    told = r"train_stepp does not exist in .*Did you mean train_step\? It has example_args, train_s"
    with pytest.raises(InputError, match=told):
        load_target(f"{written(tmp_path)}:train_stepp")


def test_other_arguments_are_named_after_the_step(tmp_path: Path) -> None:
    more = "def long_args():\n    return (3,)\n"
    assert load_target(f"{written(tmp_path, STEP + more)}:train_step:long_args").args == (3,)
    with pytest.raises(InputError, match=r"has no longer_args\(\).*\ndef longer_args\(\):"):
        load_target(f"{written(tmp_path, STEP + more)}:train_step:longer_args")


def test_a_file_changed_within_a_second_is_read_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    more = "def long_args():\n    return (3,)\n"
    file = written(tmp_path, STEP + more)
    found = [load_target(f"{file}:train_step:long_args").args]
    second = file.stat().st_mtime
    written(tmp_path, STEP + more.replace("3", "4"))
    os.utime(file, (second, second))
    found.append(load_target(f"{file}:train_step:long_args").args)
    assert found == [(3,), (4,)]
    assert not list(tmp_path.glob("__pycache__"))


def test_imports_are_found_from_this_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `python -m steps.train` in it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps_of_mine").mkdir()
    written(tmp_path / "steps_of_mine", STEP, "model.py")
    names = "from steps_of_mine.model import example_args, train_step\n"
    train = written(tmp_path / "steps_of_mine", names, "train.py")
    assert load_target(f"{train}:train_step").args


def test_a_name_that_is_no_function(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rate is no function"):
        load_target(f"{written(tmp_path, f'rate = 3{STEP}')}:rate")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def train_step(x): return x", r"has no example_args\(\)"),
        ("def train_step(x): return x\ndef example_args(): return 3", "returned int; return the"),
        ("import sys\nsys.exit(3)", "sys.exit runs when it is imported"),
        ("def train_step(x: return x", "line 1: invalid syntax"),
        ("x = 1\ny = x / 0", r"ZeroDivisionError: division by zero\n  line 2: y = x / 0"),
        (
            "import nothing_of_this_name",
            r"No module named 'nothing_of_this_name'\n  line 1: .*\n  looked for in /",
        ),
        (
            "def train_step(x): return x\ndef example_args():\n    return [][1]",
            r"IndexError: list index out of range\n  line 3: return \[\]\[1\]",
        ),
    ],
)
def test_what_the_file_does_wrong_is_told_with_its_line(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(InputError, match=told):
        load_target(f"{written(tmp_path, text)}:train_step")


def test_a_step_that_does_not_trace_is_told_with_its_line(tmp_path: Path) -> None:
    text = """
    import jax

    def train_step(w):
        return w if w.sum() > 0 else -w

    def example_args():
        return (jax.ShapeDtypeStruct((8,), "float32"),)
    """
    done = run("plan", written(tmp_path, text), "--cluster", "8xcpu")
    assert done.code == 2
    assert "train_step does not trace" in done.err
    assert "mytrain.py, line 5: return w if w.sum() > 0 else -w" in done.err


WRAPPED = """
    import functools
    import jax
    import jax.numpy as jnp

    def logged(fun):
        @functools.wraps(fun)
        def wrapper(*args, **kwargs):
            return fun(*args, **kwargs)
        return wrapper

    @logged
    @logged
    def train_step(w, x{more}):
        loss = jnp.mean(x @ w)
        return w, {result}

    def example_args():
        shape = jax.ShapeDtypeStruct
        return shape((8, 8), "float32"), shape((4, {width}), "float32")
    """
ARGUMENTS = "The arguments are what example_args() of mytrain.py returns"


@pytest.mark.parametrize(
    ("changed", "told", "is_of_arguments"),
    [
        ({"width": "9"}, ["mytrain.py, line 15: loss = jnp.mean(x @ w)"], True),
        (
            {"more": ", key"},
            ["missing 1 required positional argument: 'key' (mytrain.py:14)",
             "mytrain.py, line 14: def train_step(w, x, key):"],
            True,
        ),
        (
            {"result": "float(loss)"},
            ["mytrain.py, line 16: return w, float(loss)", "float(), int() or .item() on what the"],
            False,
        ),
        ({"result": "range(loss.astype(int))"}, ["static argument (static_argnames=...)"], False),
        ({"result": "__import__('numpy').sqrt(loss)"}, ["call the jax.numpy function"], False),
        ({"result": "loss if loss > 0 else w"}, ["jnp.where(condition, a, b)"], False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["plan", "lint"])
def test_errors_of_a_trace_have_the_line_and_a_remedy_that_fits(
    tmp_path: Path, command: str, changed: dict[str, str], told: list[str], is_of_arguments: bool
) -> None:
    text = WRAPPED.format(**{"more": "", "result": "loss", "width": "8", **changed})
    done = run(command, written(tmp_path, text), "--cluster", "8xcpu")
    assert done.code == 2
    for words in told:
        assert words in done.err
    assert (ARGUMENTS in done.err) == is_of_arguments
